"""Launching and keys. Oracles: Triton's own launch path and its in-memory cache keys, and float32 arithmetic."""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import launch_kernels  # noqa: E402

from freetoken.ops.triton_launch import bind, memoised  # noqa: E402
from freetoken.ops.triton_stub import (  # noqa: E402
    Target,
    compile_request,
    record_launches,
    specialisation_key,
    stub_driver,
)
from freetoken.vocab.errors import EngineError, PluginError  # noqa: E402
from freetoken.vocab.launch import TensorArg, TritonLaunch  # noqa: E402

SM90 = Target(arch=90)
F16 = TensorArg("float16")


def launch(count: int = 100, stride: int = 32, block: int = 128, **changes: object) -> TritonLaunch:
    fields: dict[str, object] = {
        "kernel": "launch_kernels:add_scaled",
        "args": (("x", F16), ("y", F16), ("out", F16), ("count", count), ("stride", stride), ("scale", 0.5)),
        "constexprs": (("BLOCK", block),),
        "grid": (-(-count // block), 1, 1),
        **changes,
    }
    return TritonLaunch(**fields)  # type: ignore[arg-type]


def test_keys_are_those_of_tritons_own_launch_path() -> None:
    """Oracle: JITFunction.run itself, stopped at the compile, under the stub driver (a test may veto)."""
    fn = launch_kernels.add_scaled
    for case in (launch(), launch(count=2**40), launch(stride=1), launch(stride=7), launch(num_warps=8)):
        seen: list[str] = []
        with stub_driver(SM90) as stub:
            original, fn._do_compile = fn._do_compile, lambda key, *_, seen=seen: seen.append(key)
            try:
                x = torch.zeros(128, dtype=torch.float16)
                scalars = [value for _, value in case.args[3:]]
                options = {"num_warps": case.num_warps, "num_stages": case.num_stages}
                fn.run(x, x, x, *scalars, *dict(case.constexprs).values(), grid=(1,), warmup=True, **options)
            finally:
                fn._do_compile = original
            fn.device_caches.pop(stub.device)
        assert specialisation_key(case, SM90) == f"launch_kernels:add_scaled|{seen[0]}"


def test_only_what_specialises_changes_the_key() -> None:
    base = specialisation_key(launch(count=100), SM90)
    assert specialisation_key(launch(count=1), SM90) == base
    assert specialisation_key(launch(count=16), SM90) == base
    assert specialisation_key(launch(count=2**31), SM90) != base
    assert len({specialisation_key(launch(stride=s), SM90) for s in (0, 1, 7, 16, 32, 33)}) == 3


def test_the_active_driver_is_restored() -> None:
    from triton.runtime.driver import driver

    marker = object()
    before, driver._active = driver._active, marker
    try:
        with pytest.raises(ZeroDivisionError), stub_driver(SM90):
            raise ZeroDivisionError
        assert driver._active is marker
        specialisation_key(launch(block=256), Target(arch=80))
        assert driver._active is marker
    finally:
        driver._active = before


def test_a_request_survives_pickling_and_compiles_to_the_same_cache_entry(tmp_path: Path) -> None:
    """Oracle: the disk hash of a compile through JITFunction under the stub driver."""
    import triton
    from triton.compiler import ASTSource

    request = pickle.loads(pickle.dumps(compile_request(launch(), SM90)))
    previous = os.environ.get("TRITON_CACHE_DIR")
    os.environ["TRITON_CACHE_DIR"] = str(tmp_path)
    try:
        source = ASTSource(
            launch_kernels.add_scaled, dict(request.signature), dict(request.constants), dict(request.attrs)
        )
        ours = triton.compile(source, target=request.target.gpu_target(), options=dict(request.options))
        with stub_driver(SM90) as stub:
            x = torch.zeros(128, dtype=torch.float16)
            theirs = launch_kernels.add_scaled.warmup(
                x, x, x, 100, 32, 0.5, BLOCK=128, grid=(1,), num_warps=4, num_stages=3
            )
            launch_kernels.add_scaled.device_caches.pop(stub.device)
        assert ours.hash == theirs.hash
    finally:
        os.environ.pop("TRITON_CACHE_DIR")
        if previous is not None:
            os.environ["TRITON_CACHE_DIR"] = previous


def test_recording_sees_bound_and_plain_launches_with_their_true_keys() -> None:
    x = torch.zeros(256, dtype=torch.float16)
    meta = torch.zeros(256, dtype=torch.float16, device="meta")
    with record_launches(SM90) as records:
        bind(launch())(x, x, x)
        bind(launch())(meta, meta, meta)
        launch_kernels.add_scaled[lambda bound: (bound["count"],)](
            x, x, x, 100, 32, 0.5, 128, num_warps=4, num_stages=3
        )
        launch_kernels.add_scaled[(1,)](x[1:], x, x, 100, 32, 0.5, 128, num_warps=4, num_stages=3)
    declared = specialisation_key(launch(), SM90)
    assert [r.key == declared for r in records] == [True, True, True, False]
    assert [r.grid for r in records] == [(1, 1, 1), (1, 1, 1), (100,), (1,)]


def test_the_contract_is_asserted() -> None:
    x = torch.zeros(256, dtype=torch.float16)
    with record_launches(SM90) as records:
        with pytest.raises(EngineError, match=r"y .*2 bytes past a multiple of 16"):
            bind(launch())(x, x[1:], x)
        with pytest.raises(EngineError, match=r"out is torch\.float32"):
            bind(launch())(x, x, x.float())
        with pytest.raises(EngineError, match="takes 3 tensors and got 2"):
            bind(launch())(x, x)
        with pytest.raises(EngineError, match="rows"):
            bind(launch())(torch.zeros(4, 20, dtype=torch.float16)[:, :16], x, x)
    assert not records


def test_a_launch_must_fit_the_signature() -> None:
    with pytest.raises(PluginError, match="leaves out the parameter 'BLOCK'"):
        bind(launch(constexprs=()))
    with pytest.raises(PluginError, match="no parameter 'BLOKC'"):
        bind(launch(constexprs=(("BLOCK", 128), ("BLOKC", 128))))
    with pytest.raises(PluginError, match="order of the signature"):
        bind(launch(args=(("y", F16), ("x", F16), *launch().args[2:])))
    with pytest.raises(PluginError, match=r"not a plain @triton\.jit function"):
        bind(launch(kernel="launch_kernels:tuned"))
    with pytest.raises(PluginError, match="missing"):
        bind(launch(kernel="launch_kernels:missing"))


def test_memoised_launches_are_shared() -> None:
    bound = memoised(launch)
    assert bound(100, 32) is bound(100, 32)
    assert bound(100, 32) is not bound(101, 32)


INTERPRETED = """
import torch
from freetoken.ops.triton_launch import bind
from test_triton_launch import launch
torch.manual_seed(0)
for count in (1, 16, 100, 129):
    x, y = torch.randn(2, 256).half()
    out = torch.full((256,), float("nan"), dtype=torch.float16)
    bind(launch(count))(x, y, out)
    assert torch.allclose(out[:count].float(), x[:count].float() + 0.5 * y[:count].float(), atol=2e-3)
    assert out[count:].isnan().all()
print("held")
"""


def test_a_bound_launch_runs_in_tritons_interpreter() -> None:
    """Oracle: the same arithmetic in float32. A process of its own: the switch acts at decoration."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(HERE)}
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "held\n", done.stderr
