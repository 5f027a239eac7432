"""`python -m tests.offline.fuzz`: damaged checkpoints of every format, and what became of them.

Whatever a file holds, a reader answers with a state or with a `DynadaptError`: no other error, no hang,
no memory beyond what the file's size warrants, and nothing of it is ever executed. And no other state
than the whole checkpoint's, where bytes are damaged that have a check sum.
"""

from __future__ import annotations

import argparse
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks._results import write_fuzz
from dynadapt.elastic.checkpoint import open_checkpoint
from dynadapt.elastic.verification import verified
from dynadapt.errors import DynadaptError
from tests import _ranks
from tests.offline._mutants import Mutant, mutants
from tests.offline._seeds import make_seeds

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from dynadapt.elastic.checkpoint import Checkpoint

__all__ = ["Verdict", "fuzzed", "judged"]

SECONDS = 10
"""Of processor time: what one damaged checkpoint of some kilobytes may take, on a busy machine too."""

WAIT = 300
"""Of the clock's: nothing may wait for ever."""

MEMORY = 256 << 20
"""What one may take beyond what the process had."""


@dataclass(frozen=True)
class Verdict:
    """What became of one mutant: `read` (it opened, and nothing was found wrong with it), `refused`,
    `malformed` (refused, by the net under all readers), or a fault.
    """

    format: str
    mutant: Mutant
    outcome: str
    complaint: str = ""


class _HangError(BaseException):
    """Not an `Exception`: nothing on the way catches it."""


SUMMED = (".pt", ".bin", ".pth", ".pkl", ".distcp")
"""Files whose every record has a check sum."""

BYTES = frozenset({"bits", "cut", "grown", "moved", "numbers"})
"""Damage that is below what a check sum is taken of."""


def judged(path: Path, state: str | None = None) -> tuple[str, str]:
    """The outcome of reading a checkpoint, and what is to complain of.

    If a `state` is given (see `state_of`), no other may be read.
    """
    before = _peak(reset=True)
    try:
        with _limits():
            found = open_checkpoint(path)
            problems, _, told = verified(found)
            outcome = "refused" if problems else "read"
            if state is not None and not problems and state != _state(found, told):
                return "silent", _unlike(state, _state(found, told))
    except DynadaptError as error:
        outcome = "malformed" if error.reason == "malformed" else "refused"
    except _HangError:
        return "hang", "".join(traceback.format_exc(limit=-6))
    except BaseException:
        return "error", "".join(traceback.format_exc(limit=-6))
    grown = _peak() - before
    if grown > MEMORY:
        return "memory", f"grew by {grown >> 20} MiB"
    return outcome, ""


def state_of(path: Path) -> str:
    """All that a checkpoint says."""
    found = open_checkpoint(path)
    return _state(found, verified(found).told)


def _unlike(whole: str, other: str) -> str:
    """Where two states differ first."""
    pairs = enumerate(zip(whole, other, strict=False))
    at = max(next((i for i, (a, b) in pairs if a != b), 0) - 100, 0)
    return f"{whole[at : at + 300]}\nis read as\n{other[at : at + 300]}"


def _state(found: Checkpoint, told: Mapping[str, Any]) -> str:
    aux = {path: _said(item.value) for path, item in found.aux.items()}
    return repr((told["fingerprint"], found.scalars, aux, found.keys))


def _said(value: Any) -> Any:
    """A value without what is carried as it is: files, which have bytes that say nothing."""
    if isinstance(value, dict):
        return {k: _said(v) for k, v in value.items()}
    return None if isinstance(value, bytes) else value


@contextmanager
def _limits() -> Iterator[None]:
    """An alarm, and an end to the memory that can be had."""

    def ring(*_: object) -> None:
        raise _HangError

    old = {each: signal.signal(each, ring) for each in (signal.SIGPROF, signal.SIGALRM)}
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + 2 * MEMORY, hard))
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    signal.alarm(WAIT)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.alarm(0)
        for each, handler in old.items():
            signal.signal(each, handler)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _peak(*, reset: bool = False) -> int:
    """The most memory that this process had, or has had since it was reset."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


def fuzzed(seeds: Mapping[str, Path], place: Path, count: int, seed: int = 0) -> Iterator[Verdict]:
    """`count` mutants of every checkpoint in `seeds`, judged."""
    for name, whole in seeds.items():
        rng = random.Random(f"{name} {seed}")
        work = place / "mutant"
        state = state_of(whole)
        for mutant in mutants(rng, whole, work, count):
            summed = mutant.kind in BYTES and mutant.file.endswith(SUMMED)
            yield Verdict(name, mutant, *judged(work, state if summed else None))
        shutil.rmtree(work)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=3000, help="mutants of each format")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="formats with this in their name")
    parser.add_argument("--write", action="store_true", help="keep the counts in benchmarks/")
    arguments = parser.parse_args()
    began = time.monotonic()
    verdicts: list[Verdict] = []
    shown: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        seeds = make_seeds(Path(folder))
        _ranks.close_pools()
        seeds = {name: path for name, path in seeds.items() if arguments.only in name}
        for verdict in fuzzed(seeds, Path(folder), arguments.count, arguments.seed):
            verdicts.append(verdict)
            last = verdict.complaint.strip().rpartition("\n")[2]
            shown[last] += bool(last)
            if verdict.complaint and shown[last] < 3:
                lines = [line[:160] for line in verdict.complaint.splitlines()]
                print(f"{verdict.format}: {verdict.mutant}", *lines, sep="\n", flush=True)
    counts = Counter((v.format, v.outcome) for v in verdicts)
    for (name, outcome), number in sorted(counts.items()):
        print(f"{name:20} {outcome:8} {number}")
    print(f"{len(verdicts)} damaged checkpoints in {time.monotonic() - began:.0f} s")
    if arguments.write:
        rows = [
            {"format": v.format, "kind": v.mutant.kind.partition(",")[0], "outcome": v.outcome}
            for v in verdicts
        ]
        write_fuzz(rows)
    sys.exit(any(verdict.complaint for verdict in verdicts))


if __name__ == "__main__":
    main()
