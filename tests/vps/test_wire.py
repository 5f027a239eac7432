"""The wire form: round trips, golden files, and what has to be refused without allocating."""

from __future__ import annotations

import json
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynadapt.testing import strategies as more
from dynadapt.testing.layouts import random_layout
from dynadapt.vps import wire
from dynadapt.vps.box import Box
from dynadapt.vps.keys import Key, KeySpec
from dynadapt.vps.layout import Row

GOLDEN = Path(__file__).parent.parent / "golden"

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=5) | st.integers(), inner, max_size=4)
    ),
    max_leaves=15,
)


@given(PLAIN)
def test_plain_values_come_back_with_their_types(value: Any) -> None:
    assert wire.encodable(value)
    assert repr(wire.decode(wire.encode(value))) == repr(value)


@pytest.mark.parametrize(
    "dtype", ["?", "u1", "i1", "<i2", "<f2", "<u4", "<f4", "<i8", "<f8", ">f8"]
)
@pytest.mark.parametrize("shape", [(), (0,), (5,), (2, 0, 3), (2, 3)])
def test_arrays_come_back(dtype: str, shape: tuple[int, ...]) -> None:
    array = (np.arange(int(np.prod(shape))) % 2).reshape(shape).astype(dtype)
    found = wire.decode(wire.encode([array, array.T]))
    assert found[0].shape == shape
    assert np.array_equal(found[0], array)
    assert np.array_equal(found[1], array.T)
    assert found[0].flags.writeable


@given(specs=more.key_sets(), seed=more.seeds)
def test_specs_and_rows_come_back(specs: tuple[KeySpec, ...], seed: int) -> None:
    layout = random_layout(seed, specs, (0, 1))
    message = wire.encode([wire.encode_specs(specs), wire.encode_rows(layout.rows(1))])
    found, rows = wire.decode(message)
    assert wire.decode_specs(found) == specs
    assert wire.decode_rows(rows) == layout.rows(1)


def test_more_than_32_bits_of_elements_come_back() -> None:
    huge = 1 << 40
    row = Row(Key("w", "param"), Box((0, huge - 1), (3, huge)), "b", (1 << 62) + 1, (huge, 1))
    assert wire.decode_rows(wire.decode(wire.encode(wire.encode_rows([row])))) == (row,)
    assert wire.decode(wire.encode(1 << 90)) == 1 << 90


@pytest.mark.parametrize("value", [object(), {1, 2}, np.zeros(2, "M8[s]"), 1j, [object()]])
def test_other_values_are_refused(value: Any) -> None:
    assert not wire.encodable(value)
    with pytest.raises(wire.WireError) as caught:
        wire.encode(value)
    assert caught.value.reason == "wire-type"


# --- golden files ---------------------------------------------------------------------------------


def golden_value() -> Any:
    """What `accept.hex` says."""
    spec = KeySpec(
        Key("a.weight", "exp_avg"), (2, 3), "float32", kind="state", aliases=("b.weight",)
    )
    row = Row(spec.key, Box((0, 1), (2, 3)), "flat", 5, (3, 1))
    return {
        "specs": wire.encode_specs([spec]),
        "rows": wire.encode_rows([row]),
        "aux": {"lr": 0.1, "betas": (0.9, 0.95), "big": 2**70, 3: [None, True, "\u00e9"]},
        "bytes": b"\x00\xff",
        "nan": float("nan"),
    }


def _hex(name: str) -> bytes:
    return bytes.fromhex((GOLDEN / name).read_text())


def test_the_bytes_of_version_1_do_not_change() -> None:
    assert wire.VERSION == 1
    assert wire.encode(golden_value()) == _hex("wire-accept.hex")


def test_a_file_of_version_1_is_read() -> None:
    assert repr(wire.decode(_hex("wire-accept.hex"))) == repr(golden_value())


REJECT = [json.loads(line) for line in (GOLDEN / "wire-reject.jsonl").read_text().splitlines()]


def test_the_corpus_is_there() -> None:
    assert len(REJECT) >= 20


@pytest.mark.parametrize("case", REJECT, ids=[case["name"] for case in REJECT])
def test_a_bad_message_is_refused_before_it_allocates(case: dict[str, str]) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(wire.WireError) as caught:
            wire.decode(bytes.fromhex(case["hex"]))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert caught.value.reason == case["reason"]


@given(st.binary(max_size=60))
def test_noise_is_a_wire_error(noise: bytes) -> None:
    with pytest.raises(wire.WireError):
        wire.decode(noise)


@given(st.integers(0, 1000), st.integers(0, 255))
def test_a_damaged_message_is_a_value_or_a_wire_error(at: int, byte: int) -> None:
    data = bytearray(_hex("wire-accept.hex"))
    data[at % len(data)] = byte
    try:
        found = wire.decode(data)
        wire.decode_specs(found["specs"])
        wire.decode_rows(found["rows"])
    except (wire.WireError, KeyError, TypeError):
        pass


@given(st.integers(0, 400))
def test_every_cut_is_refused(length: int) -> None:
    data = _hex("wire-accept.hex")
    with pytest.raises(wire.WireError):
        wire.decode(data[: min(length, len(data) - 8)])


@pytest.mark.parametrize(
    "flat",
    [[0, 0, 0, -3], [0, 0, 0, 9], [0, 0, 0], [9, 0, 0, 0], [-1, 0, 0, 0], [0, 0, 0, 1, 4, 2, 1]],
)
def test_malformed_rows_are_refused(flat: list[int]) -> None:
    item = {"keys": [["w", "param"]], "buffers": ["b"], "rows": np.array(flat)}
    with pytest.raises(wire.WireError) as caught:
        wire.decode_rows(item)
    assert caught.value.reason == "wire-form"


def test_malformed_specs_are_refused() -> None:
    good = wire.encode_specs([KeySpec(Key("w", "param"), (2,), "float32")])[0]
    for change in ({"dtype": "pickle"}, {"shape": [-1]}, {"more": 1}, {"key": ["w"]}):
        with pytest.raises(wire.WireError):
            wire.decode_specs([{**good, **change}])


def _message(header: Any, body: bytes = b"", *, magic: bytes = b"DYNA", version: int = 1) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<4sIQ", magic, version, len(text)) + text + body


def golden_rejects() -> list[dict[str, str]]:
    """How `wire-reject.jsonl` was made."""
    accept = wire.encode(golden_value())
    huge = 1 << 62
    cases: dict[str, tuple[bytes, str]] = {
        "empty": (b"", "short"),
        "cut in the head": (accept[:10], "short"),
        "cut in the header": (accept[:40], "short"),
        "cut in an array": (accept[:-8], "form"),
        "another magic": (b"PK\x03\x04" + accept[4:], "magic"),
        "a pickle": (b"\x80\x04\x95\x0a" + bytes(40), "magic"),
        "version 0": (_message(1, version=0), "version"),
        "version 2": (_message(1, version=2), "version"),
        "absurd header length": (struct.pack("<4sIQ", b"DYNA", 1, huge), "short"),
        "no header": (_message(b""), "json"),
        "not JSON": (_message(b"{"), "json"),
        "NaN": (_message(b"NaN"), "json"),
        "not text": (_message(b"\xff\xfe\xfd"), "json"),
        "deep nesting": (_message(b"[" * 3000), "json"),
        "absurd array": (_message({"$array": ["<f4", [huge], 0]}), "form"),
        "absurd product": (_message({"$array": ["<f4", [1 << 40, 1 << 40], 0]}), "form"),
        "absurd empty array": (_message({"$array": ["<f4", [0, 1 << 70], 0]}), "form"),
        "absurd offset": (_message({"$array": ["<f4", [0], huge]}), "form"),
        "negative size": (_message({"$array": ["<f4", [-1], 0]}), "form"),
        "size is no number": (_message({"$array": ["<f4", ["1"], 0]}, bytes(8)), "form"),
        "objects": (_message({"$array": ["|O", [1], 0]}, bytes(8)), "form"),
        "records": (_message({"$array": [[["a", "<f4"]], [1], 0]}, bytes(8)), "form"),
        "unknown dtype": (_message({"$array": ["<x9", [1], 0]}, bytes(8)), "form"),
        "unknown tag": (_message({"$pickle": "cos"}), "form"),
        "two tags": (_message({"$int": "1", "$tuple": []}), "form"),
        "float out of range": (_message({"$float": "0x1p99999"}), "form"),
        "endless integer": (_message({"$int": "9" * 4400}), "form"),
        "list as a key": (_message({"$dict": [[[], 1]]}), "form"),
    }
    return [
        {"name": name, "reason": f"wire-{reason}", "hex": data.hex()}
        for name, (data, reason) in cases.items()
    ]


def test_the_corpus_is_what_its_maker_makes() -> None:
    assert golden_rejects() == REJECT
