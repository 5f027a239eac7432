"""`python -m tests.faults`: every fault, or those that a pattern matches."""

from __future__ import annotations

import argparse
import fnmatch
import sys
import time
from typing import TYPE_CHECKING

from benchmarks._results import write_faults
from tests import _ranks
from tests.faults._fault import every_fault, some_faults
from tests.faults._run import run_faults

if TYPE_CHECKING:
    from tests.faults._judge import Verdict


def _row(verdict: Verdict) -> dict[str, str | int | float]:
    fault = verdict.fault
    names = ("kind", "phase", "call", "nth", "rank", "source", "target", "mode")
    row = {name: getattr(fault, name) for name in names}
    outcome = {"outcome": verdict.outcome, "seconds": round(verdict.seconds, 2)}
    return {**row, **outcome, "kept": not verdict.complaints}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", metavar="PATTERN", default="*")
    parser.add_argument("--some", action="store_true", help="the forty of the tests")
    parser.add_argument("--lanes", type=int, default=2)
    parser.add_argument("--write", action="store_true", help="keep the counts in benchmarks/")
    arguments = parser.parse_args()
    faults = [
        fault
        for fault in (some_faults() if arguments.some else every_fault())
        if fnmatch.fnmatch(str(fault), arguments.only)
    ]
    began = time.monotonic()

    def tell(verdict: Verdict) -> None:
        print(f"{verdict.outcome:7} {verdict.seconds:5.1f} s  {verdict.fault}", flush=True)
        for complaint in verdict.complaints:
            print(f"    {complaint}", flush=True)

    verdicts = run_faults(faults, arguments.lanes, tell)
    print(f"{len(verdicts)} faults in {time.monotonic() - began:.0f} s")
    _ranks.close_pools()
    if arguments.write:
        write_faults([_row(verdict) for verdict in verdicts])
    sys.exit(any(verdict.complaints for verdict in verdicts))


if __name__ == "__main__":
    main()
