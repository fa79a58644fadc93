"""The op table: what it binds, and what it says of a shape that nobody declared."""

from __future__ import annotations

import pytest

from freetoken.ops.reference import REFERENCE
from freetoken.ops.table import OpTable
from freetoken.plugin.protocols import LoadedKernel
from freetoken.vocab.ops import OPS, OpShape


def first(x: int) -> int:
    return x


def second(x: int) -> int:
    return -x


def test_every_op_has_a_reference() -> None:
    """Oracle: the vocabulary."""
    assert set(REFERENCE) == set(OPS)


def test_binds_by_shape() -> None:
    """Oracle: the mapping it was given."""
    small, large = OpShape("rms_norm", "float32", cols=8), OpShape("rms_norm", "float32", cols=16)
    table = OpTable({small: LoadedKernel(first), large: LoadedKernel(second)})
    assert table.bind(small) is first
    assert table.bind(large) is second


def test_an_undeclared_shape_names_op_and_cure() -> None:
    """Oracle: the contract of ``Ops.bind``."""
    table = OpTable({OpShape("rms_norm", "float32", cols=8): LoadedKernel(first)})
    with pytest.raises(KeyError, match=r"rms_norm.*op_shapes.*cols=8"):
        table.bind(OpShape("rms_norm", "float32", cols=9))
    with pytest.raises(KeyError, match=r"rope.*not declared at all"):
        table.bind(OpShape("rope", "float32"))


def test_a_bare_shape_finds_the_planned_formats() -> None:
    """Oracle: the definition: one kernel for the sizes serves; two different ones are ambiguous."""
    bare = OpShape("linear", "float32", rows=4, cols=8)
    q4 = OpShape("linear", "float32", rows=4, cols=8, formats=("gguf.q4_1",))
    q8 = OpShape("linear", "float32", rows=4, cols=8, formats=("gguf.q8_0",))
    assert OpTable({q4: LoadedKernel(first), q8: LoadedKernel(first)}).bind(bare) is first
    both = OpTable({q4: LoadedKernel(first), q8: LoadedKernel(second)})
    assert both.bind(q8) is second
    with pytest.raises(KeyError, match="formats"):
        both.bind(bare)
