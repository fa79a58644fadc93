"""Rotary position embedding: what the configuration asks for, and the table of cosines and sines.

The table follows Su et al. 2021 (arXiv:2104.09864); the ``llama3`` scaling follows Llama 3.1's reference code: long
wavelengths are stretched by ``factor``, short ones are left alone, and those between are blended.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from attrs import frozen

from freetoken.models.config_reader import ConfigReader

if TYPE_CHECKING:
    from torch import Tensor

    from freetoken.vocab.hardware import Device

IMPLEMENTED_TYPES = ("default", "linear", "llama3")


@frozen
class Llama3Scaling:
    """The four numbers of ``llama3`` scaling."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_tokens: int


@frozen
class Rope:
    """A rotary embedding of the first ``rotary_dim`` dims; ``stretch`` divides every frequency (``linear`` scaling)."""

    rotary_dim: int
    theta: float
    stretch: float = 1.0
    llama3: Llama3Scaling | None = None

    def table(self, tokens: int, device: Device) -> Tensor:
        """``cos_sin [tokens, rotary_dim] f32``: row ``p`` holds the cosines, then the sines, of position ``p``.

        Angles are rounded to float32 before the cosine is taken, as the models were trained.
        """
        import torch

        exponents = torch.arange(0, self.rotary_dim, 2, dtype=torch.float32) / self.rotary_dim
        frequencies = 1.0 / (self.theta**exponents)
        if self.llama3 is not None:
            frequencies = _blended(frequencies, self.llama3)
        frequencies = (frequencies / self.stretch).to(device.torch_name)
        angles = torch.arange(tokens, dtype=torch.float32, device=device.torch_name)[:, None] * frequencies
        return torch.cat((angles.cos(), angles.sin()), dim=-1)


def read_rope(config: ConfigReader, head_dim: int, default_theta: float = 10000.0, default_share: float = 1.0) -> Rope:
    """The rotary embedding that ``config`` asks for; both the older keys and ``rope_parameters`` are understood.

    Raises ``CheckpointError`` for a kind of scaling that is not implemented.
    """
    key = "rope_parameters" if config.has("rope_parameters") else "rope_scaling"
    nested = config.child(key)
    kind_key = "rope_type" if nested.has("rope_type") else "type"
    nested.refuse_unless(kind_key, *IMPLEMENTED_TYPES, default="default")
    kind = nested.text(kind_key, "default")
    theta = nested.number("rope_theta", config.number("rope_theta", default_theta))
    share = nested.number("partial_rotary_factor", config.number("partial_rotary_factor", default_share))
    rotary_dim = int(head_dim * share)
    if rotary_dim < 2 or rotary_dim % 2 or rotary_dim > head_dim:
        raise config.refusal("partial_rotary_factor", f"{share} of head size {head_dim} is not an even number of dims")
    return Rope(
        rotary_dim,
        theta,
        stretch=nested.number("factor") if kind == "linear" else 1.0,
        llama3=_read_llama3(nested, config) if kind == "llama3" else None,
    )


def _read_llama3(nested: ConfigReader, config: ConfigReader) -> Llama3Scaling:
    key = "original_max_position_embeddings"
    fallback = config.integer(key) if config.has(key) else config.integer("max_position_embeddings")
    scaling = Llama3Scaling(
        nested.number("factor"),
        nested.number("low_freq_factor"),
        nested.number("high_freq_factor"),
        nested.integer(key, fallback),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise nested.refusal("high_freq_factor", "it must be larger than low_freq_factor")
    return scaling


def _blended(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Frequencies ``[R / 2]`` under ``llama3`` scaling: 0 ≤ ``keep`` ≤ 1 is the share that is left unstretched."""
    turns = scaling.original_tokens * frequencies / (2 * math.pi)
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = keep.clamp(0.0, 1.0)
    return (1 - keep) * frequencies / scaling.factor + keep * frequencies
