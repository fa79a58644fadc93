"""transformers in float32 as the oracle of a family. Needs ``transformers``, which the core itself does not use."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from freetoken.testing.family import Oracle


def load_transformers(path: Path, architecture: str) -> Any:
    """The model that ``transformers`` itself reads from ``path``; nothing of the text part may be missing or left."""
    import transformers

    logging.getLogger("transformers").setLevel(logging.ERROR)
    model, report = getattr(transformers, architecture).from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    missing = [key for key in report["missing_keys"] if "visual" not in key]
    assert not missing, f"transformers did not find {missing}"
    assert not report["unexpected_keys"], f"transformers did not use {report['unexpected_keys']}"
    return model.eval()


def transformers_oracle(path: Path, architecture: str) -> Oracle:
    """Logits of the checkpoint in ``path`` as transformers' class named ``architecture`` computes them."""
    return logits_of(load_transformers(path, architecture))


def logits_of(model: Any) -> Oracle:
    """A transformers causal model as a function of one sequence's tokens."""

    @torch.inference_mode()
    def logits(tokens: Sequence[int]) -> Tensor:
        out: Tensor = model(torch.tensor([list(tokens)])).logits[0]
        return out.float()

    return logits
