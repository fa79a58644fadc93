"""The plan as people and scripts read it."""

from __future__ import annotations

from collections.abc import Iterable

from freetoken.vocab.ops import OpShape
from freetoken.vocab.plan import Choice, Plan
from freetoken.vocab.units import format_bytes


def plan_text(plan: Plan) -> str:
    """Each decision with its reason, each choice with its candidates, and the declared memory."""
    model = plan.model
    lines = [
        f"{plan.served_name}: {model.architecture} ({model.family}), {model.parameters / 1e6:,.0f} M parameters,"
        f" {model.num_layers} layers, {plan.model_path}",
        "",
        "decisions",
    ]
    width = max(len(d.name) for d in plan.decisions)
    lines += [f"  {d.name:<{width}}  {_value(d.name, d.value)}  ({d.because})" for d in plan.decisions]
    lines += ["", "choices"]
    for choice in _choices(plan):
        lines += _choice_lines(choice)
    lines += ["", f"memory ({format_bytes(plan.memory_bytes)} allowed)"]
    owner = max(len(c.owner) for c in plan.claims)
    for claim in plan.claims:
        peak = f", peak {format_bytes(claim.peak_bytes)}" if claim.peak_bytes > claim.steady_bytes else ""
        where = "" if claim.where == "device" else f" on the {claim.where}"
        lines.append(f"  {claim.owner:<{owner}} {format_bytes(claim.steady_bytes):>10}{peak}{where}  {claim.what}")
    changed = [v for v in plan.options if v.origin != "default"]
    if changed:
        lines += ["", "options given"]
        lines += [f"  {v.name} = {v.value}  ({v.origin})" for v in changed]
    return "\n".join(lines)


def _value(name: str, value: object) -> str:
    return format_bytes(value) if name.endswith("_bytes") and isinstance(value, int) else str(value)


def _choices(plan: Plan) -> Iterable[Choice]:
    yield from plan.attention
    yield plan.moe
    yield plan.warmup
    yield from _kernels_by_op(plan)


def _kernels_by_op(plan: Plan) -> Iterable[Choice]:
    """Shapes of one op that went the same way are one line."""
    seen: dict[tuple[str, str, tuple[object, ...]], list[OpShape]] = {}
    for kernel in plan.kernels:
        key = (kernel.shape.op, kernel.choice.name, kernel.choice.candidates)
        seen.setdefault(key, []).append(kernel.shape)
    for kernel in plan.kernels:
        key = (kernel.shape.op, kernel.choice.name, kernel.choice.candidates)
        shapes = seen.pop(key, None)
        if shapes is not None:
            formats = sorted({f for s in shapes for f in s.formats})
            subject = kernel.shape.op + (f" ({', '.join(formats)})" if formats else "")
            yield Choice(
                kernel.choice.kind, subject, kernel.choice.name, kernel.choice.because, kernel.choice.candidates
            )


def _choice_lines(choice: Choice) -> list[str]:
    subject = f" for {choice.subject}" if choice.subject else ""
    lines = [f"  {choice.kind}{subject}: {choice.name}  ({choice.because})"]
    lines += [f"      {note.name}: {note.why}" for note in choice.candidates if note.name != choice.name]
    return lines


def plan_json(plan: Plan) -> dict[str, object]:
    """The plan as plain data; the family's own details are left out."""
    return {
        "model": {
            "name": plan.served_name,
            "path": plan.model_path,
            "family": plan.model.family,
            "architecture": plan.model.architecture,
            "parameters": plan.model.parameters,
            "layers": plan.model.num_layers,
        },
        "device": plan.device.torch_name,
        "decisions": [{"name": d.name, "value": d.value, "because": d.because} for d in plan.decisions],
        "choices": [_choice_json(choice) for choice in _choices(plan)],
        "memory": [
            {
                "owner": c.owner,
                "what": c.what,
                "steady_bytes": c.steady_bytes,
                "peak_bytes": c.worst_bytes,
                "where": c.where,
            }
            for c in plan.claims
        ],
        "options": [{"owner": v.owner, "name": v.name, "value": v.value, "origin": v.origin} for v in plan.options],
    }


def _choice_json(choice: Choice) -> dict[str, object]:
    return {
        "kind": choice.kind,
        "subject": choice.subject,
        "name": choice.name,
        "because": choice.because,
        "candidates": [{"name": n.name, "fits": n.fits, "why": n.why} for n in choice.candidates],
    }


def choices_summary(plan: Plan) -> str:
    """What runs, in one line: for the log."""
    by_name: dict[str, list[str]] = {}
    for kernel in plan.kernels:
        ops = by_name.setdefault(kernel.choice.name, [])
        if kernel.shape.op not in ops:
            ops.append(kernel.shape.op)
    kernels = "; ".join(f"{name}: {', '.join(ops)}" for name, ops in by_name.items())
    attention = ", ".join(dict.fromkeys(choice.name for choice in plan.attention)) or "none"
    return (
        f"{plan.device.torch_name} {plan.dtype}, attention {attention}, experts {plan.moe.name}"
        f"{' (unused)' if plan.model.moe is None else ''}, warmup {plan.warmup.name}, kernels {kernels}"
    )


def broken_candidates(plan: Plan) -> tuple[str, ...]:
    """Candidates that were passed over because their probe failed, each once with its reason: worth a warning."""
    found = {}
    for choice in _choices(plan):
        for note in choice.candidates:
            if not note.fits and "its probe" in note.why:
                found[note.why] = f"{choice.kind} {note.name}: {note.why}"
    return tuple(found.values())
