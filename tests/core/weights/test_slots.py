"""Slots against an index: what fits passes, and every way not to fit is named. Oracle: the rule each case breaks."""

from __future__ import annotations

import pytest
from attrs import evolve

from freetoken.vocab.errors import CheckpointError
from freetoken.vocab.weight import CheckpointIndex, Source, TensorInfo, WeightSlot
from freetoken.weights.slots import check_slots, source_shape

FORMATS = ("bfloat16",)


def index_of(**shapes: tuple[int, ...]) -> CheckpointIndex:
    return CheckpointIndex(
        "safetensors", {n: TensorInfo(n, "bfloat16", s, 0, "f.safetensors") for n, s in shapes.items()}
    )


QKV = WeightSlot("qkv", "linear", (Source("q"), Source("k"), Source("v")), (16, 8))
EXPERTS = tuple(
    WeightSlot(
        f"expert.{e}", "experts",
        (Source("gate_up", index=e, rows=(0, 6)), Source("gate_up", index=e, rows=(6, 12)), Source("down", index=e)),
        (8, 6), expert=e,
    )
    for e in range(3)
)  # fmt: skip
INDEX = index_of(q=(8, 8), k=(4, 8), v=(4, 8), gate_up=(3, 12, 8), down=(3, 8, 6), norm=(8,))
SLOTS = (QKV, *EXPERTS, WeightSlot("norm", "vector", (Source("norm"),), (8,)))


def test_what_fits_passes() -> None:
    check_slots(INDEX, SLOTS, formats=FORMATS)
    check_slots(CheckpointIndex("dummy"), SLOTS, formats=FORMATS)


def without(name: str) -> CheckpointIndex:
    return CheckpointIndex("safetensors", {n: i for n, i in INDEX.tensors.items() if n != name})


def with_(info: TensorInfo) -> CheckpointIndex:
    return CheckpointIndex("safetensors", {**INDEX.tensors, info.name: info})


@pytest.mark.parametrize(
    ("index", "says"),
    [
        (without("k"), r"(?s)load qkv.*tensor k is not in f\.safetensors"),
        (with_(TensorInfo("extra", "bfloat16", (1,), 0, "f.safetensors")), r"no place for extra \(in f\.safetensors\)"),
        (with_(evolve(INDEX.tensors["v"], shape=(5, 8))), r"(?s)load qkv.*\[17, 8\].*\[16, 8\]"),
        (with_(evolve(INDEX.tensors["v"], shape=(4, 9))), r"(?s)load qkv.*cannot be stacked.*v \[4, 9\]"),
        (with_(evolve(INDEX.tensors["down"], shape=(3, 8, 7))), r"(?s)load expert\.0.*\[8, 7\].*\[8, 6\]"),
        (with_(evolve(INDEX.tensors["down"], shape=(2, 8, 6))), r"(?s)load expert\.2.*entry 2 .*\[2, 8, 6\]"),
        (with_(evolve(INDEX.tensors["down"], shape=(4, 8, 6))), r"down in f\.safetensors holds 4 entries.*uses 3"),
        (with_(evolve(INDEX.tensors["gate_up"], shape=(3, 11, 8))), r"(?s)load expert\.0.*rows 6 to 12"),
        (with_(evolve(INDEX.tensors["q"], format="int8")), r"(?s)load qkv.*q in f.* stored as int8.*bfloat16"),
    ],
)
def test_what_does_not_fit_is_named(index: CheckpointIndex, says: str) -> None:
    with pytest.raises(CheckpointError, match=says):
        check_slots(index, SLOTS, formats=FORMATS)


def test_ignored_tensors_may_stay_unused() -> None:
    index = with_(TensorInfo("layers.0.rotary.inv_freq", "float32", (4,), 0, "f"))
    check_slots(index, SLOTS, formats=FORMATS, ignored=(r"\.inv_freq$",))
    with pytest.raises(CheckpointError, match="inv_freq"):
        check_slots(index, SLOTS, formats=FORMATS, ignored=(r"^inv_freq",))


@pytest.mark.parametrize(
    ("shape", "source", "want"),
    [
        ((4, 6, 8), Source("t", index=3), (6, 8)),
        ((4, 6, 8), Source("t", index=3, transpose=True), (8, 6)),
        ((4, 6, 8), Source("t", index=3, transpose=True, rows=(5, 8)), (3, 6)),
        ((6, 8), Source("t", rows=(2, 2)), (0, 8)),
        ((8,), Source("t", rows=(2, 6), unpermute_heads=2), (4,)),
    ],
)
def test_shapes_of_pieces(shape: tuple[int, ...], source: Source, want: tuple[int, ...]) -> None:
    assert source_shape(shape, source) == want
