"""The list behind the ``pip install`` hints is true. Oracle: the packages' own ``pyproject.toml`` and live specs."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from freetoken.builtin import BUILTINS
from freetoken.plugin.distributions import flag_hint, install_hint, known_distributions
from freetoken.plugin.manager import Plugins, build_plugins
from freetoken.plugin.markers import ENTRY_POINT_GROUP
from freetoken.plugin.options import option_fields
from freetoken.plugin.selection import Selection
from freetoken.vocab import kinds

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = sorted(path.parent for path in ROOT.glob("plugins/*/pyproject.toml"))
HINTED = tuple(k for k in kinds.OFFER_KINDS if k is not kinds.OPTIONS)


@pytest.fixture(scope="module")
def plugins() -> Plugins:
    return build_plugins(Selection(), BUILTINS)


def project(folder: Path) -> dict[str, Any]:
    return tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def entry_point(folder: Path) -> str:
    """The one plugin that a package registers."""
    (name,) = project(folder)["entry-points"][ENTRY_POINT_GROUP]
    return str(name)


def offered(plugins: Plugins, owner: str) -> dict[str, set[str]]:
    """Hook → names, as the loaded plugin offers them."""
    found: dict[str, set[str]] = {}
    for kind in HINTED:
        catalog = getattr(plugins.catalogs, kind.hook.removeprefix("freetoken_"))
        names = {key for key, offer in catalog.offers.items() if offer.owner == owner}
        if names:
            found[kind.hook] = names
    return found


def option_words(plugins: Plugins, owner: str) -> set[str]:
    """Every flag and variable that the plugin's options bring."""
    offers = plugins.catalogs.options.offers.values()
    fields = [f for offer in offers if offer.owner == owner for f in option_fields(offer.spec)]
    return {word for f in fields for word in (*f.flags, *f.variables)}


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda p: p.name)
def test_every_package_is_listed_as_it_is(folder: Path, plugins: Plugins) -> None:
    name, plugin = project(folder)["name"], entry_point(folder)
    entry = dict(known_distributions().get(name, {}))
    assert entry.pop("plugin", "") == plugin
    record = plugins.records.get(plugin)
    assert record is not None, f"{name} is not installed: run `make test` once"
    assert record.state == "active", f"{plugin} is {record.state}: {record.reason}"
    flags = set(entry.pop("flags", []))  # type: ignore[call-overload]
    assert {hook: set(names) for hook, names in entry.items()} == offered(plugins, plugin)  # type: ignore[call-overload]
    assert flags == option_words(plugins, plugin)


def test_every_listed_package_exists() -> None:
    """An entry without a folder is only allowed for a package that is announced and not written yet."""
    here = {project(folder)["name"] for folder in FOLDERS}
    listed = set(known_distributions())
    assert here <= listed
    for name in listed - here:
        folder = ROOT / "plugins" / name.removeprefix("freetoken-").replace("-", "_")
        assert not folder.exists(), f"{folder} exists, but its pyproject.toml does not say it is {name}"


def test_no_name_is_promised_by_two_packages() -> None:
    seen: dict[tuple[str, str], str] = {}
    for name, entry in known_distributions().items():
        for hook, words in entry.items():
            for word in words if isinstance(words, list) else ():
                assert (hook, word) not in seen, f"{word} is promised by {seen[hook, word]} and {name}"
                seen[hook, word] = name


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda p: p.name)
def test_hints_lead_to_the_package(folder: Path, plugins: Plugins) -> None:
    """What a user without the package would type finds the package; a flag's ``--no-`` form does too."""
    name, plugin = project(folder)["name"], entry_point(folder)
    for hook, words in offered(plugins, plugin).items():
        for word in words:
            hint = install_hint(hook, word)
            assert hint is not None
            assert (hint.distribution, hint.plugin) == (name, plugin)
    for word in option_words(plugins, plugin):
        for spelling in (word, word.replace("--", "--no-", 1)):
            hint = flag_hint(spelling)
            assert hint is not None, spelling
            assert hint.distribution == name
