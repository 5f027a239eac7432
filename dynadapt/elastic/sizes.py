"""Sizes in bytes, as people write them."""

from __future__ import annotations

import re

from dynadapt.errors import Finding, Refused

__all__ = ["size_of"]

UNITS = {"": 1, "b": 1, "kb": 1000, "mb": 1000**2, "gb": 1000**3, "tb": 1000**4}
UNITS |= {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}


def size_of(said: int | str) -> int:
    """`"512MiB"`, `"1GB"` or a plain number as bytes; raises `Refused` (`bad-argument`).

    >>> size_of("20KB"), size_of("1.5 GiB"), size_of("1e9"), size_of(4096)
    (20000, 1610612736, 1000000000, 4096)
    """
    text = str(said)
    found = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d{1,2})?)\s*([a-zA-Z]*)", text.strip(), re.ASCII)
    if isinstance(said, bool) or found is None or found[2].lower() not in UNITS:
        cause = "is not a size"
        raise Refused([Finding("bad-argument", repr(said), cause, "write e.g. 512MiB or 5GB")])
    unit = UNITS[found[2].lower()]
    return int(found[1]) * unit if found[1].isdigit() else int(float(found[1]) * unit)
