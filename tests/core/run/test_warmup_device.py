"""What compiles a policy's keys: native modules are built beside Triton's keys. Oracle: who waits for whom."""

import threading

import pytest

from freetoken.run import warmup_device
from freetoken.run.warmup_device import WarmupDevice
from freetoken.testing.launches import DEVICES, small_space
from freetoken.vocab.errors import EngineError
from freetoken.vocab.launch import NativeModule, TensorArg, TritonLaunch
from freetoken.vocab.ops import OpShape
from freetoken.vocab.warmup import CompileKeys
from freetoken.warmup.compile_worker import CompileReport
from freetoken.warmup.enumerate import enumerate_keys
from freetoken.warmup.launch_space import build_launch_space

pytest.importorskip("triton")

KERNEL = TritonLaunch("freetoken.testing.launch_trace:none", (("x", TensorArg("float32")),), (), (1, 1, 1))


def device_for(*modules: NativeModule, triton: bool) -> tuple[WarmupDevice, CompileKeys]:
    """One layer that needs ``modules``, and a Triton kernel whose key is never looked at closely."""
    shape = OpShape(op="attention", dtype="float32")
    space = build_launch_space(small_space(), [("layers.0", ((shape, lambda *_: modules),))], DEVICES["h200"])
    keys = tuple(enumerate_keys(space).uses)
    device = WarmupDevice(space)
    if triton:
        found = device._launch
        device._launch = lambda key: KERNEL if key == "triton" else found(key)  # type: ignore[method-assign]
        keys = ("triton", *keys)
    return device, CompileKeys(keys, 2)


def nothing() -> None:
    """A module that needs no loading."""


def test_a_native_build_does_not_wait_for_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's compiles end only after the build has begun, and the step only after both."""
    begun, built, seen = threading.Event(), [], []

    def build() -> None:
        begun.set()
        built.append("module")

    def compile_requests(requests: list[object], workers: int, progress: object) -> CompileReport:
        assert begun.wait(60), "the build waits for Triton"
        progress(None)  # type: ignore[operator]
        return CompileReport((), 0.0)

    monkeypatch.setattr(warmup_device, "compile_requests", compile_requests)
    monkeypatch.setattr(warmup_device, "compile_request", lambda *_: None)
    device, step = device_for(NativeModule("library/module", build, nothing), triton=True)
    assert "1 native modules built" in device.compile(step, seen.append)
    assert (built, sorted(seen)) == (["module"], [1, 2])


def test_a_failed_build_ends_the_step_with_its_own_words() -> None:
    def fail() -> None:
        raise EngineError("building library/module", "nvcc: no such architecture")

    device, step = device_for(NativeModule("library/module", fail, nothing), triton=False)
    with pytest.raises(EngineError, match="no such architecture"):
        device.compile(step, lambda _: None)
