"""Experts in every published layout give one and the same model."""

from __future__ import annotations

import pytest
import torch

from freetoken.builtin.weight_formats import freetoken_weight_formats
from freetoken.models import mixtral, qwen3_5_moe, qwen3_moe, qwen3_next
from freetoken.models.expert_layout import LAYOUTS, ONE_EACH, ExpertSizes, find_layout
from freetoken.testing.checkpoints import write_tiny
from freetoken.testing.mini_runner import MiniRunner
from freetoken.testing.transformers_oracle import load_transformers, logits_of
from freetoken.vocab.errors import CheckpointError
from freetoken.vocab.weight import CheckpointIndex, TensorInfo
from freetoken.weights.checkpoint import open_checkpoint
from freetoken.weights.slots import check_slots

FAMILIES = (mixtral.FAMILY, qwen3_moe.FAMILY, qwen3_5_moe.FAMILY, qwen3_next.FAMILY)
TOKENS = list(range(40, 63))


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
def test_every_layout_gives_the_same_logits(family, tmp_path):
    """Second way: the family's usual layout, bit by bit."""
    want = MiniRunner.open(family, write_tiny(family, tmp_path / "usual")).logits(TOKENS)
    for name in LAYOUTS:
        got = MiniRunner.open(family, write_tiny(family, tmp_path / name, experts=name)).logits(TOKENS)
        assert torch.equal(got, want), name


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
def test_what_transformers_saves_can_be_read(family, tmp_path):
    """Oracle: transformers, which wrote the files."""
    write_tiny(family, tmp_path / "ours")
    model = load_transformers(tmp_path / "ours", _text_only(family.architectures))
    model.save_pretrained(tmp_path / "theirs")
    want = logits_of(model)(TOKENS)
    got = MiniRunner.open(family, tmp_path / "theirs").logits(TOKENS)
    assert (got - want).abs().max() < 1e-4


@pytest.mark.parametrize("hidden", [16, 32, 64])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_is_recognised_by_its_own_tensors(name, hidden):
    """Round trip, also where gate and up together, or down, are square."""
    sizes = ExpertSizes(4, hidden, 32)
    layout = LAYOUTS[name]
    assert find_layout(_index(layout.tensors(sizes)), "layers.0.", sizes, ONE_EACH) is layout


def test_a_missing_expert_is_named(tmp_path):
    """Property: the error names the tensor that is not there, and no other layout is guessed."""
    family = qwen3_moe.FAMILY
    with open_checkpoint(write_tiny(family, tmp_path), tuple(freetoken_weight_formats())) as checkpoint:
        gone = "model.layers.1.mlp.experts.5.up_proj.weight"
        index = CheckpointIndex("safetensors", {n: t for n, t in checkpoint.index.tensors.items() if n != gone})
        slots = family.weights(family.read_config(checkpoint.config, "float32"), index)
    with pytest.raises(CheckpointError, match=r"layers\.1\.experts\.5") as refused:
        check_slots(index, slots)
    assert gone in str(refused.value)


def test_too_many_experts_are_refused(tmp_path):
    """Property: a configuration with fewer experts than the files hold does not load."""
    family = qwen3_moe.FAMILY
    for layout in ("one-each", "stacked"):
        path = write_tiny(family, tmp_path / layout, experts=layout)
        with open_checkpoint(path, tuple(freetoken_weight_formats())) as checkpoint:
            spec = family.read_config({**checkpoint.config, "num_experts": 7}, "float32")
            with pytest.raises(CheckpointError, match=r"experts"):
                check_slots(checkpoint.index, family.weights(spec, checkpoint.index))


def _text_only(architectures: tuple[str, ...]) -> str:
    return next(a for a in architectures if a.endswith("ForCausalLM"))


def _index(shapes) -> CheckpointIndex:
    return CheckpointIndex(
        "safetensors", {f"layers.0.{n}": TensorInfo(n, "float32", shape, 0, "f") for n, shape in shapes.items()}
    )
