"""Where ``auto`` ranks this backend: a table of measurements against the Triton backend, and what follows from it."""

from __future__ import annotations

from attrs import frozen

TRITON_PRIORITY = 10
"""What ``freetoken-attention-triton`` declares."""

ABOVE, BELOW = TRITON_PRIORITY + 5, TRITON_PRIORITY - 5


@frozen
class Measured:
    """One card: Triton's time divided by FlashInfer's, the geometric mean over ``benchmarks/gpu_flashinfer.py``."""

    card: str
    prefill: float
    decode: float

    @property
    def faster(self) -> bool:
        """No slower at either, and faster at one."""
        return min(self.prefill, self.decode) >= 1.0 and max(self.prefill, self.decode) > 1.0


MEASURED: tuple[Measured, ...] = ()
"""Nothing is measured yet. A row for each card that ``benchmarks/gpu_flashinfer.py`` has run on."""


def priority(table: tuple[Measured, ...] = MEASURED) -> int:
    """Above Triton where it is faster on every card measured; else below, also while nothing is measured."""
    return ABOVE if table and all(row.faster for row in table) else BELOW


def because(table: tuple[Measured, ...] = MEASURED) -> str:
    """The rank in words, for ``freetoken explain``."""
    if not table:
        return "its speed against triton is not measured yet"
    figures = "; ".join(f"{r.card}: prefill {r.prefill:.2f}, decode {r.decode:.2f}" for r in table)
    return f"measured, times triton's speed: {figures}"
