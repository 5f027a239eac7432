"""The main job, on real engines: a ZeRO-3 run becomes TP x DP in the middle of training, and back."""
