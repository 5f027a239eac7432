"""One state seen over all seats: described, and fingerprinted; and what migrations share with that."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from dynadapt.elastic.checks import disagreements, no_memory
from dynadapt.elastic.naming import renamed
from dynadapt.elastic.parked import is_parked
from dynadapt.elastic.side import Side, unite
from dynadapt.errors import Finding, MigrationAborted, Refused
from dynadapt.protocols import TrainState, Vote
from dynadapt.registry import adapter_for
from dynadapt.transport.certificate import fingerprint
from dynadapt.transport.certify import count
from dynadapt.transport.control import Control, Timeouts
from dynadapt.transport.executor import Storage
from dynadapt.transport.hashing import Wanted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from dynadapt.elastic.settings import Settings
    from dynadapt.elastic.worlds import Session
    from dynadapt.protocols import Described

__all__ = [
    "ballot",
    "control_of",
    "fingerprint_of",
    "parked_findings",
    "refuse",
    "side_of",
    "storage_of",
]


def control_of(session: Session, settings: Settings) -> tuple[int, Control]:
    """The number of the call that is open in this session, and its control."""
    number = session.number()
    timeouts = settings.timeouts if settings.timeouts.phase > 0 else Timeouts()
    control = Control(
        session.store(number),
        session.seat,
        session.seats,
        timeouts,
        on_outcome=lambda: session.close(number),
        leavings=session.leavings,
    )
    return number, control


def side_of(session: Session, x: Any, settings: Settings) -> tuple[Side, Described | None]:
    """Describe one state over all seats; nothing is changed but gathered copies are dropped."""
    _, control = control_of(session, settings)
    try:
        with control.phase("describe", last=True):
            refuse(settings.findings())
            if x is not None:
                refuse(parked_findings("x", x))
            adapter = None if x is None else adapter_for(x)
            with ballot(control, "describe alone") as agree:
                if adapter is not None:
                    adapter.quiesce(x, agree)
            own = None if adapter is None else adapter.describe(x)
            side = unite("described", control, own)
            if side is None:
                raise Refused([Finding("no-state", "x", "no rank passed a state")])
            told = control.gather_values("settings", settings.to_json())
            refuse(disagreements(told))
            side = renamed("tensor", side, settings.source_map, settings.allow)
        return side, own
    finally:
        control.close()


def fingerprint_of(session: Session, x: Any, settings: Settings) -> str:
    """The layout-free fingerprint of a state. All seats call it."""
    side, own = side_of(session, x, settings)
    _, control = control_of(session, settings)
    try:
        with control.phase("fingerprint", last=True):
            refuse(no_memory(own))
            specs = [s for s in side.layout.keys if s.moves]
            wanted = [Wanted(spec, spec.dtype, spec.key) for spec in specs]
            workers = side.readers or control.seats
            storage = storage_of(session, side, own)
            sums = count("own", control, side.layout, storage, wanted, workers)
        return fingerprint(
            side.layout.keys, {s.key: v for s, v in zip(specs, sums.values, strict=True)}
        )
    finally:
        control.close()


@contextmanager
def ballot(control: Control, phase: str) -> Iterator[Vote]:
    """A vote inside a phase: an adapter calls it before it communicates or changes anything.

    It is held once on every seat: by the adapter, or here when the adapter did without or failed first.
    """
    held = False

    def agree() -> None:
        nonlocal held
        if not held:
            held = True
            control.vote(phase)

    try:
        yield Vote(
            agree, lambda work: control.during(_like_here(work), "a gather of the target's own")
        )
    except MigrationAborted:
        raise
    except Exception as error:
        if not held:
            held = True
            control.vote(phase, error)
        raise
    agree()


def _like_here(work: Callable[[], None]) -> Callable[[], None]:
    """The same for another thread: on the device that is current here."""
    import torch

    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return work
    device = torch.cuda.current_device()

    def there() -> None:
        torch.cuda.set_device(device)
        work()

    return there


def parked_findings(where: str, x: Any) -> list[Finding]:
    """A state that was parked and moved away cannot be read."""
    if not is_parked(TrainState.of(x).model):
        return []
    cause = "it was parked and its state moved away: it holds nothing"
    return [Finding("parked", where, cause, "migrate a state into it first")]


def refuse(findings: Iterable[Finding]) -> None:
    """Raise `Refused` with all findings, if there are any."""
    found = tuple(findings)
    if found:
        raise Refused(found)


def storage_of(session: Session, side: Side, own: Described | None, buffers: Any = None) -> Storage:
    """What this seat described, by endpoint and under the names that all seats agreed on."""
    if own is None:
        return Storage({}, {})
    parts = {session.seat: own.rows, **own.files}
    rows = {endpoint: side.canonical(part) for endpoint, part in parts.items()}
    return Storage(rows, own.buffers if buffers is None else buffers)
