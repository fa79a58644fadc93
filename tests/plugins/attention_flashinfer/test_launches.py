"""Its builds are native modules: declared, built beside the weights, loaded and touched before ready, late after."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from freetoken.run.warmup_device import WarmupDevice
from freetoken.testing.launches import DEVICES, small_space
from freetoken.vocab.cache_spec import PagedKV
from freetoken.vocab.errors import EngineError
from freetoken.vocab.launch import NativeModule, StepPoint
from freetoken.vocab.model_spec import AttentionGroup
from freetoken.vocab.warmup import CompileKeys, LoadKeys
from freetoken.warmup.enumerate import enumerate_keys
from freetoken.warmup.keys import is_native
from freetoken.warmup.launch_space import attention_shape, build_launch_space
from freetoken.warmup.watch import BUILD, watching
from freetoken_attention_flashinfer import build as build_module
from freetoken_attention_flashinfer import kernels
from freetoken_attention_flashinfer import launches as launches_module
from freetoken_attention_flashinfer.build import build_in_child, child_environment, compile_jobs
from freetoken_attention_flashinfer.launches import launches, native_module
from freetoken_attention_flashinfer.touch import scenes, touch

H200 = DEVICES["h200"]
PREFILL, DECODE = StepPoint(300, 2, 200, 900, 2, False), StepPoint(8, 8, 1, 900, 8, True)
GROUPS = [
    AttentionGroup("a", (0, 1), 32, PagedKV(4, 128, 128, "bfloat16"), 0.1),
    AttentionGroup("b", (2,), 8, PagedKV(8, 128, 128, "bfloat16"), 0.1),
    AttentionGroup("c", (3,), 8, PagedKV(8, 64, 64, "float16"), 0.1),
]


def names(point: StepPoint, group: AttentionGroup = GROUPS[0]) -> list[str]:
    shape = attention_shape(group, group.cache.dtype, 16)
    return [launch.name.rpartition("/")[2] for launch in launches(point, shape, H200)]


def test_one_module_serves_prefill_and_decode() -> None:
    assert names(PREFILL) == names(DECODE) == ["fa2-bfloat16-d128"]


def test_hopper_kernels_are_declared_where_the_table_has_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "FA3_ARCHS", frozenset({90}))
    assert names(PREFILL) == ["fa2-bfloat16-d128", "fa3-bfloat16-d128"]
    assert names(DECODE) == ["fa2-bfloat16-d128"]


@pytest.mark.parametrize(
    ("query_lens", "chosen"),
    [((4096,), "fa3"), ((300, 300), "fa3"), ((128,), "fa2"), ((4096, 1), "fa2"), ((1, 1, 1), "fa2")],
)
def test_hopper_kernels_take_steps_that_fill_the_card(query_lens: tuple[int, ...], chosen: str) -> None:
    """32 heads on 132 multiprocessors: five tiles of queries are enough, and nobody decodes beside them."""
    assert kernels.step_kernel(("fa2", "fa3"), query_lens, 32, 132) == chosen
    assert kernels.step_kernel(("fa2",), query_lens, 32, 132) == "fa2"


def space():
    parts = [
        (f"layers.{layer}", ((attention_shape(group, group.cache.dtype, 16), launches),))
        for group in GROUPS
        for layer in group.layers
    ]
    return build_launch_space(small_space(), parts, H200)


def test_a_plan_has_one_key_for_each_dtype_and_head_size() -> None:
    """Oracle: the enumeration that every warmup policy sees."""
    keys = enumerate_keys(space()).uses
    assert all(is_native(key) for key in keys)
    assert sorted(key.rpartition("/")[2] for key in keys) == ["fa2-bfloat16-d128", "fa2-float16-d64"]


def test_the_warmup_builds_and_loads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: what the warmup's own runner calls, in its order."""
    called: list[tuple[str, str]] = []

    def fake(kernel: str, dtype: str, head_dim: int, device: object) -> NativeModule:
        name = kernels.module_name(kernel, dtype, head_dim)
        return NativeModule(name, lambda: called.append(("build", dtype)), lambda: called.append(("load", dtype)))

    monkeypatch.setattr(launches_module, "native_module", fake)
    made = space()
    keys = tuple(enumerate_keys(made).uses)
    device = WarmupDevice(made)
    assert "2 native modules built" in device.compile(CompileKeys(keys, 2), lambda _: None)
    device.load(LoadKeys(keys), lambda _: None)
    assert sorted(called[:2]) == [("build", "bfloat16"), ("build", "float16")]
    assert sorted(called[2:]) == [("load", "bfloat16"), ("load", "float16")]


@pytest.mark.parametrize(
    ("cores", "free_gib", "jobs"), [(16, 100, 16), (16, 10, 3), (2, 100, 2), (8, 1, 1)]
)  # fmt: skip
def test_as_many_compilers_as_fit(cores: int, free_gib: int, jobs: int) -> None:
    assert compile_jobs(cores, free_gib << 30) == jobs
    assert child_environment({"PATH": "x"}, jobs) == {"PATH": "x", "MAX_JOBS": str(jobs)}
    assert child_environment({"MAX_JOBS": "7"}, jobs) == {"MAX_JOBS": "7"}


def test_the_child_is_asked_for_the_module() -> None:
    asked: list[list[str]] = []

    def run(command: list[str], **_: object) -> SimpleNamespace:
        asked.append(command)
        return SimpleNamespace(returncode=0, stdout="", stderr="")

    build_in_child("fa2", "bfloat16", 128, run)
    assert asked == [[sys.executable, "-m", build_module.MODULE, "fa2", "bfloat16", "128"]]


def test_a_failed_build_keeps_the_compilers_text() -> None:
    def run(*_: object, **__: object) -> SimpleNamespace:
        return SimpleNamespace(returncode=1, stdout="[1/3] nvcc …\n", stderr="\nerror: no kernel image\n")

    with pytest.raises(EngineError, match="no kernel image") as caught:
        build_in_child("fa2", "bfloat16", 128, run)
    assert "fa2-bfloat16-d128" in caught.value.refusal.asked
    assert "--attention-backend triton" in caught.value.refusal.fix


def test_a_child_without_the_library_says_so() -> None:
    """Oracle: a real child of this interpreter, which has no FlashInfer."""
    if find_spec("flashinfer") is not None:
        pytest.skip("flashinfer is installed")
    with pytest.raises(EngineError, match="No module named 'flashinfer'"):
        build_in_child("fa2", "bfloat16", 128)


def test_the_child_builds_what_is_not_prebuilt(library, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the facts of a module in the library's own order."""
    assert build_module.main(["fa2", "float16", "64"]) == 0
    half = torch.float16
    assert library.JitSpec.built == [("fa2", half, half, half, torch.int32, 64, 64, 0, False, False, False)]
    monkeypatch.setattr(library.JitSpec.__init__, "__kwdefaults__", {"is_aot": True})
    build_module.main(["fa2", "bfloat16", "64"])
    assert len(library.JitSpec.built) == 1


def test_loading_launches_every_tile_alone_and_split(library) -> None:
    """Oracle: the planner's own choice of tile and split, worked out in ``conftest.py``; one head of keys, one page."""
    touch("fa2", "float16", 64, "cpu")
    assert library.loaded == [("fa2", *[torch.float16] * 3, torch.int32, 64, 64, 0, False, False, False)]
    seen = set()
    for query, context in scenes("fa2"):
        floats, _ = library.needed_bytes([query], [-(-context // 16)], 1, 1, 64, 16, graph=False)
        seen.add((16 if query <= 16 else 64 if query <= 64 else 128, floats > 0))
    assert seen == {(tile, split) for tile in (16, 64, 128) for split in (False, True)}
    assert [wrapper.plans for wrapper in library.Wrapper.made] == [1] * 6


def test_loading_is_bound_to_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    touched: list[tuple[object, ...]] = []
    monkeypatch.setattr("freetoken_attention_flashinfer.touch.touch", lambda *args: touched.append(args))
    native_module("fa2", "float16", 256, H200).load()
    assert touched == [("fa2", "float16", 256, "cuda:0")]


def test_a_build_after_ready_is_a_late_event(library, tmp_path: Path) -> None:
    """The library starts ninja for whatever it builds by itself; the watch counts that. Oracle: such a start."""
    ninja = tmp_path / "ninja"
    ninja.write_text("#!/bin/sh\n")
    ninja.chmod(0o755)
    sys.modules["flashinfer.prefill"].get_batch_prefill_module = lambda *_: subprocess.run([str(ninja)], check=True)
    with watching() as watch:
        touch("fa2", "float16", 64, "cpu")
    assert watch.counts[BUILD] == 1
    assert [event.name for event in watch.events] == ["ninja"]
