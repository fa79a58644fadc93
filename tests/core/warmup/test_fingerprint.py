"""Fingerprints. Oracle: facts changed one at a time."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from attrs import evolve

from freetoken.models import llama
from freetoken.testing.launches import DEVICES
from freetoken.testing.plans import planned
from freetoken.vocab.plan import OptionValue, Plan
from freetoken.warmup.fingerprint import (
    Fingerprint,
    configuration_digest,
    driver_version,
    environment_digest,
    package_digest,
    take_fingerprint,
)

PLAN = planned(llama.tiny(), dtype="float32").plan
PLUGINS = {"kernels": ("1.0", "json.decoder")}


def differences(plan: Plan, plugins: dict[str, tuple[str, str]] | None = None) -> str:
    return "; ".join(take_fingerprint(plan, plugins or PLUGINS).differences(take_fingerprint(PLAN, PLUGINS)))


def test_the_same_start_has_the_same_fingerprint() -> None:
    one, other = take_fingerprint(PLAN, PLUGINS), take_fingerprint(planned(llama.tiny(), dtype="float32").plan, PLUGINS)
    assert one == other
    assert one.digest == other.digest


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "bfloat16"},
        {"page_tokens": 32},
        {"max_prefill_tokens": 77},
        {"max_running_requests": 5},
        {"max_seq_tokens": 100},
        {"warmup": evolve(PLAN.warmup, name="other")},
        {"options": (OptionValue("ladder", "max_tokens", 5, "flag"),)},
    ],
)
def test_whatever_launches_depend_on_changes_the_configuration(change: dict[str, object]) -> None:
    assert differences(evolve(PLAN, **change)).startswith("configuration: ")  # type: ignore[arg-type]


def test_what_launches_do_not_depend_on_changes_nothing() -> None:
    other = evolve(PLAN, served_name="x", model_path="/elsewhere", memory_bytes=5, kv_tokens=64)
    assert configuration_digest(other) == configuration_digest(PLAN)


def test_the_card_its_driver_and_the_plugins_are_in_it() -> None:
    assert "device: NVIDIA" in differences(evolve(PLAN, device=evolve(DEVICES["h200"], name="NVIDIA H200")))
    assert "plugin kernels: 2.0, was 1.0" in differences(PLAN, {"kernels": ("2.0", "json.decoder")})
    assert "plugin other: 1.0, was absent" in differences(PLAN, {**PLUGINS, "other": ("1.0", "wave")})


def test_one_changed_line_of_a_kernel_changes_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "acme_kernels"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "kernel.py").write_text("A = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = package_digest("acme_kernels")
    package_digest.cache_clear()
    (package / "kernel.py").write_text("A = 2\n")
    assert package_digest("acme_kernels") != before
    package_digest.cache_clear()
    (package / "kernel.py").write_text("A = 1\n")
    assert package_digest("acme_kernels") == before
    assert package_digest("nothing_of_that_name") == "absent"
    sys.modules.pop("acme_kernels", None)


def test_only_variables_that_compiling_reads_count() -> None:
    assert environment_digest({"TRITON_CACHE_DIR": "/x", "HOME": "/y"}) == environment_digest({})
    assert environment_digest({"TRITON_F32_DEFAULT": "ieee"}) != environment_digest({})


def test_the_driver_says_its_version(tmp_path: Path) -> None:
    told = tmp_path / "proc/driver/nvidia"
    told.mkdir(parents=True)
    (told / "version").write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\n")
    assert driver_version(tmp_path) == "580.95.05"
    assert driver_version(tmp_path / "nowhere") == ""


def test_long_facts_are_shortened_in_words_and_absent_ones_are_said_to_be() -> None:
    one, other = Fingerprint.of({"a": "x" * 64, "b": "1"}), Fingerprint.of({"a": "y" * 64})
    assert one.differences(other) == ("a: xxxxxxxxxxxx…, was yyyyyyyyyyyy…", "b: 1, was absent")
