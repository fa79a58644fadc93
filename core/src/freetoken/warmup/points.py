"""The points of a step space: which steps are feasible, and enough of them to meet every launch.

Feasible means: sequences ≤ tokens; the longest query between ⌈tokens ÷ sequences⌉ and tokens − sequences + 1; context
at least the query; at most one row of logits a sequence. In a decode step tokens = sequences = rows and the query is 1;
a lone token with a prefix is a decode step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import product

from freetoken.vocab.launch import Range, StepPoint, StepSpace
from freetoken.vocab.units import ceil_div

INTEGERS = ("tokens", "sequences", "max_query", "max_context", "rows")
VARIABLES = (*INTEGERS, "decode", "sampler_route")

EXHAUSTIVE = 16_384
EXHAUSTIVE_CONTEXT = 2048
"""A variable with at most this many values is walked value by value; a longer one around its powers of two and evenly.

Contexts are longer than steps and no launch needs them to the token, so fewer of them are walked.
"""

_LOW, _HIGH = -1, 2**62


@lru_cache(maxsize=128)
def domain(space: StepSpace, variable: str) -> Range:
    """All values of an integer variable, other variables aside."""
    tokens = Range(min(space.tokens.low, space.decode_sequences.low), space.tokens.high)
    return {
        "tokens": tokens,
        "sequences": Range(
            min(space.sequences.low, space.decode_sequences.low),
            max(space.sequences.high, space.decode_sequences.high),
        ),
        "max_query": Range(1, min(space.chunk.high, space.tokens.high)),
        "max_context": Range(1, space.context.high),
        "rows": Range(1, max(space.sequences.high, space.decode_sequences.high)),
    }[variable]


def values_along(space: StepSpace, variable: str) -> Iterable[int]:
    """Every value where there are at most ``EXHAUSTIVE``, otherwise the small ones, critical ones, and one in many."""
    whole = domain(space, variable)
    limit = EXHAUSTIVE_CONTEXT if variable == "max_context" else EXHAUSTIVE
    if whole.high - whole.low < limit:
        return range(whole.low, whole.high + 1)
    step = (whole.high - whole.low) // (limit // 4)
    small = range(whole.low, whole.low + limit // 8)
    return sorted({*small, *range(whole.low, whole.high, step), *critical(whole, neighbours=True)})


def critical(whole: Range, neighbours: bool = False) -> tuple[int, ...]:
    """The ends, the values where Triton's integer classes change, and (with ``neighbours``) around powers of two."""
    found = {whole.low, whole.low + 1, 2, 3, 15, 16, 17, whole.high - 1, whole.high}
    if neighbours:
        power = 1
        while power <= whole.high + 1:
            found.update((power - 1, power, power + 1, 3 * power // 2))
            power *= 2
    return tuple(sorted(value for value in found if value in whole))


def settle(space: StepSpace, wanted: Mapping[str, int], first: str, decode: bool, route: str) -> StepPoint | None:
    """The feasible point nearest to ``wanted`` that keeps ``wanted[first]``; ``None`` if no point has that value."""
    chosen = _settle_decode(space, wanted, first) if decode else _settle_prefill(space, wanted, first)
    if chosen is None or (first and chosen[first] != wanted[first]):
        return None
    return StepPoint(**chosen, decode=decode, sampler_route=route)


def _settle_decode(space: StepSpace, wanted: Mapping[str, int], first: str) -> dict[str, int] | None:
    if space.context.high < 2:
        return None
    sequences = wanted[first] if first in ("tokens", "sequences", "rows") else wanted["sequences"]
    sequences = _clamp(sequences, space.decode_sequences.low, min(space.decode_sequences.high, space.tokens.high))
    context = _clamp(wanted["max_context"], 2, space.context.high)
    return {"tokens": sequences, "sequences": sequences, "max_query": 1, "max_context": context, "rows": sequences}


def _settle_prefill(space: StepSpace, wanted: Mapping[str, int], first: str) -> dict[str, int] | None:
    box = {
        "tokens": space.tokens,
        "sequences": Range(space.sequences.low, min(space.sequences.high, space.tokens.high)),
        "max_query": domain(space, "max_query"),
    }
    if first == "rows":
        box["sequences"] = Range(wanted["rows"], max(wanted["rows"], box["sequences"].high))
    if first == "max_context":
        longest = max(1, min(box["max_query"].high, wanted["max_context"]))
        box["max_query"] = Range(min(longest, 2), longest)  # a lone token with a prefix is a decode step
    order = ["tokens", "sequences", "max_query"]
    if first in order:
        order.sort(key=lambda name: name != first)
    given: dict[str, int] = {}
    for name in order:
        low, high = _interval(name, given, box)
        if low > high:
            return None
        given[name] = _clamp(wanted[name], low, high)
    longest = 1 if given["tokens"] == 1 else space.context.high
    given["max_context"] = _clamp(wanted["max_context"], given["max_query"], longest)
    given["rows"] = _clamp(wanted["rows"], 1, given["sequences"])
    return given


def _interval(name: str, given: Mapping[str, int], box: Mapping[str, Range]) -> tuple[int, int]:
    """The values of ``name`` for which the variables not yet given can still be chosen."""
    low, high = box[name].low, box[name].high
    tokens, sequences, query = given.get("tokens"), given.get("sequences"), given.get("max_query")
    most = box["sequences"].high
    if name == "tokens":
        if sequences is not None and query is not None:
            return max(low, sequences + query - 1), min(high, sequences * query)
        if sequences is not None:
            return max(low, sequences), min(high, sequences * box["max_query"].high)
        fewest = box["sequences"].low + (query or box["max_query"].low) - 1
        return max(low, fewest), min(high, most * (query or box["max_query"].high))
    if name == "sequences":
        if tokens is not None and query is not None:
            return max(low, ceil_div(tokens, query)), min(high, tokens - query + 1)
        if tokens is not None:
            return max(low, ceil_div(tokens, box["max_query"].high)), min(high, tokens)
        return low, min(high, box["tokens"].high - (query or box["max_query"].low) + 1)
    if tokens is not None and sequences is not None:
        return max(low, ceil_div(tokens, sequences)), min(high, tokens - sequences + 1)
    if tokens is not None:
        return max(low, ceil_div(tokens, min(most, tokens))), min(high, tokens - box["sequences"].low + 1)
    return low, min(high, box["tokens"].high - (sequences or box["sequences"].low) + 1)


def _clamp(value: int, low: int, high: int) -> int:
    return max(low, min(high, value))


def points_over(space: StepSpace, reads: Iterable[str]) -> tuple[StepPoint, ...]:
    """Feasible points that meet every launch of a function which reads ``reads``.

    Along each integer variable it reads, every value, with the others at their lowest and at their highest; and all
    combinations of the critical values. Decode and sampler routes are combined with everything. Points that agree in
    all variables read appear once.
    """
    return _points(space, frozenset(reads))


@lru_cache(maxsize=8)  # ops that read the same variables share one walk
def _points(space: StepSpace, reads: frozenset[str]) -> tuple[StepPoint, ...]:
    integers = [name for name in INTEGERS if name in reads]
    routes = space.sampler_routes if "sampler_route" in reads else space.sampler_routes[:1]
    projection = [*integers, *(name for name in ("decode", "sampler_route") if name in reads)]
    found: dict[tuple[object, ...], StepPoint] = {}
    for route in routes:
        for first, wanted in _wishes(space, integers):
            for decode in (False, True):
                point = settle(space, wanted, first, decode, route)
                if point is not None:
                    found.setdefault(tuple(getattr(point, name) for name in projection), point)
    return tuple(found.values())


def _wishes(space: StepSpace, integers: list[str]) -> Iterator[tuple[str, dict[str, int]]]:
    """What to ask ``settle`` for: the walk along each variable, then the critical combinations."""
    free = dict.fromkeys(INTEGERS, _LOW)
    yield "", dict(free)
    yield "", dict.fromkeys(INTEGERS, _HIGH)
    for first in integers:
        others = [name for name in integers if name != first]
        corners = list(product((_LOW, _HIGH), repeat=len(others))) if len(others) < 3 else _few_corners(len(others))
        for value in values_along(space, first):
            for corner in corners:
                yield first, {**free, **dict(zip(others, corner, strict=True)), first: value}
    sets = [critical(domain(space, name)) for name in integers]
    for combination in product(*sets):
        yield "", {**free, **dict(zip(integers, combination, strict=True))}


def _few_corners(count: int) -> list[tuple[int, ...]]:
    """All low, all high, and each one alone high: enough beside the critical combinations."""
    alone = [tuple(_HIGH if i == j else _LOW for i in range(count)) for j in range(count)]
    return [(_LOW,) * count, (_HIGH,) * count, *alone]
