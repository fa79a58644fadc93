"""Rotary tables against transformers' own initialisers."""

from __future__ import annotations

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from freetoken.models.config_reader import ConfigReader
from freetoken.models.rope import read_rope
from freetoken.vocab.errors import CheckpointError
from freetoken.vocab.hardware import Device

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _reader(**keys) -> ConfigReader:
    return ConfigReader({"hidden_size": 128, "num_attention_heads": 2, "max_position_embeddings": 8192, **keys})


def test_default_frequencies():
    """Oracle: the formula, position times theta to the power of −2i/D."""
    table = read_rope(_reader(rope_theta=500000.0), 64).table(50, Device())
    angles = torch.arange(50)[:, None] * 500000.0 ** (-torch.arange(0, 64, 2) / 64)
    assert (table - torch.cat((angles.cos(), angles.sin()), -1)).abs().max() < 1e-5


@pytest.mark.parametrize("scaling", [LLAMA3, {"rope_type": "linear", "factor": 4.0}], ids=["llama3", "linear"])
@pytest.mark.parametrize("style", ["scaling", "parameters", "type"])
def test_scaled_frequencies_equal_transformers(scaling, style):
    """Oracle: transformers' initialiser of that scaling; the older and the newer spelling of the keys."""
    config = transformers.LlamaConfig(
        hidden_size=128, num_attention_heads=2, rope_parameters={"rope_theta": 500000.0, **scaling}
    )
    frequencies, _ = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, torch.device("cpu"))
    if style == "parameters":
        reader = _reader(rope_parameters={"rope_theta": 500000.0, **scaling})
    else:
        nested = dict(scaling)
        if style == "type":
            nested["type"] = nested.pop("rope_type")
        reader = _reader(rope_theta=500000.0, rope_scaling=nested)
    table = read_rope(reader, 64).table(3000, Device())
    angles = torch.arange(3000)[:, None] * frequencies
    assert (table - torch.cat((angles.cos(), angles.sin()), -1)).abs().max() < 1e-3
    assert (table[:100] - torch.cat((angles.cos(), angles.sin()), -1)[:100]).abs().max() < 2e-5


@pytest.mark.parametrize("kind", ["yarn", "dynamic", "longrope", "su"])
def test_other_scalings_are_refused_by_name(kind):
    """Property: the error names the key and the kind."""
    with pytest.raises(CheckpointError, match=rf"rope_scaling\.rope_type.*{kind}"):
        read_rope(_reader(rope_scaling={"rope_type": kind, "factor": 4.0}), 64)


@pytest.mark.parametrize("share", [0.01, 1.5, 0.171875])
def test_a_share_that_gives_no_even_number_of_dims_is_refused(share):
    with pytest.raises(CheckpointError, match="partial_rotary_factor"):
        read_rope(_reader(partial_rotary_factor=share), 64)
