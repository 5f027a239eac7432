"""The benchmarks, each beside its peer in the same run. `make bench`, or `python benchmarks/run.py`."""

from __future__ import annotations

import argparse
import fnmatch
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import _live, _local, _scale
from benchmarks._results import table, write

CASES = {
    "live": _live.cases,
    "certificate": _local.certificate,
    "plan": _local.planning,
    "scale": _scale.cold_plans,
    "simulate": _scale.simulations,
}


def main() -> None:
    """Run what was asked for; only a full run is written down."""
    from rich.console import Console

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", metavar="PATTERN", default="*", help=f"of {', '.join(CASES)}")
    parser.add_argument("--quick", action="store_true", help="small cases, few rounds")
    arguments = parser.parse_args()
    chosen = [name for name in CASES if fnmatch.fnmatch(name, arguments.only)]
    if not chosen:
        parser.error(f"{arguments.only!r} matches none of {', '.join(CASES)}")
    rounds = 3 if arguments.quick else 7
    results = [result for name in chosen for result in CASES[name](rounds, arguments.quick)]
    console = Console()
    console.print(table(results))
    for result in results:
        if result.note:
            console.print(f"[bold]{result.name}[/]: {result.note}", highlight=False)
    if not arguments.quick and len(chosen) == len(CASES):
        write(results)


if __name__ == "__main__":
    main()
