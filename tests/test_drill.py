"""The interface drill: new layouts, world sizes and file formats with no line changed in the core."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from dynadapt import api
from dynadapt.errors import MigrationAborted
from dynadapt.protocols import AuxItem
from dynadapt.testing.seats import run_seats
from dynadapt.testing.states import MemoryAdapter, MemoryState, bits, logical_values
from dynadapt.vps.keys import Key, KeySpec
from dynadapt.vps.layout import RowLayout, file_endpoint
from dynadapt.vps.mesh_layout import Flat, MeshLayout, Shard
from tests import _drill_format

if TYPE_CHECKING:
    from pathlib import Path

GROUPS = [{"names": ["embed"], "hyper": {"lr": 1e-3}}, {"names": [], "hyper": {"lr": 0.0}}]
AUX = (AuxItem("param_groups", GROUPS),)
BUDGET = 64 << 10


@pytest.fixture(autouse=True)
def _adapters() -> None:
    MemoryAdapter.install()
    _drill_format.install()


def _specs() -> tuple[KeySpec, ...]:
    """Tied, frozen, never touched, uneven, empty and 0-dim tensors, in several dtypes."""
    found = []
    for order, (name, shape, dtype, states) in enumerate(
        [
            ("embed", (57, 64), "float32", 2),
            ("empty", (0, 4), "float32", 2),
            ("frozen", (5, 7), "bfloat16", 0),
            ("scale", (), "float32", 2),
            ("down", (6, 13), "float32", 2),
            ("rare", (3, 5), "float32", 1),
            ("up", (13, 6), "float32", 2),
            ("norm", (6,), "float32", 2),
        ]
    ):
        aliases = ("head",) if name == "embed" else ()
        weight = KeySpec(Key(name, "param"), shape, dtype, order=order, group=0, aliases=aliases)
        found.append(weight if states else replace(weight, trainable=False, group=-1))
        for slot in ("exp_avg", "exp_avg_sq") if states else ():
            presence = "none" if states == 1 else "present"
            state = replace(weight, key=Key(name, slot), kind="state", presence=presence)
            found.append(state)
        if states == 2:
            copy = replace(weight, key=Key(name, "compute"), dtype="bfloat16", derived=True)
            found.append(copy)
    mask = Key("mask", "buffer")
    found.append(KeySpec(mask, (9,), "bool", kind="buffer", trainable=False))
    return tuple(sorted(found, key=lambda spec: spec.key))


PLACES = tuple(replace(spec, presence="present") for spec in _specs())
"""The same keys, each with a place, also what was never touched."""


def _zero3(num: int) -> RowLayout:
    """Flat over all seats; state that was never touched is zeros in a flat buffer."""
    placed = {spec.key: (Flat("dp", 2),) for spec in PLACES}
    return MeshLayout({"dp": num}, PLACES, placed).explicit()


def _grid(dp: int, tp: int) -> RowLayout:
    """Columns, rows and copies over tp, copies over dp; never touched state is absent."""
    dims = {"embed": 0, "up": 0, "down": 1}
    placed = {s.key: (Shard("tp", dims[s.key.name]),) for s in PLACES if s.key.name in dims}
    return MeshLayout({"dp": dp, "tp": tp}, PLACES, placed).explicit()


def _values() -> dict[Key, Any]:
    return logical_values(7, _specs())


def _scalars() -> dict[str, dict[str, int | float]]:
    return {spec.key.name: {"step": 5} for spec in _specs() if spec.key.slot == "exp_avg"}


def _full(source: str, seat: int) -> MemoryState | None:
    layout = LAYOUTS[source]
    if seat not in layout.endpoints:
        return None
    never = [spec.key for spec in _specs() if spec.presence == "none"]
    absent = () if source.startswith("zero3") else never
    more: dict[str, Any] = {"scalars": _scalars(), "aux": AUX, "by_alias": seat == 1}
    return MemoryState(layout, seat, _values(), absent=absent, **more)


def _fresh(layout: RowLayout, seat: int) -> MemoryState | None:
    absent = [spec.key for spec in layout.keys if spec.kind == "state"]
    return MemoryState(layout, seat, absent=absent) if seat in layout.endpoints else None


LAYOUTS = {
    "zero3 x 4": _zero3(4),
    "zero3 x 3": _zero3(3),
    "dp2 x tp2": _grid(2, 2),
    "tp3": _grid(1, 3),
}


@pytest.mark.parametrize("target", LAYOUTS)
@pytest.mark.parametrize("source", LAYOUTS)
def test_live_to_live_and_back(source: str, target: str) -> None:
    def seat(session: Any) -> None:
        a, b = _full(source, session.seat), _fresh(LAYOUTS[target], session.seat)
        report = api.migrate(a, b, session=session, budget=BUDGET, timeout=20)
        assert report.fingerprint_source == report.fingerprint_target
        assert report.bytes_moved == report.bytes_minimum
        if b is not None:
            assert b.differing(_values()) == []
            assert b.scalars == _scalars()
            assert tuple(b.aux.values()) == AUX
        back = _fresh(LAYOUTS[source], session.seat)
        api.migrate(b, back, session=session, budget=BUDGET, timeout=20)
        assert back is None or back.differing(_values()) == []

    run_seats(4, seat)


@pytest.mark.parametrize("split", [("flat", 3), ("flat", 1), ("copies", 2)])
@pytest.mark.parametrize("source", ["zero3 x 4", "dp2 x tp2"])
def test_live_to_files_to_another_world(
    source: str, split: _drill_format.Split, tmp_path: Path
) -> None:
    folder = tmp_path / "state"

    def save(session: Any) -> str:
        a = _full(source, session.seat)
        report = api.migrate(a, (folder, split), session=session, timeout=20)
        assert report.bytes_moved == report.bytes_minimum == 0  # seats write, nothing is sent
        own = api.fingerprint(a, session=session)
        assert own == api.fingerprint(folder, session=session) == report.fingerprint_target
        return own

    def load(session: Any) -> None:
        b = _fresh(LAYOUTS["zero3 x 3"], session.seat)
        report = api.migrate(folder, b, session=session, timeout=20)
        assert report.bytes_moved == report.bytes_minimum == 0
        assert b is not None
        assert b.differing(_values()) == []
        assert b.scalars == _scalars()
        assert tuple(b.aux.values()) == AUX

    run_seats(4, save)
    run_seats(3, load)
    values = _values()
    for part in _drill_format.RawFolder().describe(folder).files.values():
        for row in part:  # every copy in every file, not only the first
            buffer = _drill_format.RawFolder().describe(folder).buffers[row.buffer]
            held = buffer.tensor().as_strided(row.box.shape, row.strides, row.offset)
            whole = values[row.key][tuple(map(slice, row.box.lo, row.box.hi))]
            assert bits(held).equal(bits(whole)), (row.key, row.box)


def test_files_to_files(tmp_path: Path) -> None:
    def seat(session: Any) -> None:
        a = _full("zero3 x 3", session.seat)
        api.migrate(a, (tmp_path / "a", ("flat", 3)), session=session, timeout=20)
        api.migrate(tmp_path / "a", (tmp_path / "b", ("flat", 2)), session=session, timeout=20)
        api.migrate(tmp_path / "b", (tmp_path / "c", ("flat", 3)), session=session, timeout=20)

    run_seats(3, seat)
    for number in range(3):
        first, last = (tmp_path / name / f"{number}.raw" for name in "ac")
        assert first.read_bytes() == last.read_bytes()


def test_a_drifted_copy_in_a_file_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "state"

    def save(session: Any) -> None:
        a = _full("zero3 x 3", session.seat)
        api.migrate(a, (folder, ("copies", 2)), session=session, timeout=20)

    run_seats(3, save)
    part = folder / "1.raw"
    raw = bytearray(part.read_bytes())
    raw[3] ^= 1
    part.write_bytes(raw)

    def load(session: Any) -> None:
        api.migrate(folder, _fresh(LAYOUTS["zero3 x 3"], session.seat), session=session, timeout=20)

    with pytest.raises(MigrationAborted, match="replicas differ") as caught:
        run_seats(3, load)
    assert caught.value.reason == "replicas-differ"
    assert str(file_endpoint(str(part))) in str(caught.value)


def test_a_seat_that_cannot_reach_the_files_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    run_seats(
        1,
        lambda session: api.migrate(
            MemoryState(_zero3(1), 0, _values()), (folder, ("flat", 2)), session=session
        ),
    )

    def load(session: Any) -> None:
        path = folder if session.seat else None
        api.migrate(path, _fresh(_zero3(2), session.seat), session=session, timeout=20)

    with pytest.raises(MigrationAborted) as caught:
        run_seats(2, load)
    assert caught.value.reason == "files-unreachable"
