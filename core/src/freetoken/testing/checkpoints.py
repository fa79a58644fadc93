"""Tiny random checkpoints of the built-in families, in every layout that is published."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from freetoken.models.decoder import Decoder, stored_parameters
from freetoken.models.expert_layout import LAYOUTS, ExpertLayout
from freetoken.models.moe_block import MoE
from freetoken.models.weight_names import Parameter
from freetoken.plugin.specs import ModelFamilySpec
from freetoken.testing.tiny_tokenizer import write_tokenizer
from freetoken.vocab.model_spec import ModelSpec
from freetoken.vocab.weight import Source


def write_tiny(
    family: ModelFamilySpec,
    directory: Path,
    *,
    config: Mapping[str, object] | None = None,
    experts: str | None = None,
    dtype: str = "float32",
    seed: int = 0,
) -> Path:
    """A checkpoint of random weights in ``directory``: ``config`` (by default the family's ``tiny``), one safetensors
    file with experts in the layout named ``experts`` (by default the family's usual one), a byte-level tokenizer and a
    chat template.

    The same ``seed`` gives the same model in every layout of experts.
    """
    config = family.tiny() if config is None else config
    tensors = random_tensors(family.read_config(config, dtype), experts=experts, seed=seed)
    stored = {name: t.to(getattr(torch, dtype)).contiguous() for name, t in tensors.items()}
    write_checkpoint(directory, config, [stored])
    write_tokenizer(directory)
    return directory


def write_checkpoint(directory: Path, config: Mapping[str, object], files: Iterable[Mapping[str, Tensor]]) -> None:
    """``config.json`` and a safetensors file for each of ``files``, with the index that several need."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(dict(config), indent=2))
    where: dict[str, str] = {}
    for number, tensors in enumerate(files):
        name = f"model-{number:05}.safetensors"
        save_file(dict(tensors), directory / name, metadata={"format": "pt"})
        where |= dict.fromkeys(tensors, name)
    if len(set(where.values())) > 1:
        index = {"metadata": {}, "weight_map": where}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    else:
        (directory / "model-00000.safetensors").rename(directory / "model.safetensors")


def random_tensors(spec: ModelSpec, *, experts: str | None = None, seed: int = 0) -> dict[str, Tensor]:
    """Every stored tensor of a built-in family's model, float32, scaled so that each part of it shows in the logits."""
    decoder = spec.details
    assert isinstance(decoder, Decoder), "only the built-in families' checkpoints can be written"
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    layout = LAYOUTS[experts] if experts else None
    for parameter in stored_parameters(spec, layout):
        for name, shape in _stored_shapes(parameter).items():
            tensors[name] = _random(parameter, shape, generator)
    for i, layer in enumerate(decoder.layers):
        if isinstance(layer.mlp, MoE):
            prefix = f"{decoder.prefixes[0]}layers.{i}."
            chosen = layout or layer.mlp.usual_layout
            tensors |= expert_tensors(layer.mlp, chosen, prefix, random_experts(layer.mlp, generator))
    return tensors


def random_experts(moe: MoE, generator: torch.Generator) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Gate, up ``[I, H]`` and down ``[H, I]`` of each expert."""
    wide, tall = (moe.intermediate, moe.hidden), (moe.hidden, moe.intermediate)
    return [(_matrix(wide, generator), _matrix(wide, generator), _matrix(tall, generator)) for _ in range(moe.experts)]


def expert_tensors(
    moe: MoE, layout: ExpertLayout, prefix: str, experts: Sequence[tuple[Tensor, Tensor, Tensor]]
) -> dict[str, Tensor]:
    """One layer's ``experts`` as ``layout`` stores them under ``prefix``."""
    dtype = experts[0][0].dtype
    stored = {prefix + n: torch.empty(shape, dtype=dtype) for n, shape in layout.tensors(moe.sizes).items()}
    for number, expert in enumerate(experts):
        for source, values in zip(layout.sources(prefix, number, moe.sizes), expert, strict=True):
            view_of(stored[source.tensor], source).copy_(values)
    return stored


def view_of(stored: Tensor, source: Source) -> Tensor:
    """The piece of ``stored`` that ``source`` names, as a view; entry, then transposition, then rows."""
    assert source.unpermute_heads == 0, "rows out of order are no view"
    view = stored if source.index is None else stored[source.index]
    if source.transpose:
        view = view.transpose(-1, -2)
    return view if source.rows is None else view[source.rows[0] : source.rows[1]]


def _stored_shapes(parameter: Parameter) -> dict[str, tuple[int, ...]]:
    """The whole tensors that a parameter's pieces lie in."""
    shapes: dict[str, tuple[int, ...]] = {}
    for piece in parameter.pieces:
        rows = piece.rows[1] if piece.rows else piece.shape[0]
        known = shapes.get(piece.tensor, (0,))[0]
        shapes[piece.tensor] = (max(rows, known), *piece.shape[1:])
    return shapes


def _random(parameter: Parameter, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    kind = parameter.slot.rpartition(".")[2]
    if parameter.kind == "embedding":
        return 0.3 * torch.randn(shape, generator=generator)
    if parameter.kind == "linear":
        return _matrix(shape, generator)
    if kind == "a_log":
        # exp(A_log) is the rate of forgetting: slow enough that old tokens still count.
        return torch.rand(shape, generator=generator).mul(2.0).add(0.02).log()
    if kind.endswith("norm"):
        return 1.0 - parameter.add + 0.2 * torch.randn(shape, generator=generator)
    return 0.5 * torch.randn(shape, generator=generator)


def _matrix(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Entries of variance 1 / columns: outputs are as large as inputs."""
    return torch.randn(shape, generator=generator) / math.sqrt(shape[-1])
