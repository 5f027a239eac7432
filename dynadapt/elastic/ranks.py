"""Several processes that make one checkpoint together: they meet and talk through files in its hidden folder.

No framework and no port is needed, only a file system that all of them see. Rank 0 makes the folder; the
others show themselves in it, each with a token of its own, until rank 0 has answered with the tokens of all
and a number for this run: what an ended run has left answers nobody. Each then shows every second that it
lives. A rank that fails says why, and all end with that.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

from dynadapt.errors import DynadaptError, Finding, Refused

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["Ranks", "job_name", "shares"]

_BEAT = 1.0
_POLL = 0.02
_PARTING = 30.0


def job_name() -> str:
    """What the processes of one launch have in common, and those of another have not, as launchers say it."""
    told = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID", "SLURM_STEP_ID")
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
    text = "\0".join((restart, *(os.environ.get(name, "") for name in told)))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def shares(sizes: Mapping[str, int], world: int) -> list[list[str]]:
    """Names by rank, so that each has about as many bytes.

    >>> shares({"a": 5, "b": 3, "c": 3, "d": 1}, 2)
    [['a', 'd'], ['b', 'c']]
    """
    found: list[list[str]] = [[] for _ in range(world)]
    loads = [0] * world
    for name in sorted(sizes, key=lambda n: (-sizes[n], n)):
        least = min(range(world), key=lambda r: (loads[r], len(found[r]), r))
        found[least].append(name)
        loads[least] += sizes[name]
    return found


@dataclass
class Ranks:
    """This process is `rank` of `world`; `timeout` is how long another may show no sign of life.

    `stop` is set when one of the others has failed or is gone, and `trouble` is then what to raise; `lost`
    says that one is gone without a word.
    """

    rank: int
    world: int
    timeout: float = 60.0
    job: str = field(default_factory=job_name)
    stop: Event = field(default_factory=Event)
    trouble: Refused | None = None
    lost: bool = False
    _folder: Path | None = None
    _run: str = ""
    _ended: Event = field(default_factory=Event)
    _beat: Thread | None = None

    @property
    def others(self) -> list[int]:
        """All but this one."""
        return [rank for rank in range(self.world) if rank != self.rank]

    def meet(self, folder: Path) -> None:
        """Wait until all ranks are there; raises `Refused` (`rank-lost`) if some do not come."""
        self._folder = folder
        until = time.monotonic() + self.timeout
        token = secrets.token_hex(8)
        if not self.rank:
            _anew(folder, token)
            tokens: dict[str, str] = {}
            while len(tokens) < self.world - 1:
                for rank in self.others:
                    if (told := self._read(f"{self.job}.hello.{rank}")) is not None:
                        tokens[str(rank)] = told
                self._wait(until, [r for r in self.others if str(r) not in tokens])
            self._run = token
            self._write(f"{self.job}.go", {"run": token, "tokens": tokens})
        else:
            while not self._run:
                if folder.is_dir() and self._read(f"{self.job}.hello.{self.rank}") != token:
                    with suppress(OSError):  # rank 0 may be removing an old folder
                        self._write(f"{self.job}.hello.{self.rank}", token)
                told = self._read(f"{self.job}.go") or {}
                if told.get("tokens", {}).get(str(self.rank)) == token:
                    self._run = told["run"]
                self._wait(until, [] if self._run else [0])
        self._beat = Thread(target=self._live, daemon=True)
        self._beat.start()

    def _wait(self, until: float, lacking: list[int]) -> None:
        if not lacking:
            return
        if time.monotonic() > until:
            self.lost = True
            names = ", ".join(map(str, lacking))
            cause = (
                f"did not come within {self.timeout:g} s: WORLD_SIZE says {self.world} processes"
            )
            fix = "start all of them, on a file system that they share, or unset WORLD_SIZE"
            raise Refused([Finding("rank-lost", f"rank {names}", cause, fix)])
        time.sleep(_POLL)

    def post(self, name: str, value: Any = None) -> None:
        """Tell the others."""
        self._write(f"{self._run}.{name}.{self.rank}", value)

    def wait(self, name: str, *ranks: int) -> list[Any]:
        """What each of the ranks has told under a name; raises what kept one of them from it."""
        found: list[Any] = []
        for rank in ranks:
            while (told := self._read(f"{self._run}.{name}.{rank}", whole=True)) is None:
                self.check()
                time.sleep(_POLL)
            found.append(told[0])
        return found

    def check(self) -> None:
        """Raises the trouble, if there is any."""
        if self.trouble is not None:
            raise self.trouble

    def fail(self, error: BaseException) -> None:
        """Tell the others why this rank ends, unless it was told by one of them."""
        if not self._run or self.trouble is not None:
            return
        findings = error.findings if isinstance(error, Refused) else ()
        told = [finding.to_json() for finding in findings]
        reason = error.reason if isinstance(error, DynadaptError) else "rank-failed"
        if not told:
            told = [Finding(reason, "", f"{type(error).__name__}: {error}").to_json()]
        with suppress(OSError):
            self.post("failed", told)

    def part(self) -> None:
        """Rank 0 waits a little until all have read what was told last; the others say that they have."""
        with suppress(OSError):
            if self.rank:
                self.post("bye")
            until = time.monotonic() + _PARTING
            while self._run and not self.rank and time.monotonic() < until:
                if all(self._told("bye", r) or self._told("failed", r) for r in self.others):
                    break
                time.sleep(_POLL)
        self.vanish()

    def vanish(self) -> None:
        """Show no more signs of life: if they still wait for this rank, the others end with `rank-lost`."""
        self._ended.set()
        if self._beat is not None:
            self._beat.join()

    def _live(self) -> None:
        seen: dict[int, tuple[int, float]] = {}
        beats = 0
        while not self._ended.wait(min(_BEAT, self.timeout / 4)):
            beats += 1
            with suppress(OSError):
                self.post("alive", beats)
            now = time.monotonic()
            for rank in self.others:
                failed = self._read(f"{self._run}.failed.{rank}", whole=True)
                if failed is not None:
                    self._end([_from(rank, told) for told in failed[0]])
                    return
                if self._told("bye", rank):
                    seen.pop(rank, None)
                    continue
                count = self._read(f"{self._run}.alive.{rank}") or 0
                last = seen.setdefault(rank, (count, now))
                if count != last[0]:
                    seen[rank] = (count, now)
                elif now - last[1] > self.timeout and not self._told("done", 0):
                    self.lost = True
                    cause = f"has shown no sign of life for {self.timeout:g} s"
                    fix = "see its own output; --resume (resume=True) continues what is done"
                    self._end([Finding("rank-lost", f"rank {rank}", cause, fix)])
                    return

    def _end(self, findings: list[Finding]) -> None:
        self.trouble = Refused(findings)
        self.stop.set()

    def _told(self, name: str, rank: int) -> bool:
        return self._folder is not None and (self._folder / f"{self._run}.{name}.{rank}").exists()

    def _write(self, name: str, value: Any) -> None:
        if self._folder is None:
            raise RuntimeError("nobody was met")
        part = self._folder / f"{name}.{os.getpid()}.part"
        part.write_text(json.dumps([value]))
        part.replace(self._folder / name)

    def _read(self, name: str, *, whole: bool = False) -> Any:
        """What a file says, None if it is not there; `whole`: in a list, so that None can be told."""
        if self._folder is None:
            return None
        try:
            told = json.loads((self._folder / name).read_bytes())
        except OSError:
            return None
        return told if whole else told[0]


def _anew(folder: Path, token: str) -> None:
    """An empty folder. One that is left over is moved first: others may write into it as it is removed."""
    while True:
        try:
            folder.mkdir()
        except FileExistsError:
            old = folder.rename(folder.with_name(f"{folder.name}.{token}"))
            shutil.rmtree(old, ignore_errors=True)
        else:
            return


def _from(rank: int, told: Mapping[str, str]) -> Finding:
    where = f"rank {rank}" + (f": {told['where']}" if told["where"] else "")
    return Finding(told["reason"], where, told["cause"], told["fix"])
