"""The reference pages say what the code says. Oracle: the pages made anew from the code."""

from __future__ import annotations

from pathlib import Path

import pytest

from freetoken.builtin import BUILTINS
from freetoken.plugin.manager import build_plugins
from freetoken.plugin.selection import Selection
from freetoken.testing.docs import hook_names, hook_signature, hooks_page, options_page

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_options_page_is_current() -> None:
    plugins = build_plugins(Selection(), BUILTINS)
    assert (DOCS / "options.md").read_text(encoding="utf-8") == options_page(plugins), "run `make docs`"


def test_hooks_page_is_current() -> None:
    assert (DOCS / "hooks.md").read_text(encoding="utf-8") == hooks_page(), "run `make docs`"


@pytest.mark.parametrize("name", hook_names())
def test_every_hook_has_a_heading_with_its_exact_signature(name: str) -> None:
    assert f"## `{hook_signature(name)}`" in (DOCS / "hooks.md").read_text(encoding="utf-8")
