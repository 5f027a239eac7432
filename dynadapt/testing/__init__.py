"""The test kit for people who write adapters and channels."""
