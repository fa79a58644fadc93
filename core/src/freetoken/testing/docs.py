"""Writes the reference pages that code can write: ``python -m freetoken.testing.docs DIR``. Tests compare them."""

from __future__ import annotations

import inspect
import sys
import typing
from pathlib import Path

from freetoken.builtin import BUILTINS
from freetoken.plugin import hookspecs
from freetoken.plugin.manager import Plugins, build_plugins
from freetoken.plugin.options import OptionField, option_fields
from freetoken.plugin.selection import Selection

OPTIONS_HEAD = """# Options

Written by `make docs` from the option classes; a test compares. Every option can be given as a flag, as an environment
variable, or in `freetoken.toml` (a plugin's in a section with its owner's name); later sources win in the order file,
environment, flag. `freetoken explain` shows where each value came from.
"""

HOOKS_HEAD = """# Hooks

Written by `make docs` from `freetoken/plugin/hookspecs.py`; a test compares. A plugin is a module with functions of
these names, marked with `freetoken.hookimpl`, and an entry point in the group `freetoken`. An implementation may take
any subset of the arguments, by name and without defaults. Hooks run at start-up only.

Three kinds and no fourth: an *offer* returns a list of frozen specs; a *decision* returns a candidate's name, or `None`
to abstain, and the first answer counts; a *tell* informs, and what it returns is ignored.
"""


def options_page(plugins: Plugins) -> str:
    """``docs/options.md`` for the owners that ``plugins`` know."""
    parts = [OPTIONS_HEAD]
    for spec in sorted(plugins.catalogs.options, key=lambda s: (s.owner != "core", s.owner)):
        parts.append(f"\n## {spec.owner}: {spec.summary}\n")
        parts.append("| flag | variable | file | default | what it is for |\n| --- | --- | --- | --- | --- |")
        parts += [_row(option) for option in option_fields(spec)]
    return "\n".join(parts) + "\n"


def _row(option: OptionField) -> str:
    default = "auto" if option.default is None else option.default
    shown = (
        ", ".join(default) or "none"
        if isinstance(default, tuple)
        else str(default).lower()
        if isinstance(default, bool)
        else str(default)
    )
    text = option.meta.help
    if option.meta.unit and option.meta.unit not in text:
        text += f" ({option.meta.unit})"
    if option.meta.choices:
        text += "; one of " + ", ".join(f"`{c}`" for c in option.meta.choices)
    bounds = [f"at least {option.meta.low:g}"] if option.meta.low is not None else []
    bounds += [f"at most {option.meta.high:g}"] if option.meta.high is not None else []
    text += f"; {', '.join(bounds)}" if bounds else ""
    flags = ", ".join(f"`{f}`" for f in option.flags)
    variables = ", ".join(f"`{v}`" for v in option.variables)
    return f"| {flags} | {variables} | `{option.file_key}` | {shown} | {text} |"


def hook_signature(name: str) -> str:
    """The exact signature as it stands in ``hookspecs.py``."""
    function = getattr(hookspecs, name)
    signature = inspect.signature(function)
    shown = ", ".join(f"{p.name}: {p.annotation}" for p in signature.parameters.values())
    return f"{name}({shown}) -> {signature.return_annotation}"


def hook_names() -> list[str]:
    """Every hook, in the order of the file."""
    return [n for n in vars(hookspecs) if n.startswith("freetoken_")]


def hooks_page() -> str:
    """``docs/hooks.md``."""
    parts = [HOOKS_HEAD]
    for name in hook_names():
        function = getattr(hookspecs, name)
        parts.append(f"\n## `{hook_signature(name)}`\n")
        parts.append(f"*{_kind(name)}.* {inspect.getdoc(function)}")
    return "\n".join(parts) + "\n"


def _kind(name: str) -> str:
    function = getattr(hookspecs, name)
    options = typing.cast(typing.Any, function).freetoken_spec
    if options.get("firstresult"):
        return "Decision"
    return "Tell" if inspect.signature(function).return_annotation == "None" else "Offer"


def main(folder: str) -> None:
    target = Path(folder)
    plugins = build_plugins(Selection(), BUILTINS)
    target.joinpath("options.md").write_text(options_page(plugins), encoding="utf-8")
    target.joinpath("hooks.md").write_text(hooks_page(), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
