"""The smallest warmup that covers a launch space: keys, sweeps and forwards, each because nothing else covers it.

What a step does for later requests is a set of *aspects*: a key compiled, a key loaded, a kernel launched once, a
library swept, an undeclared op run. A set of steps covers the space when every aspect that some step of the engine
needs is there, and is irredundant when dropping any one of them loses an aspect.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property

from attrs import evolve, frozen

from freetoken.vocab.launch import LaunchSpace, StepPoint
from freetoken.vocab.warmup import Capture, CompileKeys, Forward, Known, LoadKeys, Touch, WarmupStep
from freetoken.warmup.survey import LibraryUse, Survey, survey_of

COMPILED = "compiled"
LOADED = "loaded"
LAUNCHED = "launched"
SWEPT = "swept"
RUN = "run"
ROUTE = "route"
CAPTURED = "captured"

DENSE_ROWS = 128
ROWS_AN_OCTAVE = 16
STEP_COST_TOKENS = 256
"""What a forward costs beside its tokens, as a number of tokens: launches, planning and the sampler."""
CONTEXT_COST_TOKENS = 8192
"""A token with a context of this many costs twice one without: attention beside the products."""


@frozen
class Aspect:
    """One thing that is warm: what was done, and to which key, library, route, or number of tokens."""

    done: str
    what: str

    def __str__(self) -> str:
        return f"{self.done} {self.what}"


Aspects = frozenset[Aspect]


def aspects_of(step: WarmupStep, launch_space: LaunchSpace) -> Aspects:
    """What one step covers, asked of the launch space itself."""
    match step:
        case CompileKeys(keys=keys):
            return frozenset(Aspect(COMPILED, key) for key in keys)
        case LoadKeys(keys=keys):
            return frozenset(Aspect(LOADED, key) for key in keys)
        case Touch(name=name):
            return frozenset({Aspect(SWEPT, name)})
        case Forward(point=point):
            return point_aspects(point, launch_space)
        case Capture():
            return frozenset({Aspect(CAPTURED, "decode graphs")})


def point_aspects(point: StepPoint, launch_space: LaunchSpace) -> Aspects:
    """What a forward at ``point`` covers: its launches, its route, and every undeclared op at its number of tokens."""
    found = {Aspect(LAUNCHED, key) for kind in launch_space.kinds for key in launch_space.keys(kind, point)}
    found.add(Aspect(ROUTE, point.sampler_route))
    found |= {_run(op, point.tokens) for op in launch_space.opaque}
    return frozenset(found)


def _run(op: str, tokens: int) -> Aspect:
    return Aspect(RUN, f"{op} of {tokens} tokens")


@frozen(eq=False)
class Coverage:
    """The aspects that steps of at most ``max_tokens`` tokens need, and the points that can bring them."""

    launch_space: LaunchSpace
    survey: Survey
    max_tokens: int

    @property
    def reachable(self) -> frozenset[str]:
        return self.survey.reachable(self.max_tokens)

    @property
    def beyond(self) -> frozenset[str]:
        """Keys that only steps of more tokens need."""
        return self.survey.keys - self.reachable

    @property
    def bare(self) -> bool:
        """Nothing in the space is declared: there is nothing to compile, to load or to sweep."""
        return not self.survey.uses and not self.survey.libraries

    @property
    def libraries(self) -> tuple[LibraryUse, ...]:
        """The libraries that are called within the cap, with their rows cut to it."""
        within = (use for use in self.survey.libraries if use.low <= self.max_tokens)
        return tuple(evolve(use, high=min(use.high, self.max_tokens)) for use in within)

    @cached_property
    def edges(self) -> tuple[int, ...]:
        """Token counts at which some declared key begins or ends, with the cap: where undeclared ops are run too."""
        witnesses = (w.tokens for use in self.survey.uses.values() for w in use.witnesses)
        return tuple(sorted({*(n for n in witnesses if n <= self.max_tokens), self.max_tokens}))

    @cached_property
    def required(self) -> Aspects:
        """What forwards have to cover."""
        if self.bare:
            return frozenset(_run(op, _tiny(self.max_tokens)) for op in self.launch_space.opaque)
        launched = {Aspect(LAUNCHED, key) for key in self.reachable}
        routes = {Aspect(ROUTE, route) for route in self.launch_space.space.sampler_routes}
        return frozenset(launched | routes | {_run(op, n) for op in self.launch_space.opaque for n in self.edges})

    @cached_property
    def candidates(self) -> Mapping[StepPoint, Aspects]:
        """Steps that could be run: where keys begin and end, and one sequence at each edge; by every route."""
        points: dict[StepPoint, None] = {}
        for use in self.survey.uses.values():
            points.update(dict.fromkeys(w for w in use.witnesses if w.tokens <= self.max_tokens))
        for n in [_tiny(self.max_tokens)] if self.bare else self.edges:
            points[_prefill(n, self.launch_space)] = None
        routes = self.launch_space.space.sampler_routes
        routed = [evolve(point, sampler_route=route) for point in points for route in routes]
        return {point: point_aspects(point, self.launch_space) & self.required for point in routed}


def coverage(launch_space: LaunchSpace, max_tokens: int) -> Coverage:
    """What steps of at most ``max_tokens`` tokens need; there are none of more than the space has."""
    return Coverage(launch_space, survey_of(launch_space), min(max_tokens, launch_space.space.tokens.high))


def _tiny(max_tokens: int) -> int:
    return min(max_tokens, 2)


def _prefill(tokens: int, launch_space: LaunchSpace) -> StepPoint:
    """``tokens`` tokens in as few sequences as may hold them."""
    longest = launch_space.space.chunk.high
    sequences = -(-tokens // longest)
    query = -(-tokens // sequences)
    return StepPoint(tokens, sequences, query, query, sequences, False)


def cost_tokens(point: StepPoint) -> float:
    """What a forward at ``point`` takes, in the cost of one token without context."""
    return STEP_COST_TOKENS + point.tokens * (1 + point.max_context / CONTEXT_COST_TOKENS)


def choose_points(candidates: Mapping[StepPoint, Aspects], required: Aspects) -> tuple[StepPoint, ...]:
    """An irredundant, cheap choice of points whose aspects are ``required``; greedy set cover, then pruned.

    Raises ``ValueError`` when the candidates do not cover what is required.
    """
    missing = set(required)
    chosen: list[StepPoint] = []
    while missing:
        best = max(candidates, key=lambda p: (len(candidates[p] & missing) / cost_tokens(p), -p.tokens, str(p)))
        gained = candidates[best] & missing
        if not gained:
            raise ValueError(f"no candidate covers {min(map(str, missing))}")
        chosen.append(best)
        missing -= gained
    for point in sorted(chosen, key=lambda p: (-cost_tokens(p), str(p))):
        rest = [other for other in chosen if other != point]
        if required <= frozenset().union(*(candidates[other] for other in rest)):
            chosen = rest
    return tuple(sorted(chosen, key=lambda p: (p.tokens, p.max_context, str(p))))


def sweep_rows(low: int, high: int, row_counts: tuple[int, ...] = ()) -> tuple[int, ...]:
    """Row counts for a library's sweep over ``low`` to ``high`` rows.

    Those of ``row_counts`` that such calls are padded to, exactly; or, where the library gets any number, all of the
    small ones, 16 an octave beyond, and both ends.
    """
    if row_counts:
        return row_counts[bisect_left(row_counts, low) : bisect_left(row_counts, high) + 1]
    rows = set(range(low, min(high, DENSE_ROWS) + 1)) | {low, high}
    octave = DENSE_ROWS
    while octave < high:
        rows.update(n for n in range(octave, 2 * octave, octave // ROWS_AN_OCTAVE) if low <= n <= high)
        octave *= 2
    return tuple(sorted(rows))


def cover(launch_space: LaunchSpace, known: Known, max_tokens: int, workers: int) -> tuple[WarmupStep, ...]:
    """The irredundant steps that warm every step of at most ``max_tokens`` tokens, in the order they should run.

    Compile what is not ``known``, load everything, sweep the libraries, capture, then run forwards. Where a start with
    the same keys was proven, one forward stands for them all. Pure.
    """
    need = coverage(launch_space, max_tokens)
    if need.bare:
        return _bare(need)
    return (
        *_keys(need, known, workers),
        *_sweeps(need),
        Capture(because="modules are loaded"),
        *_forwards(need, known),
    )


def _bare(need: Coverage) -> tuple[WarmupStep, ...]:
    ops = need.launch_space.opaque
    if not ops:
        return ()
    (point,) = choose_points(need.candidates, need.required)
    return (Forward(point, because=f"no kernel declares launches; {len(ops)} ops start their libraries"),)


def _keys(need: Coverage, known: Known, workers: int) -> tuple[WarmupStep, ...]:
    reachable = tuple(sorted(need.reachable))
    if not reachable:
        return ()
    cold = tuple(key for key in reachable if key not in known.compiled)
    load = LoadKeys(reachable, because=f"every key of steps up to {need.max_tokens} tokens")
    if not cold:
        return (load,)
    return (CompileKeys(cold, max(1, min(workers, len(cold))), because=known.because), load)


def _sweeps(need: Coverage) -> tuple[WarmupStep, ...]:
    because = "a library picks kernels by rules of its own"
    return tuple(
        Touch(use.name, sweep_rows(use.low, use.high, use.row_counts), because=because) for use in need.libraries
    )


def _forwards(need: Coverage, known: Known) -> tuple[WarmupStep, ...]:
    late = tuple(dict.fromkeys(p for p in known.late if p.tokens <= need.max_tokens))
    again = [Forward(point, because="production met something new here") for point in late]
    if known.proven and need.reachable <= known.compiled:
        best = max(need.candidates, key=lambda p: (len(need.candidates[p]), -cost_tokens(p), str(p)))
        proven = Forward(best, because=f"one covering forward: the rest was proven, {known.because}")
        return (proven, *(step for step in again if step.point != best))
    covered = frozenset().union(*(point_aspects(point, need.launch_space) for point in late))
    points = choose_points(need.candidates, need.required - covered)
    return (*again, *(Forward(point, because=_why(point, points, need)) for point in points))


def _why(point: StepPoint, chosen: Sequence[StepPoint], need: Coverage) -> str:
    """What this forward covers that none of the others does."""
    others = frozenset().union(*(need.candidates[p] for p in chosen if p != point))
    own = need.candidates[point] - others
    launched = sum(1 for a in own if a.done == LAUNCHED)
    run = sum(1 for a in own if a.done == RUN)
    routes = [a.what for a in own if a.done == ROUTE]
    parts = [f"{launched} keys"] * bool(launched) + [f"{run} undeclared ops"] * bool(run)
    parts += [f"the {route} sampler route" for route in routes]
    return "alone in covering " + ", ".join(parts)


def uncovered(steps: Iterable[WarmupStep], launch_space: LaunchSpace) -> tuple[str, ...]:
    """The keys of the whole launch space that ``steps`` neither load nor launch, in order."""
    warm = {a.what for s in steps for a in aspects_of(s, launch_space) if a.done in (LOADED, LAUNCHED)}
    return tuple(sorted(survey_of(launch_space).keys - warm))


def redundant(steps: Sequence[WarmupStep], launch_space: LaunchSpace, needed: Aspects) -> tuple[WarmupStep, ...]:
    """The steps that could each be dropped without losing an aspect that is ``needed``."""
    aspects = [aspects_of(step, launch_space) & needed for step in steps]
    found = []
    for index, step in enumerate(steps):
        rest = frozenset().union(*(a for i, a in enumerate(aspects) if i != index))
        if aspects[index] <= rest:
            found.append(step)
    return tuple(found)


def needed_aspects(launch_space: LaunchSpace, max_tokens: int) -> Aspects:
    """All that a start without a manifest has to make warm for steps of at most ``max_tokens`` tokens."""
    need = coverage(launch_space, max_tokens)
    if need.bare:
        return need.required
    keys = {Aspect(done, key) for key in need.reachable for done in (COMPILED, LOADED)}
    sweeps = {Aspect(SWEPT, use.name) for use in need.libraries}
    return need.required | keys | sweeps | {Aspect(CAPTURED, "decode graphs")}
