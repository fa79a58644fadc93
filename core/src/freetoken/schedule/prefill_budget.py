"""How many prompt tokens a step may compute, so that running requests keep getting tokens. Pure."""

from __future__ import annotations

from attrs import define

FIRST_GUESS_TOKENS = 64  # before anything was measured: small enough for any machine
_SMOOTHING = 0.3


@define
class StepSpeed:
    """Measured speed of steps: milliseconds a prompt token adds, and a decode step takes; 0 until measured."""

    ms_per_token: float = 0.0
    decode_ms: float = 0.0

    def observe(self, prefill_tokens: int, decode_rows: int, ms: float) -> None:
        """Take one step into account."""
        if prefill_tokens == 0:
            if decode_rows:
                self.decode_ms = _smooth(self.decode_ms, ms)
            return
        rest = max(ms - (self.decode_ms if decode_rows else 0.0), 0.0)
        self.ms_per_token = _smooth(self.ms_per_token, rest / prefill_tokens)


def _smooth(old: float, new: float) -> float:
    return new if old == 0.0 else old + _SMOOTHING * (new - old)


def prefill_budget(max_tokens: int, decode_rows: int, speed: StepSpeed, max_gap_ms: float, page_tokens: int) -> int:
    """Prompt tokens of the next step.

    Without running decodes it is all that fits a step. With them the step must end within ``max_gap_ms``, so it is what
    the measured speed allows; at least one page, or the prompt would never end.
    """
    room = max_tokens - decode_rows
    if decode_rows == 0 or room <= 0:
        return max(room, 0)
    if speed.ms_per_token == 0.0:
        return min(room, FIRST_GUESS_TOKENS)
    allowed = int((max_gap_ms - speed.decode_ms) * 0.8 / speed.ms_per_token)
    return min(room, max(allowed, page_tokens))
