"""Deep probes of a start. Oracle: children that answer wrongly in ways put in by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from attrs import evolve

from freetoken.builtin import BUILTINS
from freetoken.plugin import probe
from freetoken.plugin.manager import build_plugins
from freetoken.plugin.probe import deep_probe
from freetoken.plugin.selection import Selection
from freetoken.serve import prepare
from freetoken.serve.prepare import DeepProbes
from freetoken.vocab.availability import Availability
from freetoken.vocab.hardware import Hardware

PLUGINS = build_plugins(Selection(), BUILTINS)
SPEC = next(spec for spec in PLUGINS.catalogs.attention_backends if "cpu" in spec.devices)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Answers of which the child cannot make three values, and one that a library talks over as it leaves."""
    (tmp_path / "odd_probe.py").write_text(
        "import atexit\n"
        "class Odd:\n    ok, reason, fix = True, 'fine', ''\n"
        "def talks(hardware):\n    atexit.register(print, 'bye from libodd')\n    return Odd()\n"
        "def leaves(hardware):\n    raise SystemExit(0)\n"
        "def right(hardware):\n    return Odd()\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "odd_probe"


@pytest.mark.parametrize(("function", "said"), [("talks", "bye from libodd"), ("leaves", "it said nothing")])
def test_an_answer_that_cannot_be_read_is_an_unavailability_with_its_text(
    module: str, function: str, said: str
) -> None:
    probes = DeepProbes(Hardware(), PLUGINS.catalogs)
    answer = probes(evolve(SPEC, deep_probe=f"{module}:{function}"))
    assert not answer
    assert "its probe's answer cannot be read" in answer.reason
    assert said in answer.reason


def test_an_answer_that_can_be_read_is_kept(module: str) -> None:
    assert deep_probe(f"{module}:right", Hardware()) == Availability(True, "fine", "")


@pytest.mark.parametrize("text", ["", "null", "[1, 2]", "{}", "[1, 2, 3, 4]", "7"])
def test_no_answer_raises(text: str) -> None:
    assert not probe._read_answer(text)


def test_a_probe_that_cannot_be_asked_is_an_unavailability(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that cannot be started, for lack of processes or memory."""

    def ask(spec: object, hardware: Hardware, deep: bool) -> Availability:
        if deep:
            raise OSError("no more processes")
        return Availability.yes()

    monkeypatch.setattr(prepare, "availability", ask)
    answer = DeepProbes(Hardware(), PLUGINS.catalogs)(evolve(SPEC, deep_probe="m:f"))
    assert not answer
    assert "no more processes" in answer.reason
