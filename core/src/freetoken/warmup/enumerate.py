"""Every key that a launch space can reach, with steps at which each is met."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

from attrs import frozen

from freetoken.ops.triton_stub import CompileRequest, Target, compile_request
from freetoken.vocab.hardware import Device
from freetoken.vocab.launch import LaunchSpace, StepPoint, StepSpace, TritonLaunch
from freetoken.warmup.launch_space import DeclaredLaunchSpace, KeyedLaunch
from freetoken.warmup.points import VARIABLES, points_over


@frozen
class KeyUse:
    """One key and where it is met.

    ``launch`` is one that has it (``None`` from a launch space that is not ours), ``kinds`` make it, ``witnesses`` are
    the steps of fewest tokens, of the longest context and of most tokens that do, fewest tokens first.
    """

    key: str
    launch: KeyedLaunch | None
    kinds: tuple[str, ...]
    witnesses: tuple[StepPoint, ...]


@frozen
class Enumeration:
    """All keys of a launch space, and at how many points launch functions were asked."""

    uses: Mapping[str, KeyUse]
    points: int

    @property
    def keys(self) -> frozenset[str]:
        return frozenset(self.uses)

    @property
    def witnesses(self) -> Mapping[str, tuple[StepPoint, ...]]:
        return {key: use.witnesses for key, use in self.uses.items()}

    def requests(self, device: Device) -> tuple[CompileRequest, ...]:
        """What workers need to compile every Triton key for ``device``, in order of key."""
        target = Target.of(device)
        launches = (self.uses[key].launch for key in sorted(self.uses))
        return tuple(compile_request(launch, target) for launch in launches if isinstance(launch, TritonLaunch))

    def reachable(self, max_tokens: int) -> frozenset[str]:
        """The keys that some step of at most ``max_tokens`` tokens needs."""
        return frozenset(key for key, use in self.uses.items() if use.witnesses[0].tokens <= max_tokens)


class _Found:
    """What is known of one key so far."""

    __slots__ = ("fewest", "kinds", "launch", "longest", "most")

    def __init__(self, launch: KeyedLaunch | None, point: StepPoint) -> None:
        self.launch = launch
        self.kinds: dict[str, None] = {}
        self.fewest = self.most = self.longest = point

    def meet(self, point: StepPoint) -> None:
        if point.tokens < self.fewest.tokens:
            self.fewest = point
        if point.tokens > self.most.tokens:
            self.most = point
        if point.max_context > self.longest.max_context:
            self.longest = point

    def use(self, key: str) -> KeyUse:
        met = dict.fromkeys((self.fewest, self.longest, self.most))
        return KeyUse(
            key=key,
            launch=self.launch,
            kinds=tuple(self.kinds),
            witnesses=tuple(sorted(met, key=lambda point: point.tokens)),
        )


def enumerate_keys(launch_space: LaunchSpace, space: StepSpace | None = None) -> Enumeration:
    """Every key reachable in ``space`` (the launch space's own by default), exactly as Triton's binder gives it.

    Exact for launch functions that read one integer variable of up to 16,384 values, which is how most kernels are
    declared; for functions of several it walks each exhaustively and combines critical values (``points_over``).
    """
    space = launch_space.space if space is None else space
    found: dict[str, _Found] = {}
    done: dict[_Walked, frozenset[str]] = {}
    points = 0
    for kind in launch_space.kinds:
        for op in _ops(launch_space, kind):
            if op not in done:
                count, keys = _walk(op, space, found)
                points += count
                done[op] = keys
            for key in done[op]:
                found[key].kinds[kind] = None
    return Enumeration(uses={key: what.use(key) for key, what in found.items()}, points=points)


def _walk(op: _Walked, space: StepSpace, found: dict[str, _Found]) -> tuple[int, frozenset[str]]:
    """Ask ``op`` at every point that matters; walk again while that shows further variables that it reads."""
    met: set[str] = set()
    reads: frozenset[str] | None = None
    count = 0
    while reads is None or frozenset(op.reads) != reads:
        reads = frozenset(op.reads)
        for point in points_over(space, reads):
            count += 1
            for key, launch in op.keyed(point):
                met.add(key)
                if key in found:
                    found[key].meet(point)
                else:
                    found[key] = _Found(launch, point)
    return count, frozenset(met)


class _Walked(Protocol):
    """What the walk asks: keys with their launches at a point, and the variables read so far."""

    reads: set[str]

    def keyed(self, point: StepPoint) -> tuple[tuple[str, KeyedLaunch | None], ...]: ...


class _Foreign:
    """One kind of a launch space that is not ours: only its keys are known, and every variable may matter."""

    def __init__(self, launch_space: LaunchSpace, kind: str) -> None:
        self._launch_space = launch_space
        self._kind = kind
        self.reads = set(VARIABLES)

    def keyed(self, point: StepPoint) -> tuple[tuple[str, KeyedLaunch | None], ...]:
        return tuple((key, None) for key in sorted(self._launch_space.keys(self._kind, point)))


def _ops(launch_space: LaunchSpace, kind: str) -> Iterator[_Walked]:
    if isinstance(launch_space, DeclaredLaunchSpace):
        yield from launch_space.ops(kind)
    else:
        yield _Foreign(launch_space, kind)
