"""Upcycled experts: a dense Llama as a Mixtral whose experts are all copies of the dense feed-forward block.

Routing is random and the chosen weights sum to one, so the text must equal the dense model's (the idea of sparse
upcycling: Komatsuzaki et al. 2022, arXiv:2212.05055).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path

import torch
from tokenizers import decoders
from torch import Tensor

from freetoken.builtin.weight_formats import freetoken_weight_formats
from freetoken.models import llama, mixtral
from freetoken.models.decoder import Decoder
from freetoken.models.expert_layout import LAYOUTS
from freetoken.models.moe_block import MoE
from freetoken.serve.text.gguf_tokenizer import parts_from_gguf
from freetoken.serve.text.token_bytes import byte_level
from freetoken.testing.checkpoints import expert_tensors, write_checkpoint
from freetoken.vocab.errors import CheckpointError
from freetoken.vocab.weight import Source
from freetoken.weights.checkpoint import Checkpoint, TokenizerSource, open_checkpoint

_FFN = ("gate_proj", "up_proj", "down_proj")


def upcycle(
    source: Path,
    directory: Path,
    *,
    experts: int = 8,
    top_k: int = 2,
    layout: str = "one-each-mixtral",
    dtype: str = "float32",
    seed: int = 0,
) -> Path:
    """Write the sparse twin of the dense Llama in ``source`` (a directory or a GGUF file), with its tokenizer.

    Weights are dequantised to ``dtype``; each layer is a file of its own, so that one layer at a time is in memory.
    SmolLM2-135M with eight experts takes 2.8 GB in float32. Raises ``CheckpointError`` for a source that is no Llama,
    or whose tokenizer is not byte-level.
    """
    with open_checkpoint(source, tuple(freetoken_weight_formats())) as checkpoint:
        config = sparse_config(checkpoint.config, experts, top_k)
        write_checkpoint(directory, config, _files(checkpoint, config, layout, dtype, seed))
        _write_tokenizer(checkpoint.tokenizer, directory)
        if checkpoint.generation_config:
            (directory / "generation_config.json").write_text(json.dumps(dict(checkpoint.generation_config)))
    return directory


def sparse_config(dense: Mapping[str, object], experts: int, top_k: int) -> dict[str, object]:
    """The dense Llama's configuration, with experts and under Mixtral's name."""
    kept = {key: value for key, value in dense.items() if key != "gguf_architecture"}
    sparse = {"num_local_experts": experts, "num_experts_per_tok": top_k}
    return {**kept, "architectures": [mixtral.FAMILY.architectures[0]], "model_type": "mixtral", **sparse}


def _files(
    checkpoint: Checkpoint, config: Mapping[str, object], layout: str, dtype: str, seed: int
) -> Iterator[dict[str, Tensor]]:
    """The tensors outside the layers, and those of each layer, in some order."""
    moe = _experts(config, dtype)
    generator = torch.Generator().manual_seed(seed)
    for prefix, sources in groupby(_sources(checkpoint, dtype), key=lambda source: _layer_prefix(source.tensor)):
        dense = {source.tensor: _dequantised(checkpoint, source, dtype) for source in sources}
        yield _sparse_layer(dense, prefix, moe, layout, generator) if prefix else dense


def _sparse_layer(
    dense: dict[str, Tensor], prefix: str, moe: MoE, layout: str, generator: torch.Generator
) -> dict[str, Tensor]:
    gate, up, down = (dense.pop(f"{prefix}mlp.{part}.weight") for part in _FFN)
    chosen = LAYOUTS[layout]
    router = torch.randn(moe.experts, moe.hidden, generator=generator).to(gate.dtype)
    copies = expert_tensors(moe, chosen, prefix, [(gate, up, down)] * moe.experts)
    return {**dense, f"{prefix}{chosen.block}gate.weight": router, **copies}


def _experts(config: Mapping[str, object], dtype: str) -> MoE:
    decoder = mixtral.FAMILY.read_config(config, dtype).details
    assert isinstance(decoder, Decoder), "Mixtral's spec holds a decoder"
    moe = decoder.layers[0].mlp
    assert isinstance(moe, MoE), "Mixtral's layers have experts"
    return moe


def _sources(checkpoint: Checkpoint, dtype: str) -> list[Source]:
    """Every tensor once, rows in Hugging Face's order, sorted so that a layer's lie together."""
    spec = llama.FAMILY.read_config(checkpoint.config, dtype)
    slots = llama.FAMILY.weights(spec, checkpoint.index)
    found = {source.tensor: source for slot in slots for source in slot.sources}
    return sorted(found.values(), key=lambda source: (_layer_prefix(source.tensor), source.tensor))


def _layer_prefix(name: str) -> str:
    """``model.layers.3.`` of a layer's tensor, else nothing."""
    parts = name.split(".")
    return ".".join(parts[:3]) + "." if parts[1:2] == ["layers"] else ""


def _dequantised(checkpoint: Checkpoint, source: Source, dtype: str) -> Tensor:
    stored = checkpoint.read(source.tensor)
    codec = checkpoint.codec(stored.format)
    return codec.dequantise(codec.take(stored, source)).to(getattr(torch, dtype), copy=True).contiguous()


def _write_tokenizer(source: TokenizerSource, directory: Path) -> None:
    for name, path in source.files.items():
        (directory / name).write_bytes(path.read_bytes())
    if source.gguf is None:
        return
    parts = parts_from_gguf(source.gguf)
    if parts.spelling is not byte_level:
        raise CheckpointError("the tokenizer of an upcycled checkpoint", "only byte-level ones are written")
    parts.backend.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    parts.backend.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **parts.special_tokens,
        "chat_template": parts.chat_templates.get("default"),
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": list(parts.eos_ids)}))
