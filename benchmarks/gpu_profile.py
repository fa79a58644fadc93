"""Where a decode step's time goes: kernels on the device, and what the host does for each step."""

from __future__ import annotations

import json
import random
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from gpu_checks import GREEDY, Emit, random_tokens
from gpu_session import Session

from freetoken.run.step_plan import StepPlan
from freetoken.vocab.sampling import SamplingParams

REPLAYS = 20
ROWS = 25


def decode_step(session: Session, count: int, context: int) -> StepPlan:
    """A step of ``count`` sequences after ``context`` tokens each; it may be launched again and again."""
    source = random.Random(count)
    names = [session.name() for _ in range(count)]
    chunk = session.llm.plan.max_prefill_tokens
    for lane, name in enumerate(names):
        session.prefill(name, lane, random_tokens(source, context, session.vocab_size), [], chunk)
    tokens = random_tokens(source, count, session.vocab_size)
    rows = (session.row(names[i], i, [tokens[i]], context, GREEDY) for i in range(count))
    return StepPlan(tuple(rows))


def profile_decode(session: Session, count: int, context: int, emit: Emit) -> None:
    """Kernels of ``REPLAYS`` steps: by name, how many a step, how long each, and the gaps between them."""
    plan = decode_step(session, count, context)
    for _ in range(3):
        session.engine.launch(plan).read()
    ms = device_ms(session, plan)
    layers = session.llm.plan.model.num_layers
    found = summarise(kernel_events(lambda: session.engine.launch(plan).read(), REPLAYS), REPLAYS)
    emit(
        "profile", sequences=count, context=context, layers=layers, step_ms=ms,
        kernels_per_layer=round(found["kernels"] / layers, 1), **found,
    )  # fmt: skip


def device_ms(session: Session, plan: StepPlan, steps: int = 50) -> float:
    """Milliseconds of one step when many are launched without waiting between them."""
    launched: list[Any] = []
    torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(steps):
        launched.append(session.engine.launch(plan))
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / steps


def kernel_events(step: Callable[[], object], steps: int) -> list[tuple[str, float, float]]:
    """``(name, start µs, µs)`` of everything the device did during ``steps`` steps, in order of start."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return read_trace(json.loads(path.read_text()))


def read_trace(trace: Any) -> list[tuple[str, float, float]]:
    """The device's events of a Chrome trace."""
    events = trace["traceEvents"] if isinstance(trace, dict) else trace
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    found = [(e["name"], float(e["ts"]), float(e["dur"])) for e in events if e.get("cat") in kinds and "dur" in e]
    return sorted(found, key=lambda event: event[1])


def summarise(events: Sequence[tuple[str, float, float]], steps: int) -> dict[str, Any]:
    """Totals a step and the ``ROWS`` names that take most. A gap is time in which nothing ran, within a step.

    Gaps of more than 200 µs are the host's, between two steps, and are counted apart.
    """
    if not events:
        return {"kernels": 0, "busy_us": 0.0, "gap_us": 0.0, "rows": [], "note": "the profiler saw no kernels"}
    count: Counter[str] = Counter()
    total: defaultdict[str, float] = defaultdict(float)
    until, gaps, waits = events[0][1], 0.0, 0.0
    for name, start, us in events:
        count[name] += 1
        total[name] += us
        gap = max(0.0, start - until)
        gaps, waits = (gaps + gap, waits) if gap <= 200 else (gaps, waits + gap)
        until = max(until, start + us)
    names = sorted(total, key=lambda name: -total[name])
    busy = sum(total.values())
    return {
        "kernels": len(events) / steps,
        "busy_us": round(busy / steps, 1),
        "gap_us": round(gaps / steps, 1),
        "mean_gap_us": round(gaps / len(events), 3),
        "between_steps_us": round(waits / steps, 1),
        "rows": [
            [short_name(n), round(count[n] / steps, 2), round(total[n] / count[n], 2), round(total[n] / steps, 1),
             round(total[n] / busy, 4)]
            for n in names[:ROWS]
        ],
    }  # fmt: skip


def short_name(name: str) -> str:
    """A kernel's name without namespaces, template arguments and parameters, as far as it helps."""
    plain = name.removeprefix("void ")
    return plain if len(plain) <= 44 else plain[:30] + "…" + plain[-13:]


# ------------------------------------------------------------------------------------------- the host


@contextmanager
def timed(points: dict[str, tuple[Any, str]]) -> Iterator[dict[str, list[float]]]:
    """Times every call of ``owner.name``, callees included."""
    times: dict[str, list[float]] = {label: [] for label in points}
    originals = {label: getattr(owner, name) for label, (owner, name) in points.items()}

    def wrapped(label: str) -> Callable[..., Any]:
        original, record = originals[label], times[label]

        def call(*args: Any, **more: Any) -> Any:
            start = time.perf_counter()
            try:
                return original(*args, **more)
            finally:
                record.append(time.perf_counter() - start)

        return call

    for label, (owner, name) in points.items():
        setattr(owner, name, wrapped(label))
    try:
        yield times
    finally:
        for label, (owner, name) in points.items():
            setattr(owner, name, originals[label])


def profile_host(session: Session, emit: Emit, tokens: int = 200) -> None:
    """Milliseconds a step of what the engine's loop does for one stream, from an answer of ``tokens`` tokens."""
    from freetoken.run.decode_inputs import DecodeInputs
    from freetoken.run.engine import Engine, LaunchedStep
    from freetoken.schedule.engine_core import EngineCore
    from freetoken.schedule.scheduler import Scheduler

    points: dict[str, tuple[Any, str]] = {
        "core.step": (EngineCore, "step"),
        "scheduler.next_step": (Scheduler, "next_step"),
        "engine.launch": (Engine, "launch"),
        "  inputs.fill": (DecodeInputs, "fill"),
        "  attention.plan_replay": (type(next(iter(session.engine.runner.attention.values()))), "plan_replay"),
        "  graph.replay": (torch.cuda.CUDAGraph, "replay"),
        "  engine._sent": (Engine, "_sent"),
        "step.read (waits)": (LaunchedStep, "read"),
        "scheduler.commit": (Scheduler, "commit"),
    }
    points = {label: where for label, where in points.items() if hasattr(*where)}
    prompt = random_tokens(random.Random(3), 100, session.vocab_size)
    wishes = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=tokens)
    session.llm.generate([prompt], wishes)
    with timed(points) as times:
        start = time.perf_counter()
        session.llm.generate([prompt], wishes)
        wall = time.perf_counter() - start
    steps = max(1, len(times["engine.launch"]))
    table = {label: [round(1000 * sum(v) / steps, 4), len(v)] for label, v in times.items()}
    emit("host", tokens=tokens, steps=steps, wall_ms_a_token=round(1000 * wall / tokens, 4), ms_a_step=table)
