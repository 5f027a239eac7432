"""Settings shared by all tests."""

from __future__ import annotations

import torch
from hypothesis import settings

# Ranks are threads or processes that share this machine's cores.
torch.set_num_threads(1)

# The same examples on every run, and nothing written beside the tests.
settings.register_profile(
    "stripes", derandomize=True, deadline=None, max_examples=40, database=None
)
settings.load_profile("stripes")
