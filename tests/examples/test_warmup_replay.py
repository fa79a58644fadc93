"""The example policy and the page that is cut from it. Oracles: the conformance suite, the file, and a built wheel."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

from freetoken.models import qwen3_moe
from freetoken.plugin.protocols import WarmupPolicy
from freetoken.testing.warmup import WarmupPolicyConformance, example_space
from freetoken.vocab.errors import UsageError
from freetoken.vocab.warmup import Forward, Known

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "warmup-replay"
PAGE = ROOT / "docs" / "write_a_warmup_policy.md"


def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("freetoken_warmup_replay", EXAMPLE / "freetoken_warmup_replay.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(spec.name, module)
    spec.loader.exec_module(module)
    return module


replay = example()
Replay = replay.Replay


class TestReplay(WarmupPolicyConformance):
    promises = None

    def policy(self) -> WarmupPolicy:
        return Replay(lengths=(1, 17, 17, 400, 99_999), most=3)


def test_the_most_frequent_lengths_come_first() -> None:
    """By hand: 17 was seen twice, then 5 and 9 in the order of the file; 11 is one too many."""
    steps = Replay(lengths=(5, 9, 17, 11, 17), most=3).steps(TestReplay().plan(), example_space(), Known())
    prefills = [s.point.tokens for s in steps if isinstance(s, Forward) and not s.point.decode]
    assert prefills == [17, 5, 9]


@pytest.mark.parametrize(("text", "wrong"), [("5\nfive\n", "line 2"), ("0\n", "line 1"), ("-3", "line 1")])
def test_a_line_that_is_no_length_is_named(tmp_path: Path, text: str, wrong: str) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text(text)
    with pytest.raises(UsageError, match=wrong):
        replay.read_lengths(str(file))


def test_without_a_file_the_flag_is_named() -> None:
    with pytest.raises(UsageError, match="--warmup-replay-file"):
        replay.create(replay.ReplayOptions())


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize("block", blocks("python"), ids=lambda b: b.strip().splitlines()[0][:40])
def test_every_block_of_the_page_is_in_the_example_or_here(block: str) -> None:
    source = (EXAMPLE / "freetoken_warmup_replay.py").read_text(encoding="utf-8")
    here = Path(__file__).read_text(encoding="utf-8")
    assert block in source or block in here


def test_the_entry_point_of_the_page_is_the_examples() -> None:
    (block,) = blocks("toml")
    assert block in (EXAMPLE / "pyproject.toml").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_wheel_installs_and_its_policy_is_planned(tmp_path: Path) -> None:
    """As the page says, but into a folder: a stranger's policy, picked by its name, told by its own flag."""
    pytest.importorskip("freetoken_kernels_triton")
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(tmp_path)]
    subprocess.run([*build, str(EXAMPLE)], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({**qwen3_moe.tiny(), "dtype": "bfloat16"}))
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("7\n19\n")
    words = (str(model), "--target", "h200", "--max-prefill-tokens", "40", "--max-running-requests", "4", "--json")
    command = [sys.executable, "-m", "freetoken", "warmup", "plan", *words]
    environment = {**os.environ, "PYTHONPATH": str(site), "FREETOKEN_CACHE_DIR": str(tmp_path / "cache")}
    picked = ("--warmup-policy", "replay", "--warmup-replay-file", str(lengths))
    done = subprocess.run([*command, *picked], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    forwards = [(s["point"]["tokens"], s["point"]["decode"]) for s in plan["steps"] if s["step"] == "Forward"]
    assert forwards == [(7, False), (1, True), (19, False), (1, True)]
    assert plan["policy"] == "replay"
    refused = subprocess.run(
        [*command, "--warmup-policy", "replay"], env=environment, capture_output=True, text=True, check=False
    )
    assert refused.returncode == 2
    assert "--warmup-replay-file FILE" in refused.stderr
