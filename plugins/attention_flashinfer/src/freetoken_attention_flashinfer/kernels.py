"""Which of FlashInfer's kernels a step takes, and what their modules are called. Pure; imports neither torch nor it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version

from freetoken.vocab.units import ceil_div

DISTRIBUTION = "flashinfer-python"
FA2, FA3 = "fa2", "fa3"
"""FlashInfer's names: kernels for any card from compute capability 8.0, which split long contexts over the card; and
kernels for Hopper alone, which give a whole context to one block."""

FA3_ARCHS: frozenset[int] = frozenset()
"""Cards on which FA3 takes the steps that fill them. Empty until ``benchmarks/gpu_flashinfer.py`` shows that it pays:
its module takes several times as long to build."""

FA3_TILE_ROWS = 128
ASSUMED_MULTIPROCESSORS = 132


def kernels_for(arch: int) -> tuple[str, ...]:
    """The kernels that steps may take on a card of compute capability ``arch`` (90 for 9.0); the first takes any."""
    return (FA2, FA3) if arch in FA3_ARCHS else (FA2,)


def step_kernel(kernels: Sequence[str], query_lens: Sequence[int], q_heads: int, multiprocessors: int) -> str:
    """FA3 where it is to be had and the step brings a tile of queries to every multiprocessor; else FA2."""
    if FA3 not in kernels:
        return FA2
    tiles = sum(ceil_div(length, FA3_TILE_ROWS) for length in query_lens if length > 1) * q_heads
    decoding = sum(1 for length in query_lens if length == 1)
    return FA3 if tiles >= multiprocessors and not decoding else FA2


@lru_cache(maxsize=1)
def library_version() -> str:
    """The installed version, or an empty text. Reads metadata alone."""
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return ""


def module_name(kernel: str, dtype: str, head_dim: int) -> str:
    """The name under which a warmup knows a module; another version of the library is another module."""
    return f"flashinfer-{library_version() or 'any'}/{kernel}-{dtype}-d{head_dim}"
