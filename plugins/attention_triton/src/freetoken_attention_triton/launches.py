"""The launch space: every launch of attention, made here for the step as for its enumeration."""

from __future__ import annotations

from functools import lru_cache

from attrs import evolve, frozen

from freetoken.ops.dependent_launch import dependent_launches, with_dependence
from freetoken.vocab.dtypes import itemsize_bytes
from freetoken.vocab.hardware import Device
from freetoken.vocab.launch import StepPoint, TensorArg, TritonLaunch
from freetoken.vocab.ops import OpShape
from freetoken.vocab.units import ceil_div
from freetoken_attention_triton.tiles import (
    ASSUMED_MULTIPROCESSORS,
    COMBINE_TILE,
    MAX_SPLITS,
    MIN_DECODE_BLOCKS,
    Tile,
    decode_splits,
    decode_tile,
    padded,
    prefill_splits,
    prefill_tile,
)

MODULE = "freetoken_attention_triton.kernels"
ROW_BYTES = 16
LOG2_E = 1.4426950408889634
NO_WINDOW = 0
I32, F32 = TensorArg("int32"), TensorArg("float32")


@frozen
class Geometry:
    """A group's fixed sizes on one device, with the tiles that follow from them."""

    dtype: str
    kv_heads: int
    group: int
    k_dim: int
    v_dim: int
    page_tokens: int
    window: int
    multiprocessors: int
    prefill: Tile
    decode: Tile
    dependent: bool = False
    """Whether decode's kernels may start before their predecessors have ended."""

    @classmethod
    def of(cls, shape: OpShape, device: Device) -> Geometry:
        """From an ``attention`` shape: heads, head sizes, ``window`` (0 for none) and ``page_tokens``."""
        group = shape.q_heads // shape.kv_heads
        v_dim = shape.v_dim or shape.head_dim
        sizes = (shape.head_dim, v_dim, group, shape.dtype, device)
        return cls(
            dtype=shape.dtype,
            kv_heads=shape.kv_heads,
            group=group,
            k_dim=shape.head_dim,
            v_dim=v_dim,
            page_tokens=shape.page_tokens,
            window=shape.window,
            multiprocessors=device.multiprocessors or ASSUMED_MULTIPROCESSORS,
            prefill=prefill_tile(*sizes),
            decode=decode_tile(*sizes),
            dependent=dependent_launches(device),
        )

    @property
    def q_heads(self) -> int:
        return self.kv_heads * self.group

    @property
    def queries(self) -> int:
        """Query tokens of one prefill tile."""
        return self.prefill.rows // padded(self.group, 1)

    def tiles(self, tokens: int, sequences: int) -> int:
        """Prefill tiles that hold any batch of so many tokens over so many sequences."""
        return tokens // self.queries + sequences


@frozen
class Splits:
    """Programs that share a context, in each of a step's two phases; 0 where a phase does not run."""

    prefill: int
    decode: int


def splits(geometry: Geometry, tokens: int, sequences: int, max_context: int, is_decode: bool) -> Splits:
    """Decode steps run the decode phase; a lone sequence runs prefill; other steps run both, each on its sequences."""
    decoding = decode_splits(sequences, geometry.kv_heads, geometry.multiprocessors)
    if is_decode:
        return Splits(0, decoding)
    tiles = geometry.tiles(tokens, sequences)
    filling = prefill_splits(tiles, geometry.kv_heads, geometry.multiprocessors, max_context)
    return Splits(filling, 0 if sequences == 1 else decoding)


@lru_cache(maxsize=8)
def _tensors(dtype: str) -> tuple[tuple[str, TensorArg], ...]:
    data = TensorArg(dtype)
    return (
        ("q", data), ("k_pool", data), ("v_pool", data), ("out", data), ("partial", F32), ("lse", F32),
        ("page_table", I32), ("query_starts", I32), ("context_lens", I32),
    )  # fmt: skip


@lru_cache(maxsize=256)
def _constants(geometry: Geometry, tile: Tile, split: bool) -> tuple[tuple[str, object], ...]:
    itemsize = itemsize_bytes(geometry.dtype)
    return (
        ("KV_HEADS", geometry.kv_heads), ("GROUP", geometry.group), ("D", geometry.k_dim), ("DV", geometry.v_dim),
        ("PAGE", geometry.page_tokens), ("BLOCK_M", tile.rows), ("BLOCK_N", tile.keys),
        ("BLOCK_D", padded(geometry.k_dim)), ("BLOCK_DV", padded(geometry.v_dim)),
        ("STRIDE_MULTIPLE", ROW_BYTES // itemsize), ("WINDOWED", geometry.window != NO_WINDOW), ("SPLIT", split),
        ("PRECISION", "ieee" if itemsize == 4 else "tf32"),
    )  # fmt: skip


def prefill_launch(
    geometry: Geometry, tokens: int, sequences: int, splits: int, q_stride: int, table_stride: int, scale: float
) -> TritonLaunch:
    """Attention of the sequences that bring more than one token, or of the only sequence."""
    tiles = geometry.tiles(tokens, sequences)
    return TritonLaunch(
        kernel=f"{MODULE}:prefill",
        args=(
            *_tensors(geometry.dtype), ("sequences", sequences), ("q_stride", q_stride),
            ("table_stride", table_stride), ("tiles", tiles), ("splits", splits), ("window", geometry.window),
            ("min_query", 1 if sequences == 1 else 2), ("scale", scale * LOG2_E),
        ),
        constexprs=(
            *_constants(geometry, geometry.prefill, splits > 1), ("GROUP_PADDED", padded(geometry.group, 1)),
        ),
        grid=(tiles * geometry.kv_heads, splits, 1),
        num_warps=geometry.prefill.num_warps,
        num_stages=geometry.prefill.num_stages,
    )  # fmt: skip


def decode_launch(
    geometry: Geometry, sequences: int, splits: int, q_stride: int, table_stride: int, scale: float
) -> TritonLaunch:
    """Attention of the sequences that bring one token."""
    made = TritonLaunch(
        kernel=f"{MODULE}:decode",
        args=(
            *_tensors(geometry.dtype), ("q_stride", q_stride), ("table_stride", table_stride), ("splits", splits),
            ("window", geometry.window), ("scale", scale * LOG2_E),
        ),
        constexprs=(*_constants(geometry, geometry.decode, splits > 1), ("MIN_BLOCKS", MIN_DECODE_BLOCKS)),
        grid=(sequences, geometry.kv_heads, splits),
        num_warps=geometry.decode.num_warps,
        num_stages=geometry.decode.num_stages,
    )  # fmt: skip
    return with_dependence(made, geometry.dependent)


def _joined(geometry: Geometry) -> tuple[tuple[str, object], ...]:
    parts, columns = COMBINE_TILE
    return (
        ("Q_HEADS", geometry.q_heads), ("DV", geometry.v_dim), ("BLOCK_P", MAX_SPLITS), ("BLOCK_S", parts),
        ("BLOCK_C", columns),
    )  # fmt: skip


def combine_launch(geometry: Geometry, rows: int, splits: int) -> TritonLaunch:
    """Join the parts of ``rows`` rows of a prefill."""
    return TritonLaunch(
        kernel=f"{MODULE}:combine",
        args=(("partial", F32), ("lse", F32), ("out", TensorArg(geometry.dtype)), ("splits", splits)),
        constexprs=_joined(geometry),
        grid=(rows, geometry.q_heads, ceil_div(geometry.v_dim, COMBINE_TILE[1])),
    )


def combine_decoded_launch(geometry: Geometry, sequences: int, splits: int) -> TritonLaunch:
    """Join the parts of as many sequences' only tokens."""
    made = TritonLaunch(
        kernel=f"{MODULE}:combine_decoded",
        args=(
            ("partial", F32), ("lse", F32), ("out", TensorArg(geometry.dtype)), ("query_starts", I32),
            ("context_lens", I32), ("splits", splits), ("window", geometry.window),
        ),
        constexprs=(
            *_joined(geometry), ("BLOCK_N", geometry.decode.keys), ("MIN_BLOCKS", MIN_DECODE_BLOCKS),
            ("WINDOWED", geometry.window != NO_WINDOW),
        ),
        grid=(sequences, geometry.q_heads, ceil_div(geometry.v_dim, COMBINE_TILE[1])),
    )  # fmt: skip
    return with_dependence(made, geometry.dependent)


def step_launches(
    geometry: Geometry, tokens: int, sequences: int, parts: Splits, q_stride: int, table_stride: int, scale: float
) -> tuple[TritonLaunch, ...]:
    """One step's launches, in order. Prefill's parts are joined for every row; decode then writes its own rows anew."""
    found: list[TritonLaunch] = []
    if parts.prefill:
        found.append(prefill_launch(geometry, tokens, sequences, parts.prefill, q_stride, table_stride, scale))
        if parts.prefill > 1:
            found.append(combine_launch(geometry, tokens, parts.prefill))
    if parts.decode:
        found.append(decode_launch(geometry, sequences, parts.decode, q_stride, table_stride, scale))
        if parts.decode > 1:
            found.append(combine_decoded_launch(geometry, sequences, parts.decode))
    return tuple(found)


@lru_cache(maxsize=64)
def _geometry(shape: OpShape, device: Device, dependent: bool) -> Geometry:
    return evolve(Geometry.of(shape, device), dependent=dependent)


def launches(point: StepPoint, shape: OpShape, device: Device) -> tuple[TritonLaunch, ...]:
    """What one layer's attention starts at ``point``. Strides and the scale are no part of a key."""
    geometry = _geometry(shape, device, dependent_launches(device))
    parts = splits(geometry, point.tokens, point.sequences, point.max_context, point.decode)
    stride = geometry.q_heads * geometry.k_dim
    table = ceil_div(point.max_context, geometry.page_tokens)
    return step_launches(geometry, point.tokens, point.sequences, parts, stride, table, geometry.k_dim**-0.5)
