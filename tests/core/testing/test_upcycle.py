"""Upcycled checkpoints say what their dense original says."""

from __future__ import annotations

from pathlib import Path

import pytest

from freetoken.models import llama, mixtral
from freetoken.models.expert_layout import LAYOUTS
from freetoken.testing.checkpoints import write_tiny
from freetoken.testing.mini_runner import MiniRunner
from freetoken.testing.upcycle import upcycle

TOKENS = list(range(30, 71))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_sparse_twin_gives_the_dense_models_logits(layout: str, tmp_path: Path) -> None:
    """Oracle: the dense model."""
    source = write_tiny(llama.FAMILY, tmp_path / "dense", config={**llama.FAMILY.tiny(), "tie_word_embeddings": True})
    want = MiniRunner.open(llama.FAMILY, source).logits(TOKENS)
    twin = MiniRunner.open(mixtral.FAMILY, upcycle(source, tmp_path / "sparse", layout=layout))
    assert twin.spec.moe is not None
    assert (twin.spec.moe.experts, twin.spec.moe.top_k) == (8, 2)
    assert (twin.logits(TOKENS) - want).abs().max() < 1e-5
    assert (tmp_path / "sparse" / "tokenizer.json").read_text() == (source / "tokenizer.json").read_text()
