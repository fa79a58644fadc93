"""Kernels that may start before their predecessors end touch nothing of theirs until they have waited.

Oracles: the PTX for compute capability 9.0, with every address traced back to the kernel's parameters, and the machine
code that ptxas made of it. The launches are those that both published models declare at steps of all kinds.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
pytest.importorskip("freetoken_kernels_triton")
pytest.importorskip("freetoken_attention_triton")

import trace_launches
import triton
from attrs import frozen
from triton.compiler import ASTSource

from freetoken.ops.dependent_launch import CONSTEXPR, OPTION, VARIABLE, dependent_launches
from freetoken.ops.triton_stub import CompileRequest, Target, compile_request, jit_function
from freetoken.testing.launch_trace import card_of
from freetoken.testing.launches import DEVICES
from freetoken.testing.plans import launch_space_of, planned
from freetoken.vocab.launch import StepPoint, TritonLaunch

POINTS = (
    StepPoint(1, 1, 1, 40_000, 1, decode=True),
    StepPoint(3, 3, 1, 9_000, 3, decode=True),
    StepPoint(17, 17, 1, 700, 17, decode=True),
    StepPoint(700, 3, 600, 900, 3, decode=False),
)
WEIGHTS = frozenset({"weight", "q_weight", "k_weight", "rate", "dt_bias"})
"""Parameters that hold weights of the loaded model: what may be read before the wait."""

WAIT, START = "griddepcontrol.wait", "griddepcontrol.launch_dependents"


@pytest.fixture(scope="module", autouse=True)
def switched_on() -> Iterator[None]:
    """Dependent launches are off unless asked for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, "1")
        yield


def declared(card: str) -> tuple[TritonLaunch, ...]:
    """Every launch of both models at ``POINTS``, in the order of the model."""
    found: dict[TritonLaunch, None] = {}
    device = card_of(DEVICES[card])
    for model in trace_launches.MODELS:
        space = launch_space_of(planned(trace_launches.one_of_each(model), device, options=trace_launches.OPTIONS))
        for part in space.kinds:
            for op in space.ops(part):
                found.update((x, None) for p in POINTS for x in op.launches(p) if isinstance(x, TritonLaunch))
    return tuple(found)


@frozen(eq=False)
class Compiled:
    """A dependent launch, compiled."""

    kernel: str
    pointers: tuple[str, ...]  # the run-time parameters, in order
    ptx: str
    sass: str

    @property
    def instructions(self) -> list[str]:
        lines = (line.split("//")[0].strip() for line in self.ptx.splitlines())
        return [line for line in lines if line and not line.startswith((".", "$", "{", "}", ")"))]


def _compile(request: CompileRequest, folder: Path) -> Compiled:
    source = ASTSource(
        jit_function(request.kernel), dict(request.signature), dict(request.constants), dict(request.attrs)
    )
    made = triton.compile(source, target=request.target.gpu_target(), options=dict(request.options))
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(made.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    sass = subprocess.run([tool, cubin], capture_output=True, text=True, check=True).stdout
    names = tuple(name for name, kind in request.signature.items() if kind != "constexpr")
    return Compiled(request.kernel.partition(":")[2], names, made.asm["ptx"], sass)


@pytest.fixture(scope="module")
def dependent(tmp_path_factory: pytest.TempPathFactory) -> tuple[Compiled, ...]:
    """Every dependent launch for an H200, compiled once a key."""
    folder = tmp_path_factory.mktemp("cubins")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(folder))
        wanted = {
            request.key: request
            for launch in declared("h200")
            if dict(launch.options).get(OPTION)
            for request in [compile_request(launch, Target.of(DEVICES["h200"]))]
        }
        return tuple(_compile(request, folder) for request in wanted.values())


@cache
def _register() -> re.Pattern[str]:
    return re.compile(r"%\w+")


def sources(compiled: Compiled) -> list[tuple[str, frozenset[str]]]:
    """Every access of global memory before the wait: the instruction, and the parameters its address comes from."""
    came: dict[str, frozenset[str]] = {}
    found: list[tuple[str, frozenset[str]]] = []
    parameter = re.compile(r"_param_(\d+)")
    for line in compiled.instructions:
        if line.startswith(WAIT):
            return found
        address = re.search(r"\[([^\]]*)\]", line)
        opcode = re.sub(r"^@!?%\w+\s+", "", line).split()[0]
        registers = _register().findall(re.sub(r"^@!?%\w+\s+", "", line))
        if opcode.startswith("ld.param"):
            index = int(parameter.findall(line)[0])
            name = compiled.pointers[index] if index < len(compiled.pointers) else "scratch"
            came[registers[0]] = frozenset({name})
            continue
        if re.match(r"(ld|st|atom|red|cp)\b.*", opcode) and "shared" not in opcode.split(".")[:2] and address:
            where = _register().findall(address[1])
            found.append((line, frozenset().union(*(came.get(r, frozenset({"unknown " + r})) for r in where))))
        if registers and not opcode.startswith(("st", "bra", "bar")):
            braces = re.match(r"[^{\[]*\{([^}]*)\}", line)
            written = _register().findall(braces[1]) if braces and "," in braces[1] else registers[:1]
            read = registers[len(written) :]
            for name in written:
                came[name] = frozenset().union(came.get(name, frozenset()), *(came.get(r, frozenset()) for r in read))
    raise AssertionError(f"{compiled.kernel} never waits")


def test_the_trace_of_addresses_sees_what_is_read_too_early() -> None:
    """By hand: a weight and an activation that are read before the wait, and one that is read behind it."""
    ptx = """
    ld.param.b64 %rd1, [k_param_0];
    ld.param.b64 %rd2, [k_param_1];
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %rd3, %r1, 16;
    add.s64 %rd4, %rd2, %rd3;
    ld.global.v2.b32 { %r2, %r3 }, [ %rd4 + 0 ];
    @%p1 ld.global.b32 %r4, [ %rd1 + 0 ];
    griddepcontrol.wait; // dummy %r9
    ld.global.b32 %r5, [ %rd1 + 4 ];
    """
    found = sources(Compiled("k", ("x", "weight"), ptx, ""))
    assert [names for _, names in found] == [{"weight"}, {"x"}]


def test_all_that_decoding_launches_is_dependent_but_the_sampler() -> None:
    """By hand: what decode steps launch; the kernels of prefill alone and the sampler are barriers."""
    on = {x.kernel.partition(":")[2] for x in declared("h200") if dict(x.options).get(OPTION)}
    off = {x.kernel.partition(":")[2] for x in declared("h200")} - on
    assert {name for name in off if "sample" not in name} == {
        "align_kernel", "tile_up_kernel", "tile_down_kernel", "conv_prefill_kernel", "delta_chunk_kernel",
        "delta_scan_kernel", "prefill",
    }  # fmt: skip
    assert {"gemv_kernel", "pair_up_kernel", "slot_up_kernel", "decode", "combine_decoded"} <= on


@pytest.mark.slow
def test_nothing_of_a_predecessor_is_touched_before_the_wait(dependent: tuple[Compiled, ...]) -> None:
    """Before the wait only weights are read and nothing is written."""
    assert len(dependent) >= 20
    read: set[str] = set()
    for compiled in dependent:
        for line, names in sources(compiled):
            assert line.startswith(("ld.global", "@")), f"{compiled.kernel}: {line}"
            assert "st.global" not in line, f"{compiled.kernel}: {line}"
            pointers = {name for name in names if name in compiled.pointers and name not in ("outputs", "rows")}
            assert pointers, f"{compiled.kernel}: an address from nowhere: {line}"
            assert pointers <= WEIGHTS, f"{compiled.kernel} reads {sorted(names)} before it waits: {line}"
            read |= pointers
    assert "weight" in read, "matrices are asked for before the wait"


@pytest.mark.slow
def test_every_block_waits_once_and_lets_the_next_start_behind_it(dependent: tuple[Compiled, ...]) -> None:
    """One wait on every path: no branch and no return before it. The start of the dependents comes right behind it."""
    for compiled in dependent:
        text = compiled.instructions
        waits = [i for i, line in enumerate(text) if line.startswith(WAIT)]
        starts = [i for i, line in enumerate(text) if line.startswith(START)]
        assert len(waits) == len(starts) == 1, compiled.kernel
        between = [line for line in text[waits[0] + 1 : starts[0]] if not line.startswith(("ld.param", "mov", "cvta"))]
        assert starts[0] > waits[0], compiled.kernel
        assert between == [], f"{compiled.kernel}: {between}"
        early = [line for line in text[: waits[0]] if re.search(r"\b(bra|ret|exit)\b", line)]
        assert early == [], f"{compiled.kernel} may end before it waits: {early}"


@pytest.mark.slow
def test_the_machine_code_keeps_that_order(dependent: tuple[Compiled, ...]) -> None:
    """``ACQBULK`` is the wait. In front of it are as many loads as in the PTX at most, and no store."""
    for compiled in dependent:
        before, wait, behind = compiled.sass.partition("ACQBULK")
        assert wait, compiled.kernel
        assert "PREEXIT" in behind, compiled.kernel
        memory = re.findall(r"\b(LDG\w*|LDGSTS|STG|ATOMG?|REDG?|UBLKCP|UTMALDG)\b[^\n]*", before)
        assert set(memory) <= {"LDG"}, f"{compiled.kernel}: {memory}"
        assert len(memory) <= len(sources(compiled)), compiled.kernel
        assert not re.search(r"\bEXIT\b", before), compiled.kernel


@pytest.mark.parametrize("card", ["a100", "rtx3090", "rtx4090"])
def test_older_cards_launch_nothing_dependent(card: str) -> None:
    """By hand: before compute capability 9.0 there is no such launch, and kernels are compiled without the waits."""
    for launch in declared(card):
        assert OPTION not in dict(launch.options)
        assert not dict(launch.constexprs).get(CONSTEXPR, False)


@pytest.mark.parametrize("value", ["0", None])
def test_a_variable_switches_it_on(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    assert dependent_launches(DEVICES["h200"])
    assert dependent_launches(DEVICES["rtx5090"])
    if value is None:
        monkeypatch.delenv(VARIABLE)
    else:
        monkeypatch.setenv(VARIABLE, value)
    assert not dependent_launches(DEVICES["h200"])
    assert not any(OPTION in dict(x.options) for x in declared("h200"))


def test_steps_launch_what_is_declared_with_it_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the trace of the real step."""
    monkeypatch.setenv(VARIABLE, "0")
    for model in trace_launches.MODELS:
        assert trace_launches.walk(trace_launches.make_trace(model), (1, 5, 17), 1).differences == ()


def test_the_wait_is_compiled_out_without_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Oracle: the PTX of the same kernel for a card without such launches, and for one where it is switched off."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv(VARIABLE, "0")
    for card in ("h200", "rtx4090"):
        launch = next(x for x in declared(card) if x.kernel.endswith(":gemv_kernel"))
        assert "griddepcontrol" not in _compile(_request(launch, card), tmp_path).ptx


def _request(launch: TritonLaunch, card: str) -> Any:
    return compile_request(launch, Target.of(DEVICES[card]))
