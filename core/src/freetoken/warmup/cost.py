"""What a warmup step is expected to take: estimates from unit costs, said to be estimates."""

from __future__ import annotations

from freetoken.vocab.warmup import Capture, CompileKeys, Forward, LoadKeys, Touch, WarmupStep
from freetoken.warmup.cover import cost_tokens
from freetoken.warmup.keys import is_native

COMPILE_KEY_S = 1.0  # one core; between 0.2 s for a row kernel and 3 s for a large product's
BUILD_MODULE_S = 300.0  # one core; a library's attention kernels, ten sources of templates, by nvcc
LOAD_KEY_S = 0.004  # reading the cache, the launcher and the module, with memory to spare
SWEEP_ROW_S = 0.0002
FORWARD_TOKEN_S = 2e-6
FORWARD_S = 0.004
CAPTURE_S = 0.5
"""Orders of magnitude on a current card and host; ``freetoken warmup report`` has what a start really took."""


def expected_seconds(step: WarmupStep) -> float:
    """The time a step takes; compiling runs beside the weights, so the start waits for less."""
    match step:
        case CompileKeys(keys=keys, workers=workers):
            built = sum(map(is_native, keys))
            compiled = len(keys) - built
            return max(
                compiled * COMPILE_KEY_S / max(1, min(workers, compiled)), built * BUILD_MODULE_S / max(1, workers)
            )
        case LoadKeys(keys=keys):
            return len(keys) * LOAD_KEY_S
        case Touch(tokens=tokens):
            return max(1, len(tokens)) * SWEEP_ROW_S
        case Forward(point=point):
            return FORWARD_S + cost_tokens(point) * FORWARD_TOKEN_S
        case Capture():
            return CAPTURE_S
