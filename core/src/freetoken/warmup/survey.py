"""All there is to warm in a launch space, found once: every key with its launch, and every library with its row counts.

Walking a large space takes seconds, so a survey is plain data that a manifest can keep and a child process can make.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from weakref import WeakKeyDictionary

from attrs import field, frozen

from freetoken.ops.triton_stub import CompileRequest, Target, compile_request
from freetoken.vocab.hardware import Device
from freetoken.vocab.launch import Launch, LaunchSpace, LibraryCall, NativeModule, StepPoint, TritonLaunch
from freetoken.warmup.enumerate import Enumeration, KeyUse, enumerate_keys
from freetoken.warmup.launch_space import DeclaredLaunchSpace, OpLaunches
from freetoken.warmup.points import domain, points_over

COUNTS = "counts"
"""A launch function may say in this attribute which variable its library calls count rows by; ``tokens`` by default."""


def _tupled(counts: Sequence[int]) -> tuple[int, ...]:
    """A survey kept as JSON brings lists."""
    return tuple(counts)


@frozen
class LibraryUse:
    """One library call: the rows it can get, low to high, and a point of one kind at which it is made.

    ``counts`` names the variable of the step that is its number of rows. ``row_counts`` are the only numbers of rows
    the library is called with, where its kernel pads; empty means any.
    """

    name: str
    kind: str
    low: int
    high: int
    point: StepPoint
    counts: str = "tokens"
    row_counts: tuple[int, ...] = field(default=(), converter=_tupled)


@frozen
class Survey:
    """Keys by name, libraries in order of name."""

    uses: Mapping[str, KeyUse]
    libraries: tuple[LibraryUse, ...] = ()
    points: int = field(default=0, eq=False)  # at how many points launch functions were asked

    @property
    def keys(self) -> frozenset[str]:
        return frozenset(self.uses)

    def reachable(self, max_tokens: int) -> frozenset[str]:
        """The keys that some step of at most ``max_tokens`` tokens needs."""
        return frozenset(key for key, use in self.uses.items() if use.witnesses[0].tokens <= max_tokens)

    def requests(self, device: Device, keys: Iterable[str]) -> tuple[CompileRequest, ...]:
        """What workers need to compile those of ``keys`` that are Triton's, in the order given."""
        target = Target.of(device)
        launches = (self.uses[key].launch for key in keys)
        return tuple(compile_request(launch, target) for launch in launches if isinstance(launch, TritonLaunch))


_MADE: WeakKeyDictionary[DeclaredLaunchSpace, Survey | Callable[[], Survey]] = WeakKeyDictionary()


def survey_of(launch_space: LaunchSpace) -> Survey:
    """The survey of ``launch_space``; of our own class it is made on first asking, and policy and core share it."""
    if not isinstance(launch_space, DeclaredLaunchSpace):
        return survey(launch_space)
    found = _MADE.get(launch_space)
    if not isinstance(found, Survey):
        found = _MADE[launch_space] = survey(launch_space) if found is None else found()
    return found


def made_survey(launch_space: DeclaredLaunchSpace) -> Survey | None:
    """The survey, if anybody has asked for it yet."""
    found = _MADE.get(launch_space)
    return found if isinstance(found, Survey) else None


def remember(launch_space: DeclaredLaunchSpace, known: Survey | Callable[[], Survey]) -> None:
    """Let ``survey_of`` answer with a survey made elsewhere: in an earlier start, or by what makes it when asked."""
    _MADE[launch_space] = known


def survey(launch_space: LaunchSpace) -> Survey:
    """Walk the whole space in this process."""
    found = enumerate_keys(launch_space)
    return with_libraries(launch_space, found)


def with_libraries(launch_space: LaunchSpace, found: Enumeration) -> Survey:
    """An enumeration with the libraries that were met while it was made."""
    met: dict[str, LibraryUse] = {}
    for kind in launch_space.kinds:
        uses = (
            [use for op in launch_space.ops(kind) for use in op_libraries(op, kind, launch_space)]
            if isinstance(launch_space, DeclaredLaunchSpace)
            else _foreign_libraries(launch_space, kind)
        )
        for use in uses:
            known = met.get(use.name)
            met[use.name] = use if known is None else wider(known, use)
    return Survey(found.uses, tuple(met[name] for name in sorted(met)), found.points)


def wider(one: LibraryUse, other: LibraryUse) -> LibraryUse:
    """One use that gets the rows of both."""
    low, high = min(one.low, other.low), max(one.high, other.high)
    return LibraryUse(one.name, one.kind, low, high, one.point, one.counts, one.row_counts)


def op_libraries(op: OpLaunches, kind: str, launch_space: DeclaredLaunchSpace) -> list[LibraryUse]:
    """The libraries among the answers that walking ``op`` brought, with the rows they can get."""
    counts = str(getattr(op.function, COUNTS, "tokens"))
    whole = domain(launch_space.space, counts)
    found: dict[str, tuple[int, int]] = {}
    row_counts: dict[str, tuple[int, ...]] = {}
    for values, launches in op.evaluated():
        rows = (values[counts], values[counts]) if counts in values else (whole.low, whole.high)
        for launch in launches:
            if isinstance(launch, LibraryCall):
                low, high = found.get(launch.name, rows)
                found[launch.name] = (min(low, rows[0]), max(high, rows[1]))
                row_counts[launch.name] = launch.row_counts
    points = points_over(launch_space.space, op.reads) if found else ()
    uses = []
    for name, (low, high) in found.items():
        point = next(p for p in points if any(_is(launch, name) for launch in op.launches(p)))
        uses.append(LibraryUse(name, kind, low, high, point, counts, row_counts[name]))
    return uses


def _foreign_libraries(launch_space: LaunchSpace, kind: str) -> list[LibraryUse]:
    found: dict[str, LibraryUse] = {}
    for point in points_over(launch_space.space, ("tokens",)):
        for launch in launch_space.launches(kind, point):
            if isinstance(launch, LibraryCall):
                use = LibraryUse(launch.name, kind, point.tokens, point.tokens, point, row_counts=launch.row_counts)
                found[launch.name] = wider(found[launch.name], use) if launch.name in found else use
    return list(found.values())


def library_call(launch_space: LaunchSpace, use: LibraryUse) -> LibraryCall:
    """The call itself, asked of the launch space anew. Raises ``KeyError`` when it is not made there any more."""
    for launch in launch_space.launches(use.kind, use.point):
        if _is(launch, use.name):
            assert isinstance(launch, LibraryCall)
            return launch
    raise KeyError(use.name)


def native_module(launch_space: LaunchSpace, use: KeyUse) -> NativeModule:
    """The native module behind a key, asked of the launch space where a survey made elsewhere could not bring it."""
    if isinstance(use.launch, NativeModule):
        return use.launch
    from freetoken.warmup.keys import native_key

    for launch in launch_space.launches(use.kinds[0], use.witnesses[0]):
        if isinstance(launch, NativeModule) and native_key(launch) == use.key:
            return launch
    raise KeyError(use.key)


def _is(launch: Launch, name: str) -> bool:
    return isinstance(launch, LibraryCall) and launch.name == name
