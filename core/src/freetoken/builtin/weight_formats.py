"""The weight formats that ship with the core: plain dtypes, and the block types of GGUF."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from math import prod

from freetoken.plugin.markers import hookimpl
from freetoken.plugin.specs import WeightCodec, WeightFormatSpec
from freetoken.vocab.dtypes import itemsize_bytes
from freetoken.weights.ggml_types import BLOCK_TYPES

# dtype → (safetensors' name, number in GGUF files)
_PLAIN = {"float32": ("F32", 0), "float16": ("F16", 1), "bfloat16": ("BF16", 30)}


@hookimpl
def freetoken_weight_formats() -> Iterable[WeightFormatSpec]:
    """Every plain dtype and every GGUF block type there is a reference for."""
    return (*(_plain(name) for name in _PLAIN), *(_block(name) for name in BLOCK_TYPES))


def _plain(dtype: str) -> WeightFormatSpec:
    safetensors_dtype, number = _PLAIN[dtype]
    return WeightFormatSpec(
        name=dtype,
        summary=f"plain {dtype}, in safetensors and GGUF",
        num_bytes=partial(_plain_bytes, itemsize_bytes(dtype)),
        codec=_plain_codec,
        ggml_type=number,
        safetensors_dtype=safetensors_dtype,
    )


def _block(name: str) -> WeightFormatSpec:
    kind = BLOCK_TYPES[name]
    return WeightFormatSpec(
        name=f"gguf.{name}",
        summary=f"GGUF {name.upper()}: {kind.bits:g} bits a weight, blocks of {kind.block}",
        num_bytes=partial(_block_bytes, kind.block, kind.block_bytes),
        codec=partial(_block_codec, name),
        block=kind.block,
        ggml_type=kind.number,
    )


def _plain_bytes(itemsize: int, shape: tuple[int, ...]) -> int:
    return prod(shape) * itemsize


def _block_bytes(block: int, block_bytes: int, shape: tuple[int, ...]) -> int:
    return prod(shape) // block * block_bytes


def _plain_codec() -> WeightCodec:
    from freetoken.weights.codecs import PlainCodec

    return PlainCodec()


def _block_codec(name: str) -> WeightCodec:
    from freetoken.weights.codecs import BlockCodec

    return BlockCodec(name)
