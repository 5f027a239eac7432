"""Eight ranks with every framework loaded take gigabytes; nothing but these tests needs so many."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests import _ranks

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="package", autouse=True)
def _end_eight_ranks() -> Iterator[None]:
    yield
    _ranks.pool(8).close()
