"""Damage to checkpoints: bytes, records, names, numbers and trees, by a seed.

A mutant is a folder that differs from a whole checkpoint in one thing. Trees are damaged below the zip
and the pickle, which stay right, so that what readers make of a file's content is reached too.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import zipfile
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynadapt.adapters.checkpoints._pickle import Global, Opaque, StoredTensor, read_pickle
from dynadapt.adapters.checkpoints._repickle import write_pickle
from dynadapt.adapters.checkpoints._torch_file import read_torch
from dynadapt.adapters.checkpoints._torch_write import lay_out

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator

__all__ = ["KINDS", "Mutant", "mutants"]

HUGE = (1 << 31, 1 << 40, 1 << 62, (1 << 63) - 1, 1 << 70)


@dataclass(frozen=True)
class Mutant:
    """What was done to which file of a checkpoint."""

    kind: str
    number: int
    file: str

    def __str__(self) -> str:
        return f"{self.kind}-{self.number} of {self.file}"


def mutants(rng: random.Random, whole: Path, place: Path, count: int) -> Iterator[Mutant]:
    """`count` mutants of the checkpoint `whole`, one after another at `place`."""
    files = sorted(str(p.relative_to(whole)) for p in whole.rglob("*") if p.is_file())
    sizes = [(whole / name).stat().st_size for name in files]
    for number in range(count):
        kind = list(KINDS)[number % len(KINDS)]
        # Pointers and indexes are small and matter most: every third damage is theirs.
        small = [n for n, size in zip(files, sizes, strict=True) if not n.endswith((".pt", ".bin"))]
        name = rng.choice(small if small and number % 3 == 0 else files)
        _copy(whole, place)
        try:
            KINDS[kind](rng, place / name, files)
        except _NotThisError:
            _bits(rng, place / name, files)
            kind = "bits"
        yield Mutant(kind, number, name)


class _NotThisError(Exception):
    """This file cannot be so damaged."""


def _copy(whole: Path, place: Path) -> None:
    """The same files under other names, which cost no copy: who changes one writes it anew."""
    for path in sorted(place.rglob("*"), reverse=True) if place.is_dir() else ():
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
    for path in sorted(whole.rglob("*")):
        target = place / path.relative_to(whole)
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.is_file():
            os.link(path, target)


def _put(path: Path, data: bytes) -> None:
    path.unlink()  # it is a link to the whole one
    path.write_bytes(data)


# --- bytes -----------------------------------------------------------------------------------


def _bits(rng: random.Random, path: Path, files: list[str]) -> None:
    data = bytearray(path.read_bytes() or b"\0")
    for _ in range(rng.choice([1, 1, 2, 8, 64])):
        data[_place(rng, len(data))] ^= 1 << rng.randrange(8)
    _put(path, bytes(data))


def _place(rng: random.Random, size: int) -> int:
    """Anywhere, but often near the ends, where headers and directories are."""
    near = rng.randrange(min(size, 400))
    return rng.choice([rng.randrange(size), near, size - 1 - near])


def _cut(rng: random.Random, path: Path, files: list[str]) -> None:
    data = path.read_bytes()
    _put(path, data[: rng.choice([0, 1, rng.randrange(len(data) + 1), max(len(data) - 1, 0)])])


def _grown(rng: random.Random, path: Path, files: list[str]) -> None:
    data = path.read_bytes()
    at = rng.choice([0, len(data), rng.randrange(len(data) + 1)])
    _put(path, data[:at] + rng.randbytes(rng.choice([1, 7, 64, 5000])) + data[at:])


def _moved(rng: random.Random, path: Path, files: list[str]) -> None:
    """Two stretches change places, or one is written over another."""
    data = bytearray(path.read_bytes())
    if len(data) < 8:
        raise _NotThisError
    size = rng.randrange(1, min(len(data) // 2, 4096) + 1)
    a, b = (rng.randrange(len(data) - size + 1) for _ in range(2))
    one, other = data[a : a + size], data[b : b + size]
    data[b : b + size] = one
    if rng.random() < 0.5:
        data[a : a + size] = other
    _put(path, bytes(data))


def _numbers(rng: random.Random, path: Path, files: list[str]) -> None:
    """A number of 2, 4 or 8 bytes that a header may hold becomes a huge one."""
    data = bytearray(path.read_bytes())
    width = rng.choice([2, 4, 8])
    if len(data) < width:
        raise _NotThisError
    at = min(_place(rng, len(data)), len(data) - width)
    value = rng.choice([0, 1, (1 << (8 * width)) - 1, 1 << (8 * width - 1), 1 << (8 * width - 2)])
    data[at : at + width] = value.to_bytes(width, "little")
    _put(path, bytes(data))


# --- files -----------------------------------------------------------------------------------


def _swapped(rng: random.Random, path: Path, files: list[str]) -> None:
    """Another file of the checkpoint under this one's name."""
    root = Path(str(path)[: -len(_inside(path, files))])
    _put(path, (root / rng.choice(files)).read_bytes())


def _inside(path: Path, files: list[str]) -> str:
    return max((name for name in files if str(path).endswith(name)), key=len)


def _gone(rng: random.Random, path: Path, files: list[str]) -> None:
    path.unlink()
    what = rng.randrange(5)
    if what == 1:
        path.mkdir()
    elif what == 2:
        path.symlink_to(path)
    elif what == 3:
        path.symlink_to(rng.choice(["/etc/passwd", "/", "nothing"]))
    elif what == 4:
        path.with_name(
            rng.choice([path.name + "x", "zero_pp_rank_7_mp_rank_00_optim_states.pt"])
        ).touch()


OUTSIDE = (
    "../../etc/passwd",
    "/etc/passwd",
    "..",
    ".",
    "",
    "\0",
    "a/../../b",
    "x" * 5000,
    "/dev/zero",
)


def _traversal(rng: random.Random, path: Path, files: list[str]) -> None:
    """A name in a pointer or an index leads out of the folder."""
    data = path.read_bytes()
    names = {Path(name).name.encode() for name in files} | {
        Path(n).parts[0].encode() for n in files
    }
    found = [name for name in sorted(names) if name in data]
    if not found:
        raise _NotThisError
    outside = rng.choice(OUTSIDE).encode()
    if path.suffix == ".json":
        outside = json.dumps(outside.decode())[1:-1].encode()
    _put(path, data.replace(rng.choice(found), outside, rng.choice([1, -1])))


# --- bombs -----------------------------------------------------------------------------------


def _bomb(rng: random.Random, path: Path, files: list[str]) -> None:
    _put(path, BOMBS[rng.choice(list(BOMBS))]())


def _zip_bomb() -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(1 << 25))
        archive.writestr("archive/data/0", bytes(1 << 25))
    return out.getvalue()


def _laughs(depth: int = 60) -> Any:
    """A value that is small in memory, and endless to whoever walks through it."""
    value: Any = ["ha"]
    for _ in range(depth):
        value = [value, value]
    return value


def _torch(tree: Any) -> bytes:
    out = bytearray()
    for at, part in lay_out({}).seal(tree, {}):
        out.extend(bytes(max(at + len(part) - len(out), 0)))
        out[at : at + len(part)] = part
    return bytes(out)


def _itself() -> Any:
    tree: dict[str, Any] = {"module": {}, "param_shapes": [], "ds_config": {}}
    tree["ds_config"]["zero_optimization"] = tree
    tree["optimizer"] = tree
    return tree


BOMBS: dict[str, Callable[[], bytes]] = {
    "zip": _zip_bomb,
    "many records": lambda: _torch({str(i): i for i in range(3000)}),
    "laughs": lambda: _torch(
        {"module": {}, "ds_config": _laughs(), "optimizer_state_dict": _laughs()}
    ),
    "laughing states": lambda: _torch(
        {"optimizer_state_dict": {"base_optimizer_state": _laughs()}}
    ),
    "itself": lambda: _torch(_itself()),
    "laughing pickle": lambda: pickle.dumps(_laughs(), 2),
    "deep pickle": lambda: b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b".",
    "deep json": lambda: b"[" * 100_000 + b"]" * 100_000,
    "long json number": lambda: b'{"weight_map": ' + b"9" * 100_000 + b"}",
    "huge header": lambda: struct.pack("<Q", 1 << 62) + b"{}",
    "long header": lambda: struct.pack("<Q", 50 << 20) + b" " * 1000,
    "memo": lambda: b"\x80\x02Nr" + struct.pack("<I", 0x7FFFFFFF) + b".",
    "bytes": lambda: b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40) + b"x.",
    "frame": lambda: b"\x80\x04\x95" + struct.pack("<Q", 1 << 40) + b"N.",
}


# --- trees -----------------------------------------------------------------------------------


def _tree(rng: random.Random, path: Path, files: list[str]) -> None:
    """One value of the content becomes another, of the same or of a strange kind."""
    if path.suffix == ".json":
        _put(
            path, json.dumps(_damaged(rng, json.loads(path.read_bytes()), json_only=True)).encode()
        )
    elif path.suffix == ".safetensors":
        data = path.read_bytes()
        (length,) = struct.unpack_from("<Q", data)
        header = _damaged(rng, json.loads(data[8 : 8 + length]), json_only=True)
        text = json.dumps(header).encode()
        _put(path, struct.pack("<Q", len(text)) + text + data[8 + length :])
    elif path.read_bytes()[:2] == b"PK" and path.suffix != ".distcp":
        _put(path, _retorched(path, lambda tree: _damaged(rng, tree)))
    elif path.read_bytes()[:1] == b"\x80":
        tree = _damaged(rng, read_pickle(path.read_bytes(), str(path)))
        _put(path, _pickled(tree))
    else:
        raise _NotThisError


def _pickled(tree: Any) -> bytes:
    try:
        return write_pickle(tree)
    except (pickle.PicklingError, RecursionError, AttributeError, TypeError) as error:
        raise _NotThisError from error


def _retorched(path: Path, change: Callable[[Any], Any]) -> bytes:
    """A torch file with another tree over the same storages, and right check sums."""
    file = read_torch(str(path))
    raw = path.read_bytes()
    data = {name: raw[at : at + n] for name, (at, n) in file.storages.items()}
    frame = lay_out({name: len(value) for name, value in data.items()})
    out = bytearray(frame.size)
    for name, (at, n) in frame.places.items():
        out[at : at + n] = data[name]
    tree = change(file.tree)
    _pickled(tree)
    for at, part in frame.seal(tree, {n: zlib.crc32(v) for n, v in data.items()}):
        out.extend(bytes(max(at + len(part) - len(out), 0)))
        out[at : at + len(part)] = part
    return bytes(out)


def _damaged(rng: random.Random, tree: Any, *, json_only: bool = False) -> Any:
    """A tree with one value changed, dropped, or put under another's name."""
    places = list(_places(tree))
    if not places:
        raise _NotThisError
    path = rng.choice(places)
    # The upper levels have few places, and decide more.
    path = path[: rng.randrange(1, len(path) + 1)] if rng.random() < 0.5 else path
    donor = rng.choice(places)
    return _changed(rng, tree, tree, path, donor, json_only)


def _places(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if len(path) > 12:
        return
    parts = _parts(tree)
    for key, value in parts:
        yield (*path, key)
        yield from _places(value, (*path, key))


def _parts(tree: Any) -> list[tuple[Any, Any]]:
    if isinstance(tree, dict):
        return list(tree.items())
    if isinstance(tree, StoredTensor):
        return [(name, getattr(tree, name)) for name in ("dtype", "shape", "strides", "offset")]
    if isinstance(tree, list | tuple):
        return list(enumerate(tree))
    if isinstance(tree, Opaque):
        state = [("state", tree.state)] if tree.state is not None else []
        return [
            *state,
            *(("items", i) for i in ([tree.items] if tree.items else [])),
            ("args", tree.args),
        ]
    return []


def _at(tree: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        tree = dict(_parts(tree))[key]
    return tree


def _changed(
    rng: random.Random,
    root: Any,
    tree: Any,
    path: tuple[Any, ...],
    donor: tuple[Any, ...],
    json_only: bool,
) -> Any:
    if not path:
        return rng.choice(_others(rng, tree, _at(root, donor), json_only))
    key = path[0]
    if isinstance(tree, dict) and len(path) == 1 and rng.random() < 0.3:
        rest = {k: v for k, v in tree.items() if k != key}
        if rng.random() < 0.5:
            return rest  # dropped
        other = rng.choice(["", "x" * 3000, "\ud800", 7, None, (1, 2), *list(tree)[:5]])
        if json_only:
            other = str(other)
        return {**rest, other: tree[key]}
    new = _changed(rng, root, dict(_parts(tree))[key], path[1:], donor, json_only)
    if isinstance(tree, dict):
        return {k: new if k == key else v for k, v in tree.items()}
    if isinstance(tree, StoredTensor):
        return replace(tree, **{key: new})
    if isinstance(tree, Opaque):
        made = Opaque(tree.made_by, tree.args, tree.kwargs, tree.new, tree.state, tree.items)
        setattr(made, key, new)
        return made
    parts = [new if i == key else v for i, v in enumerate(tree)]
    return parts if isinstance(tree, list) else type(tree)(parts)


def _others(rng: random.Random, value: Any, donor: Any, json_only: bool) -> list[Any]:
    """What a value may become."""
    found: list[Any] = [
        None,
        -1,
        0,
        1.5,
        float("nan"),
        "",
        "x",
        [],
        {},
        True,
        donor,
        rng.choice(HUGE),
    ]
    found += [[value], {"a": value}, [[[]]], "../../x"]
    if type(value) is int:
        found += [value + 1, value - 1, -value, value * 2, *HUGE] * 2
    if isinstance(value, str):
        found += [value + "x", value[1:], value.upper(), "float8_e4m3fn", "float64", "bool"] * 2
    if isinstance(value, list | tuple):
        found += [value[1:], value[:-1], [*value, *value], value[::-1], [*value, 2]] * 2
    if isinstance(value, dict):
        found += [dict(list(value.items())[1:]), dict(list(value.items())[::-1])] * 2
    if json_only:
        return [other for other in found if not isinstance(other, tuple)]
    strange = Opaque(Global("os", "system"), ("x",))
    found += [(), b"x", {1}, Global("os", "system"), strange, (value,)]
    if isinstance(value, StoredTensor):
        longer = tuple(n + 1 for n in value.shape)
        storage = value.storage
        found += [
            replace(value, shape=longer),
            replace(value, offset=rng.choice([1, *HUGE[:3]])),
            replace(value, shape=(1 << 40,), strides=(0,)),
            replace(value, shape=value.shape * 3, strides=value.strides * 3),
            replace(value, storage=storage._replace(name="nothing")),
            replace(value, storage=storage._replace(numel=1 << 62)),
            replace(value, dtype="float64"),
            replace(value, shape=value.shape[::-1], strides=value.strides[::-1]),
        ] * 2
    return found


KINDS: dict[str, Callable[[random.Random, Path, list[str]], None]] = {
    "bits": _bits,
    "tree": _tree,
    "cut": _cut,
    "numbers": _numbers,
    "tree, again": _tree,
    "grown": _grown,
    "moved": _moved,
    "swapped": _swapped,
    "gone": _gone,
    "traversal": _traversal,
    "tree, once more": _tree,
    "bomb": _bomb,
}
