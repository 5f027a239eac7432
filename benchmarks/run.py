"""The benchmarks, each beside its peer in the same run. `make bench`, or `python benchmarks/run.py`."""

from __future__ import annotations

import argparse
import fnmatch
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import _live, _local, _offline, _scale
from benchmarks._results import table, write

CASES = {
    "live": _live.cases,
    "certificate": _local.certificate,
    "plan": _local.planning,
    "scale": _scale.cold_plans,
    "simulate": _scale.simulations,
    "offline": _offline.cases,
}


def main() -> None:
    """Run what was asked for; a full run is written down."""
    from rich.console import Console

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", metavar="PATTERN", default="*", help=f"of {', '.join(CASES)}")
    parser.add_argument("--quick", action="store_true", help="small cases, few rounds")
    parser.add_argument("--size", choices=_offline.SIZES, help="of the checkpoint of `offline`")
    parser.add_argument("--write", action="store_true", help="keep what `--only` ran, too")
    arguments = parser.parse_args()
    chosen = [name for name in CASES if fnmatch.fnmatch(name, arguments.only)]
    if not chosen:
        parser.error(f"{arguments.only!r} matches none of {', '.join(CASES)}")
    full = not arguments.quick and arguments.size is None
    if arguments.write and not full:
        parser.error("small cases are not kept")
    rounds = 3 if arguments.quick else 7
    cases = {**CASES, "offline": partial(_offline.cases, size=arguments.size)}
    results = {name: cases[name](rounds, arguments.quick) for name in chosen}
    console = Console()
    every = [result for own in results.values() for result in own]
    console.print(table(every))
    for result in every:
        if result.note:
            console.print(f"[bold]{result.name}[/]: {result.note}", highlight=False)
    if full and (arguments.write or len(chosen) == len(CASES)):
        write(results)


if __name__ == "__main__":
    main()
