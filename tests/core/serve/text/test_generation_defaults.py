"""``generation_config.json`` read into sampling wishes: a round trip through the file, and refusals by key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from freetoken.serve.text import GenerationDefaults
from freetoken.vocab.errors import CheckpointError
from freetoken.vocab.sampling import SamplingParams


def test_wishes_come_back_from_the_file(tmp_path: Path) -> None:
    wishes = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.05}
    config = {**wishes, "eos_token_id": [5, 7, 5], "do_sample": True, "max_new_tokens": 2048, "unheard_of": {}}
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    defaults = GenerationDefaults.from_directory(tmp_path)
    assert defaults.sampling() == wishes
    assert defaults.eos_token_ids == (5, 7)
    assert SamplingParams(**defaults.sampling()).max_tokens is None  # type: ignore[arg-type]


def test_no_file_and_an_empty_file_wish_nothing(tmp_path: Path) -> None:
    assert GenerationDefaults.from_directory(tmp_path) == GenerationDefaults.from_config({}) == GenerationDefaults()
    assert GenerationDefaults().sampling() == {}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"do_sample": False, "temperature": 0.7}, {"temperature": 0.0}),
        ({"do_sample": True}, {}),
        ({"temperature": 1}, {"temperature": 1.0}),
        ({"top_k": None, "top_p": None}, {}),
    ],
)
def test_sampling_wishes(config: dict[str, Any], expected: dict[str, float]) -> None:
    assert GenerationDefaults.from_config(config).sampling() == expected


@pytest.mark.parametrize(("value", "ids"), [(None, ()), (3, (3,)), ([3], (3,)), ([], ()), ([4, 3], (4, 3))])
def test_eos_ids(value: object, ids: tuple[int, ...]) -> None:
    assert GenerationDefaults.from_config({"eos_token_id": value}).eos_token_ids == ids


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_k": 2.5}, "top_k"),
        ({"top_p": 0}, "top_p"),
        ({"min_p": [0.1]}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"do_sample": "yes"}, "do_sample"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"eos_token_id": [1, -2]}, "eos_token_id"),
        ({"eos_token_id": True}, "eos_token_id"),
        ([1], "list"),
    ],
)
def test_wrong_values_are_refused_by_key(config: object, named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        GenerationDefaults.from_config(config)


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe{}", b""])
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "generation_config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        GenerationDefaults.from_directory(tmp_path)
