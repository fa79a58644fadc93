"""What a warmup policy may ask for. A policy is pure: it yields steps, the core's runner does them."""

from __future__ import annotations

from attrs import field, frozen

from freetoken.vocab.launch import StepPoint


@frozen
class CompileKeys:
    """Compile these keys into the disk cache, in ``workers`` processes without a device context; before the weights."""

    keys: tuple[str, ...]
    workers: int = 1
    because: str = ""


@frozen
class LoadKeys:
    """Load these compiled modules on the device; after the weights, before the KV pool is sized."""

    keys: tuple[str, ...]
    workers: int = 1
    because: str = ""


@frozen
class Touch:
    """Call one library sweep (or one native module) so that its lazy state exists; ``tokens`` are the row counts."""

    name: str
    tokens: tuple[int, ...] = ()
    workers: int = 1
    because: str = ""


@frozen
class Forward:
    """Run one step through one layer of each kind, at ``point``, on scratch state."""

    point: StepPoint
    workers: int = 1
    because: str = ""


@frozen
class Capture:
    """Capture the decode graphs now. Capture happens under every policy; this step only says when."""

    workers: int = 1
    because: str = ""


WarmupStep = CompileKeys | LoadKeys | Touch | Forward | Capture


@frozen
class Known:
    """The manifest's view: keys already compiled for this fingerprint, and whether a start with them was proven.

    ``because`` says what the view rests on, e.g. "manifest of 2026-03-01, 212 keys" or "no manifest yet".
    """

    compiled: frozenset[str] = field(factory=frozenset)
    proven: bool = False
    late: tuple[StepPoint, ...] = ()  # points at which production met something new; the next start covers them
    because: str = "no manifest yet"
