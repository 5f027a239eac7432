"""Fixtures and settings shared by all tests."""

from __future__ import annotations

import os
from pathlib import Path
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
# Tables are as wide as the terminal, and tests read them wherever they run.
os.environ["COLUMNS"] = "120"
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Which tests run in one process under `make test`: those that share ranks and checkpoints."""
    if not config.pluginmanager.hasplugin("xdist"):
        return
    here = Path(__file__).parent
    for item in items:
        own = item.path.relative_to(here).parts if item.path.is_relative_to(here) else ("doctests",)
        group = own[0] if own[0] in {"live", "offline", "faults", "doctests"} else "/".join(own)
        item.add_marker(pytest.mark.xdist_group(group))


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
