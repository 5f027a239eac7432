"""When garbage is collected."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["collected_later"]


@contextmanager
def collected_later() -> Iterator[None]:
    """What is done makes many small values that stay, and every collection would walk all of them.

    >>> with collected_later():
    ...     gc.isenabled()
    False
    >>> gc.isenabled()
    True
    """
    if not gc.isenabled():  # the program's own wish, or one of this is around
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
