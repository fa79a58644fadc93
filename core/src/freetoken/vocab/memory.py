"""What a part will take, stated before anything is allocated."""

from __future__ import annotations

from attrs import frozen


@frozen
class MemoryClaim:
    """``steady_bytes`` stay taken while serving; ``peak_bytes`` (≥ steady) are needed at the worst moment."""

    owner: str
    what: str
    steady_bytes: int
    peak_bytes: int = 0
    where: str = "device"  # "device" or "host"; on a CPU-only machine both are the same memory

    @property
    def worst_bytes(self) -> int:
        return max(self.steady_bytes, self.peak_bytes)
