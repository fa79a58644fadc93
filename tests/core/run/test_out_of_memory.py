"""A device on which steps of 64 tokens and more do not fit, through every stage of a real start.

Oracles: the steps that the device met, by number of tokens; and the same model's answers where memory is plenty.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from freetoken import LLM, SamplingParams
from freetoken.models import llama
from freetoken.testing.checkpoints import write_tiny
from freetoken.testing.plugin_files import write_plugin
from freetoken.vocab.errors import EngineError

SMALL_CARD = """
from attrs import evolve

from freetoken.builtin import kernels_torch
from freetoken.plugin.markers import hookimpl
from freetoken.plugin.protocols import LoadedKernel
from freetoken.plugin.specs import WarmupPolicySpec
from freetoken.vocab.launch import StepPoint
from freetoken.vocab.warmup import Capture, Forward

STEPS = (3, 100, 40, 64, 63, 128)
FITS = 63
MET = []


class Error(RuntimeError):
    pass


def load(setup):
    import torch

    from freetoken.ops.embedding import embedding

    def on_a_small_card(tokens, packed):
        MET.append(len(tokens))
        if len(tokens) > FITS:
            raise RAISES(torch)
        return embedding(tokens, packed)

    return evolve(TORCH.load(setup), call=on_a_small_card)


RAISES = lambda torch: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
TORCH = next(spec for spec in kernels_torch.freetoken_kernels() if spec.op == "embedding")


class Policy:
    def steps(self, plan, launch_space, known):
        return [Capture(), *(Forward(StepPoint(n, 1, n, n, 1, decode=False)) for n in STEPS)]


@hookimpl
def freetoken_kernels():
    return (evolve(TORCH, name="small-card", priority=1000, load=load, launches=None),)


@hookimpl
def freetoken_warmup_policies():
    about = "steps around what fits"
    return (WarmupPolicySpec(name="small-card", summary=about, create=lambda _: Policy(), priority=1000),)
"""

OPTIONS = {"dtype": "float32", "threads": 1, "max_seq_len": 200, "max_prefill_tokens": 128, "max_running_requests": 4}
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPTS = [[5 + (7 * i + n) % 200 for i in range(n)] for n in (1, 63, 64, 65, 127, 150)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(llama.FAMILY, tmp_path_factory.mktemp("tiny"), seed=6)


@pytest.fixture
def card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The plugin's module, with a list of the steps it met."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(write_plugin(tmp_path / "site", "small-card", SMALL_CARD)))
    monkeypatch.delitem(sys.modules, "small_card", raising=False)
    yield importlib.import_module("small_card")
    sys.modules.pop("small_card", None)


def answers(llm: LLM) -> list[tuple[int, ...]]:
    return [llm.generate(prompt, GREEDY)[0].token_ids for prompt in PROMPTS]


def test_larger_steps_are_skipped_the_chunk_shrinks_and_all_is_served(
    model: Path, card: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """By hand: of 3, 100, 40, 64, 63 and 128 tokens, 100 is met and does not fit, 64 is met, since it is smaller, and
    does not fit either; 128 is larger than 64 and not tried; 63 fits, and is the largest chunk from then on."""
    with LLM(str(model), plugins=("no:small-card",), **OPTIONS) as plain:  # type: ignore[arg-type]
        assert plain.running.sizing.max_prefill_tokens == 128
        wanted = answers(plain)
    assert card.MET == []
    with (
        caplog.at_level(logging.INFO, "freetoken.warmup"),
        LLM(str(model), plugins=("small-card",), **OPTIONS) as llm,  # type: ignore[arg-type]
    ):
        assert card.MET == [3, 100, 40, 64, 63]
        sizing, warmup = llm.running.sizing, llm.running.built.warmup
        assert sizing.max_prefill_tokens == 63
        assert any("a warmup step ran out of memory" in why for why in sizing.because)
        assert warmup.max_tokens == 63
        assert [bool(item.skipped) for item in warmup.steps] == [False, False, True, False, True, False, True]
        assert answers(llm) == wanted
        assert max(card.MET[5:]) == 63, "a prompt of 150 tokens in chunks that fit"
    assert "ran out of memory at 100 tokens; larger steps are skipped" in caplog.text
    assert "ran out of memory at 64 tokens; larger steps are skipped" in caplog.text
    assert "forward of 128 tokens in 1 sequence: a step of 64 tokens ran out of memory" in caplog.text
    assert "3 skipped" in caplog.text


def test_no_step_fits_and_one_token_at_a_time_is_still_tried(model: Path, card: Any) -> None:
    """The chunk never goes below one token; a request that fails then says why."""
    card.FITS = 0
    with LLM(str(model), plugins=("small-card",), **OPTIONS) as llm:  # type: ignore[arg-type]
        assert llm.running.sizing.max_prefill_tokens == 2, "3 tokens do not fit; what fits below was not tried"
        with pytest.raises(EngineError, match="out of memory"):
            llm.generate([5, 6], GREEDY)


def test_another_error_at_the_same_place_ends_the_start(model: Path, card: Any) -> None:
    card.RAISES = lambda _: card.Error("an illegal memory access")
    with pytest.raises(EngineError) as failed:
        LLM(str(model), plugins=("small-card",), **OPTIONS)  # type: ignore[arg-type]
    assert "step forward of 100 tokens in 1 sequence" in str(failed.value)
    assert "an illegal memory access" in str(failed.value)
