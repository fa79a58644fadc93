"""Can a thing run on this machine; if not, why, and what would fix it."""

from __future__ import annotations

from attrs import frozen


@frozen
class Availability:
    """The answer of a probe. ``reason`` and ``fix`` are for people and empty when ``ok``."""

    ok: bool
    reason: str = ""
    fix: str = ""

    @classmethod
    def yes(cls) -> Availability:
        return cls(True)

    @classmethod
    def no(cls, reason: str, fix: str = "") -> Availability:
        return cls(False, reason, fix)

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        if self.ok:
            return "available"
        return f"unavailable: {self.reason}" + (f" → {self.fix}" if self.fix else "")
