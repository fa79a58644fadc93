"""What to measure."""

from __future__ import annotations

from attrs import frozen


@frozen
class BenchPlan:
    """Lengths are prompt tokens; ``requests`` 0 means twice as many as there are streams."""

    lengths: tuple[int, ...] = (100, 161, 333, 700, 1592)
    repeats: int = 3
    decode_tokens: int = 128
    decode_prompt_tokens: int = 100
    streams: tuple[int, ...] = (1, 16, 64)
    load_prompt_tokens: int = 512
    requests: int = 0

    def requests_for(self, streams: int) -> int:
        return max(streams, self.requests or 2 * streams)

    @property
    def total_requests(self) -> int:
        decode = self.repeats if self.decode_tokens else 0
        load = sum(self.requests_for(n) for n in self.streams) if self.decode_tokens else 0
        return len(self.lengths) * (1 + self.repeats) + decode + load
