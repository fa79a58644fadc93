"""What is wrong with a launch space: kernels whose keys cannot all be warmed, or would be too many."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from itertools import product

from attrs import frozen

from freetoken.ops.triton_stub import Target, argument_classes, resolve
from freetoken.vocab.launch import StepPoint, StepSpace, TritonLaunch
from freetoken.warmup.launch_space import DeclaredLaunchSpace, OpLaunches
from freetoken.warmup.points import INTEGERS, domain, points_over, settle

MAX_CONSTEXPR_VALUES = 8

CONSTEXPR = "constexpr"
SPECIALISES = "specialises"
AUTOTUNE = "autotune"
MAXIMUM = "maximum"
RAISES = "raises"
PLAIN = "plain"


@frozen
class Finding:
    """One fault: which rule, which kernel or op, which parameter or variable, and what was seen."""

    rule: str
    where: str
    name: str
    found: str

    def __str__(self) -> str:
        return f"{self.where}: {self.name}: {self.found}"


class _Seen:
    """What one kernel was launched with, over the whole space."""

    def __init__(self) -> None:
        self.constexprs: defaultdict[str, set[object]] = defaultdict(set)
        self.classes: defaultdict[str, dict[object, object]] = defaultdict(dict)

    def note(self, launch: TritonLaunch, target: Target) -> None:
        for name, value in launch.constexprs:
            self.constexprs[name].add(value)
        integers = {n: v for n, v in launch.args if isinstance(v, int) and not isinstance(v, bool)}
        for name, what in argument_classes(launch, target).items():
            if name in integers:
                self.classes[name].setdefault(what, integers[name])


def lint(launch_space: DeclaredLaunchSpace, space: StepSpace | None = None) -> tuple[Finding, ...]:
    """Every fault of the launch space over ``space`` (its own by default), by kernel.

    - ``constexpr``: a compile-time parameter of more than 8 values, each of which is a kernel to compile;
    - ``specialises``: an integer that falls into more than one of Triton's classes, or crosses 2³¹;
    - ``autotune``: a kernel that would choose its tiles by timing them in somebody's request;
    - ``plain``: a compile-time value that another process cannot be sent;
    - ``raises``: a launch function that has no answer for a step that can come;
    - ``maximum``: a launch function that fails or launches nothing at the top of a range, though it does just below.
    """
    space = launch_space.space if space is None else space
    target = Target.of(launch_space.device)
    findings: dict[Finding, None] = {}
    for op in dict.fromkeys(op for kind in launch_space.kinds for op in launch_space.ops(kind)):
        findings.update(dict.fromkeys(_op_faults(op, space, target)))
    return tuple(sorted(findings, key=lambda finding: (finding.where, finding.name, finding.rule)))


def _op_faults(op: OpLaunches, space: StepSpace, target: Target) -> Iterable[Finding]:
    """The faults of one op at one shape: what differs between shapes is fixed by the model, not by the step."""
    kernels: defaultdict[str, _Seen] = defaultdict(_Seen)
    noted: set[TritonLaunch] = set()
    yield from _maximum(op, space)
    try:
        for launch in _launches(op, space):
            if launch in noted:
                continue
            noted.add(launch)
            kind = type(resolve(launch.kernel)).__name__
            if kind == "JITFunction":
                kernels[launch.kernel].note(launch, target)
            else:
                yield Finding(AUTOTUNE, launch.kernel, kind, "not a plain @triton.jit function; use a table of tiles")
    except _RaisedAt as raised:
        yield Finding(RAISES, op.shape.op, type(raised.cause).__name__, f"{raised.cause} at {raised.point}")
    for kernel in sorted(kernels):
        yield from _faults(kernel, kernels[kernel])


class _RaisedAt(Exception):
    def __init__(self, cause: Exception, point: StepPoint) -> None:
        super().__init__(cause)
        self.cause = cause
        self.point = point


def _launches(op: OpLaunches, space: StepSpace) -> Iterable[TritonLaunch]:
    reads: frozenset[str] | None = None
    while reads is None or reads != frozenset(op.reads):
        reads = frozenset(op.reads)
        for point in points_over(space, reads):
            try:
                launches = op.launches(point)
            except Exception as error:
                raise _RaisedAt(error, point) from error
            yield from (launch for launch in launches if isinstance(launch, TritonLaunch))


def _faults(kernel: str, seen: _Seen) -> Iterable[Finding]:
    for name, values in seen.constexprs.items():
        if len(values) > MAX_CONSTEXPR_VALUES:
            yield Finding(
                CONSTEXPR, kernel, name,
                f"{len(values)} values over the space ({_some(values)}); bucket it or pass it at run time",
            )  # fmt: skip
        strange = [v for v in values if not isinstance(v, bool | int | float | str | None)]
        if strange:
            yield Finding(PLAIN, kernel, name, f"{strange[0]!r} is no plain value; pass a number, a string or nothing")
    for name, classes in seen.classes.items():
        if len(classes) > 1:
            examples = ", ".join(f"{value} → {what}" for what, value in classes.items())
            yield Finding(
                SPECIALISES, kernel, name, f"{len(classes)} classes ({examples}); name it in do_not_specialize"
            )


def _some(values: set[object]) -> str:
    shown = sorted(values, key=str)[:4]
    return ", ".join(map(str, shown)) + ", …"


def _maximum(op: OpLaunches, space: StepSpace) -> Iterable[Finding]:
    for name in INTEGERS:
        top = domain(space, name).high
        for decode, route in product((False, True), space.sampler_routes):
            at, below = (_count(op, space, name, value, decode, route) for value in (top, top - 1))
            if at == 0 and below:
                yield Finding(MAXIMUM, op.shape.op, name, f"no launches at {top}, though there are some at {top - 1}")
                break


def _count(op: OpLaunches, space: StepSpace, name: str, value: int, decode: bool, route: str) -> int | None:
    """How many launches where ``name`` is ``value``, 0 when asking fails; ``None`` where no step has that value."""
    point = settle(space, {**dict.fromkeys(INTEGERS, -1), name: value}, name, decode, route)
    if point is None:
        return None
    try:
        return len(op.launches(point))
    except Exception:  # the walk reports it as ``raises``
        return 0


def reaches_maximum(points: Iterable[StepPoint], space: StepSpace) -> tuple[Finding, ...]:
    """The rule ``maximum`` for a list of steps: somebody's largest step is the one most likely to be sent."""
    most = max((point.tokens for point in points), default=0)
    if most >= space.tokens.high:
        return ()
    return (Finding(MAXIMUM, "steps", "tokens", f"the largest step has {most} tokens; {space.tokens.high} can come"),)
