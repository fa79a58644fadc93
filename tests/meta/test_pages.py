"""The other pages say what the code says. Oracles: the floors, the Makefile, the API's models, the live formats."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from freetoken.builtin import BUILTINS
from freetoken.plugin.manager import build_plugins
from freetoken.plugin.selection import Selection
from freetoken.serve.http.app import ROUTES
from freetoken.serve.http.request_models import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from freetoken.testing.kernels import KernelConformance

ROOT = Path(__file__).resolve().parents[2]


def load(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def test_the_architectures_floors_are_those_that_are_checked(document: Callable[[str], Any]) -> None:
    """Oracle: ``ROWS`` of the test that walks the imports."""
    rows = load(Path(__file__).with_name("test_floors.py"), "floors_for_pages").ROWS
    found = re.findall(r"^\| (\d+) \| `(\w+)` \|", document("ARCHITECTURE.md").text, re.M)
    assert found == [(str(floor), room) for floor, rooms in enumerate(rows, start=1) for room in rooms]


def test_the_lives_are_numbered_and_a_request_has_eight_steps(document: Callable[[str], Any]) -> None:
    text = document("ARCHITECTURE.md").text
    for heading, steps in (("The life of a start", None), ("The life of a request", 8)):
        part = text.partition(f"## {heading}\n")[2].partition("\n## ")[0]
        numbers = [int(n) for n in re.findall(r"^(\d+)\. ", part, re.M)]
        assert numbers == list(range(1, (steps or len(numbers)) + 1))


def test_names_in_backticks_that_look_like_files_are_files(document: Callable[[str], Any]) -> None:
    """Oracle: the tree; ``vocab/plan.py`` is meant from ``core/src/freetoken``, others from the root."""
    for page in ("ARCHITECTURE.md", "CONTRIBUTING.md", "docs/write_a_plugin.md"):
        for name in re.findall(r"`([\w/.]+/[\w.]+\.(?:py|md|toml))`", document(page).text):
            places = (ROOT / name, ROOT / "core/src/freetoken" / name, ROOT / "core/src" / name)
            assert any(place.exists() for place in places), f"{page}: {name}"


def test_every_make_target_of_the_pages_exists(document: Callable[[str], Any]) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    for page in ("README.md", "CONTRIBUTING.md"):
        named = set(re.findall(r"(?:^|`)make ([\w-]+)", document(page).text, re.M))
        assert named <= targets, named - targets
    help_text = (ROOT / "Makefile").read_text()
    assert all(f"make {c.split()[1]}" in help_text for c in document("CONTRIBUTING.md").commands())


def test_every_field_and_endpoint_of_the_api_is_documented(document: Callable[[str], Any]) -> None:
    text = document("docs/api.md").text
    for model in (ChatBody, CompletionBody, TokenizeBody, DetokenizeBody):
        for name in (*model.model_fields, *model.not_implemented):
            assert f"`{name}`" in text, name
    for route in ROUTES:
        assert f"`{route.method} {route.path.replace(':path', '').replace('{model}', '{id}')}`" in text, route.path


def test_every_weight_format_is_documented(document: Callable[[str], Any]) -> None:
    text = document("docs/models.md").text.partition("## Weights")[2]
    for spec in build_plugins(Selection(), BUILTINS).catalogs.weight_formats:
        assert re.search(rf"\b{re.escape(spec.name.removeprefix('gguf.'))}\b", text), spec.name


@pytest.fixture
def contributed(document: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """CONTRIBUTING's kernel as a module that can be imported."""
    (block,) = document("CONTRIBUTING.md").blocks("python")
    (tmp_path / "contributed_kernel.py").write_text(block.body)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_contributings_kernel_loads_and_passes_its_suite(contributed: Path, pytestconfig: pytest.Config) -> None:
    """Oracle: the conformance suite, on a CPU."""
    plugins = build_plugins(Selection.of(["contributed_kernel"]), BUILTINS)
    assert plugins.records["contributed_kernel"].offers == (("kernel", "silu_and_mul=mine"),)
    suite = type("Contributed", (KernelConformance,), {"spec": "contributed_kernel:SPEC", "devices": ("cpu",)})
    cases = suite.cases()
    assert cases
    for case in cases:
        suite().test_equals_the_reference(case)
        suite().test_a_row_does_not_depend_on_its_batch(case)
