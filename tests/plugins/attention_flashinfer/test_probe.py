"""The probe tells its ways to fail apart, each with a fix. Oracle: an installation faked file by file."""

import importlib
import importlib.machinery
import sys
from pathlib import Path
from types import ModuleType

import pytest

from freetoken.testing.launches import DEVICES
from freetoken.vocab.hardware import Device, Hardware
from freetoken_attention_flashinfer import kernels
from freetoken_attention_flashinfer import probe as probe_module
from freetoken_attention_flashinfer.probe import INSTALL, deep_probe, find_nvcc, probe

H200 = Hardware(accelerators=(DEVICES["h200"],))
UUT = "batch_prefill_with_kv_cache_dtype_q_bf16"


class Installation:
    """A machine: what is installed on it, and where its compilers are."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.patch = root, monkeypatch
        self.library = root / "site" / "flashinfer"
        self.modules: dict[str, Path] = {}
        self.versions("0.6.18.post1")
        monkeypatch.setattr(probe_module, "find_spec", self.find)
        monkeypatch.setattr(probe_module, "DEFAULT_CUDA", root / "no-cuda")
        for name in ("CUDA_HOME", "CUDA_PATH", "FLASHINFER_NVCC", "FLASHINFER_DISABLE_JIT"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("PATH", str(root / "bin"))

    def find(self, name: str) -> importlib.machinery.ModuleSpec | None:
        if name not in self.modules:
            return None
        spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = [str(self.modules[name])]
        return spec

    def versions(self, version: str) -> None:
        self.patch.setattr(probe_module, "library_version", lambda: version)

    def installs(self, name: str) -> None:
        self.modules[name] = self.root / "site" / name
        self.modules[name].mkdir(parents=True, exist_ok=True)

    def program(self, path: str) -> Path:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("#!/bin/sh\n")
        file.chmod(0o755)
        return file


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Installation:
    """FlashInfer, nvcc and ninja are there; tests take something away."""
    made = Installation(tmp_path, monkeypatch)
    made.installs("flashinfer")
    made.program("bin/nvcc")
    made.program("bin/ninja")
    return made


def test_all_is_there(machine: Installation) -> None:
    assert probe(H200)


def test_not_installed(machine: Installation) -> None:
    machine.modules.clear()
    found = probe(H200)
    assert (found.ok, found.reason, found.fix) == (False, "flashinfer is not installed", INSTALL)


def test_too_old_a_library(machine: Installation) -> None:
    machine.versions("0.6.9")
    found = probe(H200)
    assert "flashinfer 0.6.9 is installed; 0.6.18 is needed" in found.reason
    assert "--upgrade" in found.fix


@pytest.mark.parametrize("version", ["0.6.18", "0.6.18.post1", "0.10.0", "1.0", ""])
def test_new_enough(machine: Installation, version: str) -> None:
    """An unknown version (a checkout) is left to the deep probe."""
    machine.versions(version)
    assert probe(H200)


def test_no_card_and_too_old_a_card(machine: Installation) -> None:
    assert probe(Hardware()).reason == "no CUDA device"
    turing = Hardware(accelerators=(Device("cuda", name="T4", compute_capability=(7, 5)),))
    found = probe(turing)
    assert found.reason == "T4 has compute capability 7.5; 8.0 is needed"
    assert found.fix


def test_no_compiler_and_no_prebuilt_kernels(machine: Installation) -> None:
    (machine.root / "bin" / "nvcc").unlink()
    found = probe(H200)
    assert "nvcc" in found.reason
    assert "prebuilt" in found.reason
    assert "CUDA_HOME" in found.fix
    assert "flashinfer-jit-cache" in found.fix


def test_prebuilt_kernels_need_no_compiler(machine: Installation) -> None:
    (machine.root / "bin" / "nvcc").unlink()
    (machine.root / "bin" / "ninja").unlink()
    machine.installs("flashinfer_jit_cache")
    assert probe(H200)
    del machine.modules["flashinfer_jit_cache"]
    assert not probe(H200)
    machine.program(f"site/flashinfer/data/aot/{UUT}/{UUT}.so")
    assert probe(H200)


def test_no_ninja(machine: Installation) -> None:
    (machine.root / "bin" / "ninja").unlink()
    assert probe(H200).fix == "pip install ninja"
    machine.installs("ninja")
    assert probe(H200)


def test_builds_that_are_forbidden(machine: Installation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1")
    assert "FLASHINFER_DISABLE_JIT" in probe(H200).reason
    machine.installs("flashinfer_jit_cache")
    assert probe(H200)


def test_where_nvcc_is_looked_for(machine: Installation, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the library's own order: its variable, the toolkit's, the path, the usual place."""
    on_path = machine.root / "bin" / "nvcc"
    assert find_nvcc({"PATH": str(machine.root / "bin")}) == on_path
    assert find_nvcc({"PATH": ""}) is None
    usual = machine.program("cuda/bin/nvcc")
    monkeypatch.setattr(probe_module, "DEFAULT_CUDA", machine.root / "cuda")
    assert find_nvcc({"PATH": ""}) == usual
    other = machine.program("other/bin/nvcc")
    assert find_nvcc({"CUDA_HOME": str(machine.root / "other"), "PATH": str(machine.root / "bin")}) == other
    assert find_nvcc({"CUDA_HOME": str(machine.root / "empty"), "PATH": str(machine.root / "bin")}) is None
    assert find_nvcc({"FLASHINFER_NVCC": str(on_path), "CUDA_HOME": str(machine.root / "empty")}) == on_path


def test_deep_says_yes_to_what_it_was_written_against(library) -> None:
    assert deep_probe(H200)


@pytest.mark.parametrize(
    ("source", "text", "fix"),
    [
        ("import no_such_library", "No module named 'no_such_library'", "missing no_such_library"),
        ("raise OSError('libcudart.so.99: cannot open')", "OSError: libcudart.so.99: cannot open", "--force-reinstall"),
        ("raise RuntimeError('version mismatch')", "RuntimeError: version mismatch", INSTALL),
    ],
)  # fmt: skip
def test_installed_but_broken_keeps_the_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, text: str, fix: str
) -> None:
    """Oracle: a package of this name that does raise when imported."""
    package = tmp_path / "flashinfer"
    package.mkdir()
    (package / "__init__.py").write_text(source + "\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.partition(".")[0] == "flashinfer"]:
        monkeypatch.delitem(sys.modules, name)
    found = deep_probe(H200)
    assert "is installed, but does not import" in found.reason
    assert text in found.reason
    assert fix in found.fix


def test_a_wrapper_that_takes_other_arguments(library) -> None:
    class Other(library.Wrapper):
        def run(self, q, paged_kv_cache):
            """Takes no ``out``."""

    library.BatchPrefillWithPagedKVCacheWrapper = Other
    assert "its run takes no enable_pdl, out" in deep_probe(H200).reason


def test_the_version_is_read_from_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: metadata that a test answers for."""
    kernels.library_version.cache_clear()
    monkeypatch.setattr(kernels, "version", lambda name: {"flashinfer-python": "1.2.3"}[name])
    assert kernels.library_version() == "1.2.3"
    assert kernels.module_name("fa2", "bfloat16", 128) == "flashinfer-1.2.3/fa2-bfloat16-d128"
    kernels.library_version.cache_clear()


def test_a_stand_in_is_a_module(library) -> None:
    """The fake that these tests lean on goes by the library's name, and goes away with the test."""
    assert isinstance(library, ModuleType)
    assert sys.modules["flashinfer"] is library
