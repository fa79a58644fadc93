"""Trace the real model step at every token count and compare its launches with what is declared. Needs no GPU.

    python benchmarks/trace_launches.py [--model NAME …] [--card NAME] [--tokens LOW HIGH] [--every N] [--workers N]

The oracle is the trace: engine, model, kernels and attention run on meta tensors (``freetoken.testing.launch_trace``),
each launch is recorded with its key and its grid. Every part of every step must launch exactly what the launch space
declares there, every declared key must be met, and the space must pass the lint. Exit code 1 where that fails. The
models have the published dimensions of Qwen3-30B-A3B and Qwen3.6-35B-A3B with one layer of each kind.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from attrs import frozen

sys.path.insert(0, str(Path(__file__).parent))

from checkpoint_kinds import KINDS, text_config

from freetoken.config.engine_options import CoreOptions
from freetoken.testing.launch_trace import FULL, LaunchTrace, Share
from freetoken.testing.launches import DEVICES
from freetoken.warmup.enumerate import enumerate_keys
from freetoken.warmup.keys import short
from freetoken.warmup.lint import lint

MODELS = ("qwen3-30b-a3b", "qwen3.6-35b-a3b")
MAX_TOKENS = 8192
OPTIONS = CoreOptions(max_running_requests=64, max_seq_len=40_960, max_prefill_tokens=MAX_TOKENS)

Step = tuple[Share, ...]


def one_of_each(name: str) -> Mapping[str, Any]:
    """The model's configuration with one layer of each kind, and without a tower that nothing here uses."""
    config = {key: value for key, value in KINDS[name].items() if key != "vision_config"}
    text = dict(text_config(config))
    kinds = sorted(set(text.get("layer_types", ["full_attention"])))
    text["num_hidden_layers"] = len(kinds)
    if "layer_types" in text:
        text["layer_types"] = kinds
    return {**config, "text_config": text} if "text_config" in config else text


def steps_of(tokens: int, options: CoreOptions = OPTIONS) -> Iterator[Step]:
    """Steps of ``tokens`` new tokens: every make of step that the scheduler can hand over."""
    running, longest = options.max_running_requests, options.max_seq_len or MAX_TOKENS
    yield (Share(tokens),)  # a whole prompt
    if tokens > 1:
        yield (Share(tokens, 16 * (tokens % 301) + tokens % 3, None),)  # a chunk that does not end its prompt
        yield (Share(tokens, longest - tokens, FULL),)  # the last chunk of the longest prompt
        yield ragged(tokens, 2 + tokens % (min(tokens, running) - 1))  # several prompts
        decodes = 1 + tokens % min(tokens - 1, running - 1)  # a chunk beside running requests
        chunk = Share(tokens - decodes, (7 * tokens) % 1000)
        yield (chunk, *(Share(1, 1 + (311 * tokens + 17 * i) % (longest - 1)) for i in range(decodes)))
    if tokens <= running:
        yield (Share(1),) * tokens  # prompts of one token
        yield (Share(1, 1),) * tokens  # decode steps: the shortest context, the longest, and mixed on the full route
        yield (Share(1, longest - 1),) * tokens
        yield tuple(Share(1, 1 + 97 * i, FULL if i % 2 == 0 else Share(1).params) for i in range(tokens))


def ragged(tokens: int, sequences: int) -> Step:
    """Uneven prompts, some of them continued."""
    lengths = [1 + (tokens - sequences) * (i + 1) * 2 // (sequences * (sequences + 1)) for i in range(sequences)]
    lengths[-1] += tokens - sum(lengths)
    return tuple(Share(n, 5 * i if i % 2 else 0) for i, n in enumerate(lengths))


def thinned(high: int = MAX_TOKENS) -> tuple[int, ...]:
    """Few token counts: the small ones, and those around powers of two and other round numbers."""
    found = {*range(1, 35), *range(61, 69), *range(high - 1, high + 1)}
    for power in range(7, 14):
        found |= {2**power - 1, 2**power, 2**power + 1, 3 * 2 ** (power - 1)}
    return tuple(sorted(n for n in (found | {119, 180, 352, 719, 1601, 5417, 7919}) if n <= high))


@frozen
class Found:
    """What a walk found: keys met, steps taken, and differences as texts."""

    keys: frozenset[str] = frozenset()
    steps: int = 0
    differences: tuple[str, ...] = ()

    def __add__(self, other: Found) -> Found:
        return Found(self.keys | other.keys, self.steps + other.steps, self.differences + other.differences)


def walk(trace: LaunchTrace, counts: Iterable[int], most_differences: int = 5) -> Found:
    """Every step of each of ``counts`` tokens, compared part by part; ends early when that much differs."""
    keys: set[str] = set()
    steps, differences = 0, []
    for tokens in counts:
        for step in steps_of(tokens):
            steps += 1
            try:
                keys |= trace.check(step)
            except Exception as error:  # a launch that its contract refuses is a difference like any other
                differences.append(f"{type(error).__name__}: {error}"[:2000])
                if len(differences) >= most_differences:
                    return Found(frozenset(keys), steps, tuple(differences))
    return Found(frozenset(keys), steps, tuple(differences))


def never_met(trace: LaunchTrace, found: Found) -> frozenset[str]:
    """Declared keys that no step launched."""
    return enumerate_keys(trace.space).keys - found.keys


def make_trace(model: str, card: str = "h200") -> LaunchTrace:
    return LaunchTrace(one_of_each(model), DEVICES[card], options=OPTIONS)


def _walk_in_worker(model: str, card: str, counts: Sequence[int]) -> Found:
    import torch

    torch.set_num_threads(1)
    return walk(make_trace(model, card), counts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=MODELS)
    parser.add_argument("--card", choices=list(DEVICES), default="h200")
    parser.add_argument("--tokens", type=int, nargs=2, default=(1, MAX_TOKENS), metavar=("LOW", "HIGH"))
    parser.add_argument("--every", type=int, default=1, help="above 64 tokens only every Nth count")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    given = parser.parse_args()
    low, high = given.tokens
    bad = 0
    for model in given.model or MODELS:
        start = time.perf_counter()
        counts = sorted({*range(low, min(high, 64) + 1), *range(low, high + 1, given.every)})
        shares = [counts[i :: 4 * given.workers] for i in range(4 * given.workers)]
        with ProcessPoolExecutor(given.workers, mp_context=get_context("spawn")) as pool:
            jobs = [pool.submit(_walk_in_worker, model, given.card, share) for share in shares if len(share)]
            found = sum((job.result() for job in jobs), Found())
        trace = make_trace(model, given.card)
        missing, findings = never_met(trace, found), lint(trace.space)
        for text in (*found.differences[:10], *map(str, findings)):
            print(text)
        for key in sorted(missing):
            print(f"declared and never launched: {short(key)} {key}")
        bad += len(found.differences) + len(missing) + len(findings)
        print(
            f"{model} on {given.card}: {found.steps} steps of {low} to {high} tokens, {len(found.keys)} keys launched, "
            f"{len(found.differences)} differences, {len(missing)} declared keys never launched, "
            f"{len(findings)} findings of the lint, {time.perf_counter() - start:.0f} s",
            flush=True,
        )
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
