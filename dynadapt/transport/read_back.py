"""What was written, found again: a row whose bytes still have their check sum keeps its sum.

A check sum is read at several times the pace of a weighted sum. It says that the bytes are those of which
the sums were taken; that they mean the same is for the reader to say: by key, box, dtype and where it lies.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Event
from typing import TYPE_CHECKING

from dynadapt.errors import Refused
from dynadapt.files import check_sum
from dynadapt.transport.forks import Forks
from dynadapt.transport.progress import Stopped
from dynadapt.vps.box import row_major_strides
from dynadapt.vps.keys import itemsize

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from dynadapt.files import FileBuffer
    from dynadapt.vps.box import Box
    from dynadapt.vps.keys import Key
    from dynadapt.vps.layout import Row

__all__ = ["RowInFile", "Stretch", "crc_of", "found_again", "row_in_file"]


@dataclass(frozen=True, slots=True)
class RowInFile:
    """A row that lies row-major in a file from a byte on."""

    key: Key
    box: Box
    dtype: str
    path: str
    start: int


@dataclass(frozen=True, slots=True)
class Stretch:
    """A buffer of a file that was filled: its rows, their sums in its dtype, the check sum of its bytes."""

    buffer: FileBuffer
    rows: Sequence[Row]
    sums: Sequence[int]
    crc: int


def row_in_file(row: Row, buffer: FileBuffer) -> RowInFile | None:
    """The row and where it lies; None if its elements are not in order there."""
    if row.strides != row_major_strides(row.box.shape):
        return None
    start = buffer.offset + row.offset * itemsize(buffer.dtype)
    return RowInFile(row.key, row.box, buffer.dtype, buffer.path, start)


def crc_of(buffer: FileBuffer, stop: Callable[[], bool] = lambda: False) -> int:
    """The check sum of the bytes a buffer has now; raises `Refused` (`unreadable-file`, `truncated-file`).

    Raises `Stopped` where `stop` says so.
    """

    def look() -> None:
        if stop():
            raise Stopped(buffer.path)

    return check_sum(buffer.bytes(), look)


@contextmanager
def found_again(
    written: Sequence[Stretch], *, threads: int = 2, fork: bool = False
) -> Iterator[Callable[[], Mapping[RowInFile, int]]]:
    """The sums of all rows whose buffers have the bytes that were written; of others there is none.

    Threads, or with `fork` processes, are at work until the answer is asked for.
    """

    forks, stop = Forks() if fork and threads > 1 else None, Event()
    ends = stop.is_set if forks is None else forks.is_set

    def whole(numbers: range) -> list[bool]:
        return [_whole(written[i], ends) for i in numbers]

    step = max(len(written) // (threads * 8), 1)
    lots = [range(i, min(i + step, len(written))) for i in range(0, len(written), step)]
    at_work = (
        _begun(whole, lots, threads, stop) if forks is None else forks.begun(whole, lots, threads)
    )
    with at_work as answers:
        yield lambda: _known(written, [same for lot in answers() for same in lot])


def _whole(stretch: Stretch, stop: Callable[[], bool]) -> bool:
    try:
        return crc_of(stretch.buffer, stop) == stretch.crc
    except Refused:
        return False  # whoever reads the rows says what is wrong


@contextmanager
def _begun(
    task: Callable[[range], list[bool]], lots: Sequence[range], threads: int, stop: Event
) -> Iterator[Callable[[], list[list[bool]]]]:
    with ThreadPoolExecutor(threads) as pool:
        try:
            tasks = [pool.submit(task, lot) for lot in lots]
            yield lambda: [each.result() for each in tasks]
        except BaseException:
            stop.set()
            raise
        finally:
            pool.shutdown(cancel_futures=True)


def _known(written: Sequence[Stretch], same: Sequence[bool]) -> Mapping[RowInFile, int]:
    found = {}
    for stretch, is_same in zip(written, same, strict=True):
        if is_same:
            for row, value in zip(stretch.rows, stretch.sums, strict=True):
                own = row_in_file(row, stretch.buffer)
                if own is not None:
                    found[own] = value
    return found
