"""Random streams belong to a place in the mesh (dp, tp, pp), not to a process: carry them there."""

from __future__ import annotations

import hashlib
import random
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np

from dynadapt.protocols import Outcome

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dynadapt.elastic.side import Side
    from dynadapt.protocols import OutcomeKind
    from dynadapt.transport.control import Control

__all__ = ["Coordinate", "apply", "capture", "gather", "hand_out", "put", "stream_for"]

Coordinate = tuple[int, int, int]


def coordinate_of(place: Mapping[str, int]) -> Coordinate:
    """(dp, tp, pp) of a described coordinate; what is not said is 0.

    >>> coordinate_of({"dp": 2})
    (2, 0, 0)
    """
    return (place.get("dp", 0), place.get("tp", 0), place.get("pp", 0))


def capture() -> dict[str, Any]:
    """This process's streams: Python's, NumPy's, torch's CPU and, where in use, the CUDA device's."""
    import torch

    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    streams: dict[str, Any] = {
        "python": (version, np.array(words, np.int64), gauss),
        "numpy": (str(kind), np.asarray(keys), int(position), int(has_gauss), float(cached)),
        "torch": torch.get_rng_state().numpy(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        streams["cuda"] = torch.cuda.get_rng_state().numpy()
    return streams


def apply(streams: Mapping[str, Any]) -> None:
    """Set this process's streams to captured ones."""
    import torch

    version, words, gauss = streams["python"]
    random.setstate((version, tuple(int(w) for w in words), gauss))
    np.random.set_state(tuple(streams["numpy"]))
    torch.set_rng_state(torch.from_numpy(np.array(streams["torch"])))
    if "cuda" in streams and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.from_numpy(np.array(streams["cuda"])))


def reseed(seed: int) -> None:
    """Seed every stream of this process from one number."""
    import torch

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed % 2**63)


def put(stream: Mapping[str, Any] | int) -> None:
    """Set this process's streams: to captured ones, or from a seed."""
    if isinstance(stream, int):
        reseed(stream)
    else:
        apply(stream)


def stream_for(
    place: Coordinate, sources: Mapping[Coordinate, Mapping[str, Any]]
) -> tuple[Mapping[str, Any] | int, Outcome]:
    """The streams (or a seed) for a target place, and what that is worth.

    The same place's stream is exact. Without one, the stream of the same data rank is shared (tensor-
    and pipeline-parallel ranks of one data rank draw alike). A new data rank gets a seed derived from
    the first rank's stream and its own place.
    """
    name = f"rng/dp{place[0]}-tp{place[1]}-pp{place[2]}"
    kind: OutcomeKind
    if place in sources:
        return sources[place], Outcome(name, "exact")
    same = sorted(source for source in sources if source[0] == place[0])
    if same:
        kind = "exact" if place[1:] == (0, 0) else "derived"
        return sources[same[0]], Outcome(name, kind, f"the stream of data rank {place[0]}")
    first = np.asarray(sources[min(sources)]["torch"]).tobytes()
    digest = hashlib.blake2b(first + repr(place).encode(), digest_size=8).digest()
    note = "a new data rank: seeded from the first rank's stream and this place"
    return int.from_bytes(digest, "little"), Outcome(name, "reseeded", note)


def gather(
    control: Control, source: Side, target: Side
) -> dict[Coordinate, Mapping[str, Any]] | None:
    """The source's streams by place, if the place of any seat changes. All seats call it."""
    here = {seat: coordinate_of(place) for seat, place in source.coordinates.items()}
    there = {seat: coordinate_of(place) for seat, place in target.coordinates.items()}
    if not here or all(here.get(seat) == place for seat, place in there.items()):
        return None
    mine = capture() if control.seat in here else None
    told = control.gather_values("streams", mine)
    return {here[s]: told[s] for s in sorted(here) if told.get(s) is not None}


def hand_out(
    streams: Mapping[Coordinate, Mapping[str, Any]], target: Side, seat: int
) -> list[Outcome]:
    """Give this seat the streams of its new place; says what every place got. After the commit.

    The state has moved by then, and a stream is not worth losing it: a failure is a warning.
    """
    outcomes = []
    for other, place in sorted(target.coordinates.items()):
        stream, outcome = stream_for(coordinate_of(place), streams)
        outcomes.append(outcome)
        if other == seat:
            try:
                put(stream)
            except Exception as error:
                warnings.warn(f"random streams could not be set: {error!r}", stacklevel=2)
    return outcomes
