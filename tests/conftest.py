"""Fixtures and settings shared by all tests."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from tests import _ranks

if TYPE_CHECKING:
    from collections.abc import Iterator

# The same examples on every run: a red test must be red for the next person too. The nightly run
# looks further.
settings.register_profile("default", derandomize=True, deadline=None, max_examples=100)
settings.register_profile("nightly", derandomize=True, deadline=None, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.fixture(scope="session", autouse=True)
def _end_pools() -> Iterator[None]:
    yield
    _ranks.close_pools()


@pytest.fixture
def ranks2() -> _ranks.Pool:
    """Two warm ranks."""
    return _ranks.pool(2)


@pytest.fixture
def ranks4() -> _ranks.Pool:
    """Four warm ranks."""
    return _ranks.pool(4)
