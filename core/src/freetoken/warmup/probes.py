"""Adversarial probes of a served engine, from a seeded generator of its own.

It knows what a server says of itself and what requests may ask for, and nothing of warmup: no plan, no policy, no
kernel and no launch space is looked at here, so that nothing is found covered because both had the same list.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from attrs import frozen

OUTPUT_TOKENS = 3
"""Of every answer: the first comes from the prefill, the others from decode steps."""

TOUCHES = 4
"""Each probe is sent once, and three times more to compare with."""

DRAWN_CHUNKS = 24
"""What the probes drawn by chance may have computed, all touches together, in chunks. A step has no more tokens than a
chunk, so that batches of long prompts repeat what a few show: without a bound they took 12 of 16 million tokens."""

_SHORT_TOKENS = 40
_MOST_DRAWN = 50

# Each is a way through the sampler; logprobs are asked for in an odd and in an even width.
SAMPLING: Mapping[str, Mapping[str, Any]] = {
    "greedy": {"temperature": 0},
    "temperature": {"temperature": 0.8},
    "seed": {"temperature": 0.8, "seed": 7},
    "top-k": {"temperature": 0.8, "top_k": 40},
    "top-p": {"temperature": 0.8, "top_p": 0.9},
    "min-p": {"temperature": 0.8, "min_p": 0.05},
    "all cuts": {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.05, "seed": 11},
    "logprobs 1": {"temperature": 0, "logprobs": 1},
    "logprobs 4": {"temperature": 0.8, "logprobs": 4},
    "presence": {"temperature": 0.8, "presence_penalty": 0.5},
    "frequency": {"temperature": 0.8, "frequency_penalty": 0.5},
    "repetition": {"temperature": 0.8, "repetition_penalty": 1.2},
    "bias": {"temperature": 0.8, "logit_bias": {"5": 2.0}},
    "min tokens": {"temperature": 0.8, "min_tokens": 2},
    "all at once": {
        "temperature": 0.8, "top_k": 40, "top_p": 0.9, "presence_penalty": 0.5, "repetition_penalty": 1.1,
        "logit_bias": {"5": 2.0}, "logprobs": 3, "seed": 3,
    },
}  # fmt: skip


@frozen
class ServerLimits:
    """What a server says of itself. ``longest`` is prompt and answer together; ``chunk`` one step's new tokens."""

    longest: int
    chunk: int
    running: int
    page: int
    vocabulary: int
    kv_tokens: int


@frozen
class Probe:
    """One request: ``batch`` prompts at once, each of ``prefix`` tokens sent before and ``new`` that were not."""

    name: str
    new: int
    prefix: int
    batch: int
    sampling: str

    @property
    def tokens(self) -> int:
        """Of one prompt."""
        return self.new + self.prefix

    @property
    def computed_tokens(self) -> int:
        """Over all touches; the prefix is computed once."""
        return self.prefix + TOUCHES * self.new * self.batch

    def body(self, chance: random.Random, vocabulary: int, prefix: Sequence[int]) -> dict[str, Any]:
        """The request with prompts drawn anew, so that nothing beyond ``prefix`` is in a cache."""
        prompts = [[*prefix, *tokens(chance, self.new, vocabulary)] for _ in range(self.batch)]
        return {
            "prompt": prompts if self.batch > 1 else prompts[0],
            "max_tokens": OUTPUT_TOKENS,
            "ignore_eos": True,
            **SAMPLING[self.sampling],
        }


def tokens(chance: random.Random, count: int, vocabulary: int) -> list[int]:
    """Token ids, past the first ones, which are often special."""
    low = min(300, vocabulary // 2)
    return [chance.randrange(low, vocabulary) for _ in range(count)]


def probes(limits: ServerLimits, count: int, seed: int) -> tuple[Probe, ...]:
    """``count`` different probes in an order of chance: all critical lengths, prefixes, batches and routes, then more
    of each at lengths drawn by order of magnitude. The same seed and limits give the same; limits of a few tokens
    have fewer than ``count``."""
    chance = random.Random(seed)
    critical = list(dict.fromkeys(_critical(limits)))
    chance.shuffle(critical)
    found = dict.fromkeys(list(dict.fromkeys([*_grid(limits), *critical]))[:count])
    for probe in islice(_drawn(limits, chance), _MOST_DRAWN * count):
        if len(found) >= count:
            break
        found[probe] = None
    different = list(found)
    chance.shuffle(different)
    return tuple(different)


def _longest(limits: ServerLimits) -> int:
    return max(1, limits.longest - OUTPUT_TOKENS)


def lengths(limits: ServerLimits) -> tuple[int, ...]:
    """One, around sixteen and the other powers of two, the chunk and its neighbours, the longest; and primes."""
    longest = _longest(limits)
    chunk = limits.chunk
    found = {1, 2, 3, 15, 16, 17, chunk - 1, chunk, chunk + 1, 2 * chunk, longest - 1, longest}
    power = 32
    while power <= longest:
        found |= {power - 1, power, power + 1}
        power *= 2
    found |= {p for p in (5, 7, 11, 13, 19, 37, 61, 97, 193, 389, 769, 1543, 3079, 6151, 12289, 24593) if p <= longest}
    return tuple(sorted(n for n in found if 1 <= n <= longest))


def prefixes(limits: ServerLimits) -> tuple[int, ...]:
    """Nothing, whole pages, odd numbers, and most of the context."""
    longest = _longest(limits)
    page = limits.page
    found = {0, page, 4 * page, 4 * page + 1, 5 * page - 1, longest // 2, longest - page}
    return tuple(sorted(n for n in found if 0 <= n < longest))


def batches(limits: ServerLimits) -> tuple[int, ...]:
    """One, two, odd numbers, around sixteen, and all that run at once."""
    found = {1, 2, 3, 5, 7, 8, 15, 16, 17, limits.running - 1, limits.running}
    return tuple(sorted(n for n in found if 1 <= n <= limits.running))


def _grid(limits: ServerLimits) -> Iterator[Probe]:
    """The least that a certificate needs: every batch, every prefix, every route, each length of the critical few."""
    short = min(17, _longest(limits))
    for batch in batches(limits):
        yield _fitting(limits, Probe(f"batch {batch}", short, 0, batch, "greedy"))
    for prefix in prefixes(limits):
        new = min(7, _longest(limits) - prefix)
        yield _fitting(limits, Probe(f"prefix {prefix}", new, prefix, 1, "greedy"))
    for sampling in SAMPLING:
        yield _fitting(limits, Probe(f"{sampling} alone", short, 0, 1, sampling))
        yield _fitting(limits, Probe(f"{sampling} in a batch", short, 0, min(3, limits.running), sampling))


def _critical(limits: ServerLimits) -> Iterator[Probe]:
    """Each length; whole chunks before the last are a prefix, since they are the same for all, but for the longest."""
    for length in lengths(limits):
        whole = (length - 1) // limits.chunk * limits.chunk
        prefix = 0 if length in (limits.chunk + 1, _longest(limits)) else whole
        yield _fitting(limits, Probe(f"length {length}", length - prefix, prefix, 1, "greedy"))


def _drawn(limits: ServerLimits, chance: random.Random) -> Iterator[Probe]:
    """Endless: lengths by order of magnitude, so that short ones are as likely as long ones. None takes more than an
    eighth of what is left of the bound, so that later ones get shorter, and all stay possible at a few tokens."""
    longest = _longest(limits)
    left = DRAWN_CHUNKS * limits.chunk
    while True:
        room = left // 8
        total = min(longest, int(2 ** chance.uniform(0, longest.bit_length())))
        prefix = chance.choice((0, 0, *(p for p in prefixes(limits) if p < total and p <= room)))
        batch = chance.choice((1, 1, *batches(limits)))
        sampling = chance.choice(list(SAMPLING))
        new = min(total - prefix, max(room // (TOUCHES * batch), _SHORT_TOKENS))
        probe = _fitting(limits, Probe("drawn", max(1, new), prefix, batch, sampling))
        left = max(0, left - probe.computed_tokens)
        yield probe


def _fitting(limits: ServerLimits, probe: Probe) -> Probe:
    """A probe whose prompts fit the cache together: fewer at once where they are long."""
    room = max(1, limits.kv_tokens // (probe.tokens + OUTPUT_TOKENS + limits.page))
    batch = max(1, min(probe.batch, room))
    return probe if batch == probe.batch else Probe(probe.name, probe.new, probe.prefix, batch, probe.sampling)
