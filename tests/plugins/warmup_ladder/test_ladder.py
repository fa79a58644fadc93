"""The ladder as a policy and as a plugin. Oracles: the core's conformance suite, and the package's own metadata."""

from __future__ import annotations

import importlib.metadata
import logging
import tomllib
from pathlib import Path

import pytest

pytest.importorskip("freetoken_warmup_ladder")

from freetoken.builtin import BUILTINS
from freetoken.config.sources import FlagValue, OptionTable, merge, refuse_flag
from freetoken.models import llama
from freetoken.plugin.distributions import known_distributions
from freetoken.plugin.manager import build_plugins
from freetoken.plugin.options import option_fields
from freetoken.plugin.protocols import WarmupPolicy
from freetoken.plugin.selection import Selection
from freetoken.testing.plans import launch_space_of, planned
from freetoken.testing.warmup import WarmupPolicyConformance, bare_space, example_space
from freetoken.vocab.errors import OptionError
from freetoken.vocab.warmup import Forward, Known
from freetoken_warmup_ladder import spec
from freetoken_warmup_ladder.options import LadderOptions
from freetoken_warmup_ladder.policy import Ladder, decide_cap, decide_workers

PACKAGE = Path(__file__).resolve().parents[3] / "plugins" / "warmup_ladder"


class TestConformance(WarmupPolicyConformance):
    promises = 512

    def policy(self) -> WarmupPolicy:
        return spec.create(None)


class TestLowCap(WarmupPolicyConformance):
    promises = 7

    def policy(self) -> WarmupPolicy:
        return spec.create(LadderOptions(max_tokens=7))


class TestSkip(WarmupPolicyConformance):
    promises = None

    def policy(self) -> WarmupPolicy:
        return spec.create(LadderOptions(skip=True))


def test_skipping_yields_nothing_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    plan = planned(llama.tiny(), dtype="float32").plan
    with caplog.at_level(logging.INFO, "freetoken.warmup"):
        steps = list(Ladder(LadderOptions(skip=True)).steps(plan, example_space(), Known()))
    assert steps == []
    assert "--skip-prefill-warmup" in caplog.text
    assert "still captured" in caplog.text


def test_an_engine_that_declares_nothing_gets_one_small_forward() -> None:
    plan = planned(llama.tiny(), dtype="float32").plan
    (step,) = Ladder(LadderOptions()).steps(plan, bare_space(), Known())
    assert isinstance(step, Forward)
    assert step.point.tokens <= 2
    assert "no kernel declares" in step.because


def test_a_model_on_a_cpu_gets_one_small_forward() -> None:
    resolved = planned(llama.tiny(), dtype="float32")
    assert resolved.plan.warmup.name == "ladder"
    steps = list(Ladder(LadderOptions()).steps(resolved.plan, launch_space_of(resolved), Known()))
    assert [type(step) for step in steps] == [Forward]


def test_an_op_that_declares_nothing_is_run_at_every_edge() -> None:
    """By hand: the buckets end at 1, 8, 16, 100 and 512 tokens and start one later."""
    plan = planned(llama.tiny(), dtype="float32").plan
    steps = Ladder(LadderOptions()).steps(plan, example_space(), Known())
    tokens = {step.point.tokens for step in steps if isinstance(step, Forward)}
    assert tokens >= {1, 2, 8, 9, 16, 17, 100, 101, 512}


@pytest.mark.parametrize(("asked", "cap"), [(None, 512), (7, 7), (512, 512), (99_999, 512)])
def test_the_cap_is_the_least_of_chunk_longest_request_and_option(asked: int | None, cap: int) -> None:
    plan = planned(llama.tiny(), dtype="float32").plan
    assert min(plan.max_prefill_tokens, plan.max_seq_tokens) == 512
    assert decide_cap(LadderOptions(max_tokens=asked), plan).value == cap


def test_workers_are_as_told_or_as_memory_allows() -> None:
    plan = planned(llama.tiny(), dtype="float32").plan
    assert decide_workers(LadderOptions(workers=3), plan).value == 3
    assert decide_workers(LadderOptions(), plan).value == plan.hardware.cores


# ------------------------------------------------------------------------------------------------ the package


def table(*words: str) -> OptionTable:
    return OptionTable.of(build_plugins(Selection.of(words), BUILTINS).catalogs.options)


def test_its_flags_and_variables_are_unknown_without_it() -> None:
    for flag in ("--skip-prefill-warmup", "--warmup-ladder-max-tokens", "--warmup-ladder-workers"):
        assert flag in table().by_flag
        without = table("no:warmup-ladder")
        assert flag not in without.by_flag
        with pytest.raises(OptionError) as refused:
            refuse_flag(flag, without)
        assert "pip install freetoken-warmup-ladder" in str(refused.value)
    assert "FREETOKEN_WARMUP_MAX_LEN" in table().by_variable
    assert "FREETOKEN_WARMUP_MAX_LEN" not in table("no:warmup-ladder").by_variable


@pytest.mark.parametrize(
    ("flags", "environment"),
    [
        ([FlagValue("--warmup-ladder-max-tokens", "2048")], {}),
        ([], {"FREETOKEN_WARMUP_MAX_LEN": "2048"}),
        ([], {"FREETOKEN_WARMUP_LADDER_MAX_TOKENS": "2048"}),
    ],
)
def test_the_cap_by_flag_and_by_either_variable(flags: list[FlagValue], environment: dict[str, str]) -> None:
    plugins = build_plugins(Selection(), BUILTINS)
    options = OptionTable.of(plugins.catalogs.options)
    settings = merge(options, flags=flags, environment=environment, file={}, file_name="-", records=plugins.records)
    (owner,) = (s for s in plugins.catalogs.options if s.owner == spec.OWNER)
    assert settings.of(owner) == LadderOptions(max_tokens=2048)


def test_the_list_of_known_distributions_says_what_the_package_says() -> None:
    entry = known_distributions()["freetoken-warmup-ladder"]
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["name"] == "freetoken-warmup-ladder"
    assert {str(entry["plugin"])} == set(project["entry-points"]["freetoken"])
    assert entry["freetoken_warmup_policies"] == [p.name for p in spec.freetoken_warmup_policies()]
    (offer,) = spec.freetoken_options()
    fields = option_fields(offer)
    assert set(entry["flags"]) == {name for f in fields for name in (*f.flags, *f.variables)}  # type: ignore[arg-type]
    assert importlib.metadata.version(project["name"])


def test_the_spec_imports_no_library() -> None:
    """Oracle: the module table of a fresh interpreter."""
    import subprocess
    import sys

    code = "import sys, freetoken_warmup_ladder.spec; print({'torch', 'triton', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
