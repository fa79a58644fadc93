"""Integers with units, and how people read them."""

from __future__ import annotations

import re

KIB, MIB, GIB = 1024, 1024**2, 1024**3
_SUFFIX = {"": 1, "b": 1, "k": KIB, "kib": KIB, "m": MIB, "mib": MIB, "g": GIB, "gib": GIB,
           "kb": 1000, "mb": 1000**2, "gb": 1000**3}  # fmt: skip


def ceil_div(a: int, b: int) -> int:
    """The smallest integer not below ``a / b``."""
    return -(-a // b)


def format_bytes(num_bytes: int) -> str:
    """``1536`` → ``1.5 KiB``."""
    for unit, size in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} B"


def parse_bytes(text: str | int) -> int:
    """``"1.5 GiB"`` → ``1610612736``; a bare number is bytes. Raises ``ValueError`` naming the accepted forms."""
    if isinstance(text, int):
        return text
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*", text)
    if match is None or match[2].lower() not in _SUFFIX:
        raise ValueError(f"{text!r} is not a size; write bytes, or a number with KiB, MiB or GiB")
    return int(float(match[1]) * _SUFFIX[match[2].lower()])
