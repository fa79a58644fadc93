"""A warmup plan, as people and as scripts read it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from freetoken.run.warmup import describe
from freetoken.serve.warmup_plan import WorkedOut
from freetoken.vocab.warmup import CompileKeys, Forward, LoadKeys, Touch, WarmupStep
from freetoken.warmup.cost import expected_seconds
from freetoken.warmup.cover import Aspect, aspects_of, uncovered
from freetoken.warmup.keys import kernel_of, short
from freetoken.warmup.survey import survey_of
from freetoken.warmup.survey_json import point_to_json
from freetoken.warmup.targets import describe_target

_MOST_LISTED = 12


def plan_text(found: WorkedOut) -> str:
    """Each step with what it alone covers and its expected cost; then what no step covers."""
    plan, space = found.plan, found.space
    device = describe_target(plan.device) if plan.device.kind != "cpu" else "this machine's CPU"
    choice = plan.warmup
    lines = [
        f"{plan.served_name} on {device}, {plan.dtype}",
        f"warmup policy {choice.name} ({choice.because}); {found.known.because}",
        _kinds_line(found),
        "",
    ]
    if not found.steps:
        lines.append("no steps: the first requests wait for whatever they are the first to need")
    cost = 0.0
    for number, step in enumerate(found.steps, 1):
        seconds = expected_seconds(step)
        cost += 0.0 if isinstance(step, CompileKeys) else seconds
        lines.append(f"{number:>3}  {describe(step)}")
        lines.append(f"       covers {_covers(found, step)}; about {_seconds(seconds)}{_beside(step)}")
    lines += ["", f"in all about {_seconds(cost)} beside compiling, which runs while the weights load"]
    lines += _uncovered_lines(found)
    if space.opaque:
        lines.append(f"declare no launches and are covered by real forwards only: {', '.join(space.opaque)}")
    return "\n".join(lines)


def _kinds_line(found: WorkedOut) -> str:
    survey = survey_of(found.space)
    kernels = len({kernel_of(key) for key in survey.keys})
    parts = [f"{kind} (×{len(found.space.parts(kind))})" for kind in found.space.kinds]
    return f"{len(survey.keys)} keys of {kernels} kernels, {len(survey.libraries)} libraries; kinds: {', '.join(parts)}"


def _covers(found: WorkedOut, step: WarmupStep) -> str:
    """What a step covers, and how much of it no other step does."""
    aspects = aspects_of(step, found.space)
    others = [aspects_of(other, found.space) for other in found.steps if other is not step]
    alone = aspects - frozenset().union(*others)
    counted = Counter(aspect.done for aspect in aspects)
    text = ", ".join(f"{n} {done}" for done, n in sorted(counted.items())) or "nothing that is declared"
    return f"{text} ({len(alone)} of them alone)"


def _beside(step: WarmupStep) -> str:
    return f" with {step.workers} workers, beside the weights" if isinstance(step, CompileKeys) else ""


def _seconds(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


def _uncovered_lines(found: WorkedOut) -> list[str]:
    missing = uncovered(found.steps, found.space)
    if not missing:
        return ["every key that a step can need is covered"] if survey_of(found.space).keys else []
    uses = survey_of(found.space).uses
    lines = [f"not covered: {len(missing)} keys, each compiled or loaded in the first request that needs it"]
    for key in missing[:_MOST_LISTED]:
        fewest = uses[key].witnesses[0]
        lines.append(f"  {short(key)}, from steps of {fewest.tokens} tokens with a context of {fewest.max_context}")
    if len(missing) > _MOST_LISTED:
        lines.append(f"  … and {len(missing) - _MOST_LISTED} more; --json lists all")
    return lines


def plan_json(found: WorkedOut) -> dict[str, object]:
    """The same as plain data, every key by its full name."""
    survey = survey_of(found.space)
    return {
        "model": found.plan.served_name,
        "device": found.plan.device.name,
        "policy": found.plan.warmup.name,
        "known": found.known.because,
        "kinds": {kind: list(found.space.parts(kind)) for kind in found.space.kinds},
        "opaque": list(found.space.opaque),
        "keys": {key: {"kinds": list(use.kinds), "kernel": kernel_of(key)} for key, use in sorted(survey.uses.items())},
        "libraries": {use.name: [use.low, use.high] for use in survey.libraries},
        "steps": [_step_json(found, step) for step in found.steps],
        "uncovered": list(uncovered(found.steps, found.space)),
    }


def _step_json(found: WorkedOut, step: WarmupStep) -> dict[str, object]:
    data: dict[str, object] = {
        "step": type(step).__name__,
        "because": step.because,
        "workers": step.workers,
        "expected_seconds": round(expected_seconds(step), 4),
        "covers": _listed(aspects_of(step, found.space)),
    }
    if isinstance(step, CompileKeys | LoadKeys):
        data["keys"] = list(step.keys)
    elif isinstance(step, Touch):
        data |= {"name": step.name, "rows": list(step.tokens)}
    elif isinstance(step, Forward):
        data["point"] = point_to_json(step.point)
    return data


def _listed(aspects: Sequence[Aspect] | frozenset[Aspect]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for aspect in sorted(aspects, key=str):
        found.setdefault(aspect.done, []).append(aspect.what)
    return found
