"""Known distributions and what they offer, for ``pip install`` hints: the one place where shared code lists plugins.

The list lives in ``distributions.toml``; a test compares it with the packages' own specs and metadata.
"""

from __future__ import annotations

import tomllib
from functools import cache
from importlib import resources

from attrs import frozen


@frozen
class Hint:
    """The distribution that brings a name, and the name of its plugin (its entry point)."""

    distribution: str
    plugin: str


@cache
def known_distributions() -> dict[str, dict[str, object]]:
    """Distribution → its entry in ``distributions.toml``."""
    text = resources.files("freetoken.plugin").joinpath("distributions.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def install_hint(hook: str, name: str) -> Hint | None:
    """Who would bring ``name`` for ``hook``; ``None`` when nobody known does."""
    for distribution, entry in known_distributions().items():
        names = entry.get(hook, [])
        if isinstance(names, list) and name in names:
            return Hint(distribution, str(entry["plugin"]))
    return None


def flag_hint(flag: str) -> Hint | None:
    """Who would bring a command-line ``flag`` (also its ``--no-`` form), or a variable."""
    for distribution, entry in known_distributions().items():
        names = entry.get("flags", [])
        if isinstance(names, list) and (flag in names or flag.replace("--no-", "--", 1) in names):
            return Hint(distribution, str(entry["plugin"]))
    return None
