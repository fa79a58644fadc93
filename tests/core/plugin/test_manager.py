"""Plugins load one by one. Oracle: a stranger's distribution written to disk, installed the way pip leaves it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from freetoken.builtin import BUILTINS
from freetoken.plugin.commands import CommandGroup
from freetoken.plugin.manager import Plugins, build_plugins
from freetoken.plugin.selection import Selection
from freetoken.plugin.specs import Candidate
from freetoken.vocab.errors import MissingPlugin, PluginError, UsageError
from freetoken.vocab.hardware import Hardware

POLICY = """
from freetoken import hookimpl
from freetoken.plugin.specs import WarmupPolicySpec

@hookimpl
def freetoken_warmup_policies():
    return [WarmupPolicySpec(name={name!r}, summary="theirs", create=lambda options: None)]
"""

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """``install(dist, body)``: a distribution with one module and one entry point, both called ``dist``."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)

    def write(dist: str, body: str, entry: str = "", module: str = "") -> None:
        name = module or dist.replace("-", "_")
        (tmp_path / f"{name}.py").write_text(body)
        info = tmp_path / f"{dist.replace('-', '_')}-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: 1.2\n")
        (info / "entry_points.txt").write_text(f"[freetoken]\n{entry or dist} = {name}\n")

    yield write
    for name in set(sys.modules) - before:
        del sys.modules[name]


def load(*words: str) -> Plugins:
    return build_plugins(Selection.of(words), BUILTINS)


def test_builtins_come_in_by_the_same_hooks_and_are_all_well() -> None:
    plugins = load()
    states = {name: plugins.records[name] for name in BUILTINS}
    assert {r.state for r in states.values()} == {"active"}, states
    assert not any(r.imports_torch for r in states.values())


def test_a_strangers_policy_is_offered(install: Install) -> None:
    install("acme", POLICY.format(name="replay"))
    plugins = load()
    assert plugins.catalogs.warmup_policies.get("replay").summary == "theirs"
    assert (plugins.records["acme"].distribution, plugins.records["acme"].version) == ("acme", "1.2")


BROKEN = {
    "bad-import": ("import a_module_that_is_not_there", "No module named 'a_module_that_is_not_there'"),
    "exits": ("raise SystemExit(3)", "SystemExit: 3"),
    "misspelt": (
        "from freetoken import hookimpl\n@hookimpl\ndef freetoken_warmup_policy():\n    return []\n",
        "did you mean freetoken_warmup_policies?",
    ),
    "unknown-argument": (
        "from freetoken import hookimpl\n@hookimpl\ndef freetoken_ready(plan, weather):\n    pass\n",
        "weather",
    ),
    "default-value": (
        "from freetoken import hookimpl\n@hookimpl\ndef freetoken_ready(plan, sizing=None):\n    pass\n",
        "gives a default to sizing",
    ),
    "keyword-only": (
        "from freetoken import hookimpl\n@hookimpl\ndef freetoken_ready(*, plan):\n    pass\n",
        "keyword-only",
    ),
    "no-hooks": ("x = 1\n", "implements no hook"),
    "duplicate": (POLICY.format(name="none"), "which warmup-none already offers"),
    "wrong-offer": (
        "from freetoken import hookimpl\n@hookimpl\ndef freetoken_kernels():\n    return ['fast']\n",
        "offered a str",
    ),
    "raises": (
        "from freetoken import hookimpl\n@hookimpl\ndef freetoken_kernels():\n    raise ValueError('oh')\n",
        "ValueError: oh",
    ),
    "thawed-options": (
        "from freetoken import hookimpl\nfrom freetoken.plugin.specs import OptionsSpec\nclass O: pass\n"
        "@hookimpl\ndef freetoken_options():\n    return [OptionsSpec(owner='o', cls=O)]\n",
        "is not an attrs class",
    ),
}


@pytest.mark.parametrize("dist", BROKEN)
def test_a_broken_plugin_is_reported_against_its_own_name_and_the_others_load(install: Install, dist: str) -> None:
    body, reason = BROKEN[dist]
    install(dist, body)
    install("well", POLICY.format(name="well"))
    plugins = load()
    assert plugins.records[dist].state == "failed"
    assert reason in plugins.records[dist].reason
    assert plugins.records["well"].state == "active"
    assert "well" in plugins.catalogs.warmup_policies.names()
    assert set(BUILTINS) <= {n for n, r in plugins.records.items() if r.state == "active"}


def test_a_failed_plugin_leaves_nothing_behind(install: Install) -> None:
    install("half", POLICY.format(name="half") + "\n@hookimpl\ndef freetoken_kernels():\n    return [1]\n")
    plugins = load()
    assert "half" not in plugins.catalogs.warmup_policies.names()
    assert plugins.manager.get_plugin("half") is None


def test_of_two_strangers_with_one_name_the_alphabetically_first_keeps_it(install: Install) -> None:
    install("zeta", POLICY.format(name="same"))
    install("alpha", POLICY.format(name="same"))
    plugins = load()
    assert plugins.catalogs.warmup_policies.owner("same") == "alpha"
    assert "which alpha already offers" in plugins.records["zeta"].reason


def test_two_distributions_with_one_entry_point_name_are_both_listed(install: Install) -> None:
    install("first", POLICY.format(name="one"), entry="shared", module="first_module")
    install("second", POLICY.format(name="two"), entry="shared", module="second_module")
    plugins = load()
    assert plugins.records["shared"].state == "active"
    other = next(r for n, r in plugins.records.items() if n.startswith("shared ["))
    assert other.state == "failed"
    assert "first_module" in other.reason
    assert "second_module" in other.reason


def test_a_blocked_plugin_is_not_imported(install: Install) -> None:
    install("loud", "raise RuntimeError('imported')")
    assert load("no:loud").records["loud"].state == "blocked"


def test_a_required_plugin_that_failed_or_is_absent_ends_the_start(install: Install) -> None:
    install("bad", "import nothing_here")
    with pytest.raises(UsageError, match="nothing_here"):
        load("bad")
    with pytest.raises(UsageError, match="no plugin of this name"):
        load("absent_plugin")


def test_a_required_name_may_be_a_plain_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "my_draft.py").write_text(POLICY.format(name="draft"))
    assert "draft" in load("my_draft").catalogs.warmup_policies.names()
    del sys.modules["my_draft"]


def test_duplicate_flags_and_variables_are_refused(install: Install) -> None:
    body = (
        "from attrs import frozen\nfrom freetoken import hookimpl, option\n"
        "from freetoken.plugin.specs import OptionsSpec\n"
        "@frozen\nclass O:\n    x: int = option(1, help='x', aliases={aliases!r})\n"
        "@hookimpl\ndef freetoken_options():\n    return [OptionsSpec(owner={owner!r}, cls=O)]\n"
    )
    install("one", body.format(owner="one", aliases=("--model",)))
    install("two", body.format(owner="two", aliases=("FREETOKEN_PORT",)))
    install("three", body.format(owner="three", aliases=()))
    plugins = load()
    assert "brings --model, which core already brings" in plugins.records["one"].reason
    assert "brings FREETOKEN_PORT, which core already brings" in plugins.records["two"].reason
    assert plugins.records["three"].state == "active"


def test_catalog_order_does_not_depend_on_load_order(install: Install) -> None:
    for name in ("m", "b", "q"):
        install(name, POLICY.format(name=name))
    assert load().catalogs.warmup_policies.names()[-4:] == ("b", "m", "none", "q")


def test_an_unknown_name_is_answered_with_the_pip_line() -> None:
    with pytest.raises(MissingPlugin, match="pip install freetoken-moe-offload") as caught:
        load("no:moe-offload").catalogs.moe_strategies.get("offload")
    assert "--moe-strategy offload" in str(caught.value)


def test_an_unknown_name_nobody_brings_lists_the_known() -> None:
    with pytest.raises(UsageError, match=r"auto, .*none"):
        load().catalogs.warmup_policies.get("nonsense")


def test_choose_is_overruled_by_a_plugin_and_checked(install: Install) -> None:
    candidates = [Candidate("a", 2, ""), Candidate("b", 1, "")]
    assert load().choose("kernel", "rope", candidates, Hardware()) == "a"
    install("picky", "from freetoken import hookimpl\n@hookimpl\ndef freetoken_choose(subject):\n    return 'b'\n")
    assert load().choose("kernel", "rope", candidates, Hardware()) == "b"
    with pytest.raises(PluginError, match="no candidate"):
        load().choose("kernel", "rope", candidates[:1], Hardware())


def test_two_plugins_adding_one_command_is_an_error_naming_both(install: Install) -> None:
    body = (
        "from freetoken import hookimpl\nfrom freetoken.plugin.commands import Command\n"
        "@hookimpl\ndef freetoken_add_commands(commands):\n"
        "    commands.add(Command('serve', 's', lambda p: None, lambda c: 0))\n"
    )
    install("greedy", body)
    with pytest.raises(PluginError, match="commands and greedy"):
        load().add_commands(CommandGroup())


def test_a_tell_that_raises_names_its_plugin(install: Install) -> None:
    install(
        "sulky", "from freetoken import hookimpl\n@hookimpl\ndef freetoken_shutdown(plan):\n    raise OSError('no')\n"
    )
    with pytest.raises(PluginError, match=r"plugin sulky(.|\n)*OSError: no"):
        load().shutdown(None)  # type: ignore[arg-type]
