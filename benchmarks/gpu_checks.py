"""Checks of one model on the device: compiled keys, captured steps, and logits against transformers."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from attrs import evolve, frozen
from gpu_session import EAGER, Session, device_cache_keys
from torch import Tensor

from freetoken.plugin.protocols import Step
from freetoken.run.step_plan import StepPlan, StepRow
from freetoken.vocab.cache_spec import PagedKV
from freetoken.vocab.sampling import SamplingParams
from freetoken.warmup.keys import short

Emit = Callable[..., None]
"""``emit(kind, **fields)``: one result."""

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
DRAWN = SamplingParams(temperature=0.8, top_k=40, top_p=0.95, seed=7, ignore_eos=True)
FULL = SamplingParams(temperature=0.8, top_p=0.9, min_p=0.02, seed=7, presence_penalty=0.3, repetition_penalty=1.1,
                      logprobs=3, ignore_eos=True)  # fmt: skip
ALLOWED_RATIO = 1.5
PROMPTS = (1, 2, 15, 16, 17, 63, 64, 65, 119, 180, 352, 719, 1601, 2047, 3001)


def random_tokens(source: random.Random, count: int, vocab_size: int) -> list[int]:
    """Ordinary tokens: none of the special ones at the start of the vocabulary."""
    return [source.randrange(300 if vocab_size > 1000 else 10, vocab_size) for _ in range(count)]


# ------------------------------------------------------------------------------------------- compiled keys


def check_cache(session: Session, emit: Emit) -> None:
    """Serve a mix of lengths, batches and sampler routes; then look at what Triton holds for the device."""
    source, longest = random.Random(1), session.llm.plan.max_seq_tokens
    vocab = session.vocab_size
    lengths = [n for n in PROMPTS if n + 12 <= longest]
    wishes = (GREEDY, DRAWN, FULL)
    for params in wishes:
        short_answer = evolve(params, max_tokens=5)
        for n in lengths[:: 1 if params is GREEDY else 4]:
            session.llm.generate([random_tokens(source, n, vocab)], short_answer)
    for count in (2, 3, 7, session.lanes, session.lanes + 3):
        prompts = [random_tokens(source, lengths[i % len(lengths)], vocab) for i in range(count)]
        session.llm.generate(prompts, [evolve(wishes[i % 3], max_tokens=4 + i % 9) for i in range(count)])
    declared, compiled = session.declared_keys(), device_cache_keys()
    ours = {key for key in compiled if key.startswith("freetoken")}
    watch = session.llm.running.core.late.watch
    emit(
        "cache", compiled=len(ours), declared=len(declared), undeclared=[short(k) for k in sorted(ours - declared)],
        unmet=len(declared - compiled), foreign=sorted({k.partition("|")[0] for k in compiled - ours}),
        late=dict(watch.counts), late_events=[str(e) for e in watch.events[:8]], ok=not ours - declared,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------- captured steps


def check_graphs(session: Session, emit: Emit, steps: int = 6) -> None:
    """Each captured size, and batches that are padded to one: the replay's logits and tokens against eager ones.

    Both start from one and the same state: what a step writes is taken back, and its cache slots are wiped.
    """
    graphs = session.graphs
    if graphs is None:
        emit("graphs", ok=False, note="nothing was captured")
        return
    sizes = [n for n in graphs._sizes if n <= session.lanes]
    padded = [n for n in range(1, session.lanes + 1) if n not in sizes][:3]
    differing: list[str] = []
    worst, compared = 0.0, 0
    for count in (*sizes, *padded):
        for step, (eager, replay) in enumerate(_both_ways(session, count, steps)):
            compared += 1
            logits, tokens = torch.equal(eager.logits, replay.logits), eager.tokens == replay.tokens
            worst = max(worst, float((eager.logits - replay.logits).abs().max()))
            if not (logits and tokens):
                differing.append(f"{count} sequences, step {step}: logits equal {logits}, tokens equal {tokens}")
    emit(
        "graphs", sizes=sizes, padded=padded, compared=compared, differing=differing[:6], num_differing=len(differing),
        worst=worst, ok=not differing and compared > 0,
    )  # fmt: skip


@frozen(eq=False)
class _Outcome:
    logits: Tensor
    tokens: list[int]


def _both_ways(session: Session, count: int, steps: int) -> Iterator[tuple[_Outcome, _Outcome]]:
    """``steps`` decode steps of ``count`` sequences, each eagerly and replayed; the replay's tokens go on."""
    source = random.Random(count)
    graphs = session.graphs
    assert graphs is not None
    names = [session.name() for _ in range(count)]
    texts = [random_tokens(source, 3 + 29 * lane + lane % 3, session.vocab_size) for lane in range(count)]
    newest = random_tokens(source, count, session.vocab_size)
    for lane, text in enumerate(texts):
        session.prefill(names[lane], lane, text, [], len(text))
    for step in range(steps):
        rows = [
            session.row(names[lane], lane, [newest[lane]], len(text), GREEDY if lane % 2 else DRAWN, step)
            for lane, text in enumerate(texts)
        ]
        plan = StepPlan(tuple(rows))
        size = graphs.size_for(plan)
        assert size is not None, f"{count} sequences are not captured"
        with _taken_back(session, rows):
            eager = _eager(session, plan) if size == count else _eager_padded(session, plan, size)
        tokens = list(session.engine.launch(plan).read().tokens)
        yield eager, _Outcome(session.logits[size][:count].clone(), tokens)
        for text, token in zip(texts, newest, strict=True):
            text.append(token)
        newest = tokens


def _eager(session: Session, plan: StepPlan) -> _Outcome:
    """The engine's own way of a step that no graph serves."""
    engine, graphs = session.engine, session.engine._graphs
    engine._graphs = None
    try:
        tokens = list(engine.launch(plan).read().tokens)
    finally:
        engine._graphs = graphs
    return _Outcome(session.logits[EAGER].clone(), tokens)


@torch.inference_mode()
def _eager_padded(session: Session, plan: StepPlan, size: int) -> _Outcome:
    """What was captured for ``size``, run without its graph: other batch sizes may take other tiles."""
    graphs, runner = session.graphs, session.engine.runner
    assert graphs is not None
    captured = graphs._captured[size]
    batch = captured.inputs.batch(captured.tokens, captured.inputs.fill(plan.rows, graphs.tables))
    for name, backend in runner.attention.items():
        backend.plan_replay(captured.plans[name], batch)
    drawn = graphs._body(captured.inputs, Step(batch, captured.plans, runner.pools.layers), captured.tokens)
    count = len(plan.rows)
    return _Outcome(session.logits[EAGER][:count].clone(), drawn[:count].tolist())


@contextmanager
def _taken_back(session: Session, rows: Sequence[StepRow]) -> Iterator[None]:
    """Afterwards recurrent states are as before, and the cache slots that the step wrote hold zeros."""
    pools, page = session.engine.runner.pools, session.llm.plan.page_tokens
    with torch.inference_mode():
        states = [state.clone() for state in pools._states]
        yield
        for state, before in zip(pools._states, states, strict=True):
            state.copy_(before)
        for spec, caches in zip(pools.specs, pools.layers, strict=True):
            for pool in caches if isinstance(spec, PagedKV) else ():
                for row in rows:
                    pool[row.pages[row.prefix_tokens // page], row.prefix_tokens % page].zero_()


# ------------------------------------------------------------------------------------------- logits


@frozen(eq=False)
class Case:
    """One text and our logits at ``rows`` of it."""

    name: str
    tokens: list[int]
    rows: list[int]
    ours: Tensor


def our_cases(session: Session, lengths: Sequence[int], decodes: int = 16, most_rows: int = 96) -> list[Case]:
    """Prompts of several lengths with their continuation token by token; a long one in chunks; a batch that decodes."""
    source, vocab = random.Random(5), session.vocab_size
    chunk = session.llm.plan.max_prefill_tokens
    found = []
    for n in lengths:
        tokens = random_tokens(source, n + decodes, vocab)
        wanted = sorted({n - 1, *range(0, n, max(1, n // most_rows))})
        name = session.name()
        prompt = session.prefill(name, 0, tokens[:n], wanted, chunk)
        assert prompt is not None
        found.append(Case(f"prefill {n}", tokens[:n], wanted, prompt))
        rows = [session.logits_at([session.row(name, 0, [tokens[n + i]], n + i, None)], [0]) for i in range(decodes)]
        decoded = torch.cat([row.float() for row in rows if row is not None])
        found.append(Case(f"decode after {n}", tokens, list(range(n, n + decodes)), decoded))
    return found + _batch_cases(session, min(8, session.lanes), source)


def _batch_cases(session: Session, count: int, source: random.Random, decodes: int = 6) -> list[Case]:
    lengths = [5 + 37 * lane for lane in range(count)]
    texts = [random_tokens(source, n + decodes, session.vocab_size) for n in lengths]
    names = [session.name() for _ in texts]
    for lane, text in enumerate(texts):
        session.prefill(names[lane], lane, text[: lengths[lane]], [], session.llm.plan.max_prefill_tokens)
    steps = []
    for i in range(decodes):
        rows = [
            session.row(names[lane], lane, [text[lengths[lane] + i]], lengths[lane] + i, None)
            for lane, text in enumerate(texts)
        ]
        logits = session.logits_at(rows, range(count))
        assert logits is not None
        steps.append(logits.float())
    all_steps = torch.stack(steps)
    return [
        Case(f"decode, {count} at once", text, list(range(n, n + decodes)), all_steps[:, lane])
        for lane, (text, n) in enumerate(zip(texts, lengths, strict=True))
    ]


def load_transformers(directory: Path, dtype: torch.dtype, device: str) -> Any:
    """The model as transformers reads it; experts one by one, which every version and dtype can do."""
    import transformers

    transformers.logging.set_verbosity_error()
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False  # a convolution would round its oracle to ten bits
    config = json.loads((directory / "config.json").read_text())
    cls = getattr(transformers, config["architectures"][0])
    try:
        model = cls.from_pretrained(directory, dtype=dtype, experts_implementation="eager")
    except (TypeError, ValueError):
        model = cls.from_pretrained(directory, dtype=dtype)
    return model.eval().to(device)


@torch.no_grad()
def their_logits(model: Any, case: Case, device: str) -> Tensor:
    ids = torch.tensor([case.tokens], device=device)
    logits: Tensor = model(input_ids=ids, use_cache=False).logits[0]
    return logits[torch.tensor(case.rows, device=device)].float()


def check_logits(cases: Sequence[Case], directory: Path, device: str, emit: Emit) -> None:
    """Errors against transformers in float32, ours beside those of transformers in bfloat16."""
    model = load_transformers(directory, torch.bfloat16, device)
    theirs = [their_logits(model, case, device) for case in cases]
    model = model.float()  # the same weights: widening bfloat16 is exact
    groups: dict[str, list[tuple[Tensor, Tensor, Tensor]]] = {}
    for case, rounded in zip(cases, theirs, strict=True):
        exact = their_logits(model, case, device)
        groups.setdefault(case.name, []).append((case.ours.to(exact.device), rounded, exact))
    for name, triples in groups.items():
        emit("logits", case=name, **compare(triples))
    # One text may meet a near tie of two experts that the other rounds differently: the bound is for many together.
    for name in ("prefill", "decode"):
        pooled = [triple for group, triples in groups.items() if group.startswith(name) for triple in triples]
        found = compare(pooled)
        within = found["max_ratio"] <= ALLOWED_RATIO and found["rms_ratio"] <= ALLOWED_RATIO  # False for NaN
        emit("logits", case=f"all {name}", ok=within, **found)


def compare(triples: Sequence[tuple[Tensor, Tensor, Tensor]]) -> dict[str, Any]:
    """``(ours, theirs, exact)`` of several texts → errors and their ratios."""
    ours, theirs, exact = (torch.cat(list(parts)).double() for parts in zip(*triples, strict=True))
    e, f = (ours - exact).abs(), (theirs - exact).abs()
    max_ratio = float(e.max() / f.max())
    rms_ratio = float(e.square().mean().sqrt() / f.square().mean().sqrt())
    rows = (e.square().mean(-1).sqrt() / f.square().mean(-1).sqrt()).median()
    return {
        "rows": len(exact), "max": float(e.max()), "rms": float(e.square().mean().sqrt()), "max_theirs": float(f.max()),
        "rms_theirs": float(f.square().mean().sqrt()), "max_ratio": max_ratio, "rms_ratio": rms_ratio,
        "median_row_ratio": float(rows), "scale": float(exact.square().mean().sqrt()),
        "top1": float((ours.argmax(-1) == exact.argmax(-1)).double().mean()),
        "top1_theirs": float((theirs.argmax(-1) == exact.argmax(-1)).double().mean()),
    }  # fmt: skip
