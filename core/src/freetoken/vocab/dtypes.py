"""Element types by name: a spec names dtypes by string, so that it needs no torch."""

from __future__ import annotations

ITEMSIZE_BYTES: dict[str, int] = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip

COMPUTE_DTYPES = ("float32", "bfloat16", "float16")


def itemsize_bytes(dtype: str) -> int:
    """Bytes of one element of ``dtype``; ``KeyError`` for a name that is not in the vocabulary."""
    return ITEMSIZE_BYTES[dtype]
