"""``freetoken generate``. Oracle: ``LLM`` on the same checkpoint with the same options."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from freetoken import LLM

FLAGS = ("--device", "cpu", "--max-seq-len", "64", "--threads", "1")


@pytest.fixture
def expected(tiny: Path) -> dict[str, str]:
    """The greedy answer through the template, and plain."""
    with LLM(str(tiny), device="cpu", max_seq_len=64, threads=1) as llm:
        params = evolve(llm.default_params(), temperature=0.0, max_tokens=6)
        chat = llm.chat([{"role": "user", "content": "Hello"}], params)
        return {"chat": chat.text, "raw": llm.generate(["Hello"], params)[0].text, "finish": chat.finish}


def test_the_answer_streams_to_standard_output(run: Any, tiny: Path, expected: dict[str, str]) -> None:
    short = ("--max-tokens", "6", "--temperature", "0", *FLAGS)
    assert run("generate", tiny, "Hello", *short).out == expected["chat"] + "\n"
    assert run("generate", tiny, "Hello", "--raw", *short).out == expected["raw"] + "\n"
    answer = json.loads(run("generate", tiny, "Hello", "--json", *short).out)
    assert (answer["text"], answer["finish"]) == (expected["chat"], expected["finish"])


def test_a_dash_reads_the_prompt_from_standard_input(
    run: Any, tiny: Path, expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello"))
    done = run("generate", tiny, "-", "--max-tokens", "6", "--temperature", "0", *FLAGS)
    assert done.out == expected["chat"] + "\n"


def test_a_seed_makes_sampling_repeatable(run: Any, tiny: Path) -> None:
    words = ("generate", tiny, "Hello", "--json", "--max-tokens", "8", "--temperature", "1.5", *FLAGS)
    first = run(*words, "--seed", "7").out
    assert run(*words, "--seed", "7").out == first
    assert run(*words, "--seed", "8").out != first


def test_a_plugins_options_and_the_selection_reach_the_engine(run: Any, tiny: Path) -> None:
    done = run("generate", tiny, "Hello", *FLAGS, "--warmup-policy", "none", "--plugin", "no:warmup-none")
    assert done.code == 2
    assert "--warmup-policy none" in done.err
