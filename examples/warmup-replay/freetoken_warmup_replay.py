"""The warmup policy ``replay``: warms the prompt lengths of recorded traffic, the most frequent first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from attrs import frozen

from freetoken import hookimpl, option
from freetoken.plugin.specs import OptionsSpec, WarmupPolicySpec
from freetoken.vocab.errors import UsageError
from freetoken.vocab.launch import LaunchSpace, StepPoint
from freetoken.vocab.plan import Plan
from freetoken.vocab.warmup import Capture, CompileKeys, Forward, Known, LoadKeys, WarmupStep


@frozen
class ReplayOptions:
    """Becomes ``--warmup-replay-file``, ``FREETOKEN_WARMUP_REPLAY_FILE``, and a key of ``freetoken.toml``."""

    file: str | None = option(None, help="file with the prompt lengths of recorded traffic, one a line")
    most: int = option(20, help="how many different lengths are warmed, the most frequent first", low=1)


def read_lengths(file: str) -> tuple[int, ...]:
    """The lengths of ``file``, one a line. Raises ``UsageError`` naming the line that is none."""
    try:
        lines = Path(file).read_text(encoding="utf-8").split()
    except OSError as error:
        raise UsageError(f"--warmup-replay-file {file}", f"it cannot be read: {error.strerror}") from None
    for number, line in enumerate(lines, 1):
        if not line.isdecimal() or int(line) < 1:
            raise UsageError(f"--warmup-replay-file {file}", f"line {number} is no length of a prompt: {line!r}")
    return tuple(int(line) for line in lines)


@frozen
class Replay:
    """Pure: what was recorded is read before, and nothing is looked at here but the arguments."""

    lengths: tuple[int, ...]
    most: int

    def steps(self, plan: Plan, launch_space: LaunchSpace, known: Known) -> Iterable[WarmupStep]:
        points = self.points(launch_space)
        if not points:
            return
        keys = {key for point in points for kind in launch_space.kinds for key in launch_space.keys(kind, point)}
        cold = tuple(sorted(keys - known.compiled))
        if cold:
            yield CompileKeys(cold, workers=plan.hardware.cores, because=known.because)
        if keys:
            yield LoadKeys(tuple(sorted(keys)), because="the kernels of recorded lengths")
        yield Capture(because="modules are loaded")
        for point in points:
            yield Forward(point, because="a recorded length")

    def points(self, launch_space: LaunchSpace) -> list[StepPoint]:
        """One step for each of the most frequent lengths, and the decode step after it."""
        space = launch_space.space
        found: dict[StepPoint, None] = {}
        for length, _ in Counter(self.lengths).most_common(self.most):
            context = min(length, space.context.high - 1)
            chunk = min(context, space.chunk.high, space.tokens.high)  # of a longer prompt, its last full chunk
            found[StepPoint(chunk, 1, chunk, context, 1, decode=False)] = None
            found[StepPoint(1, 1, 1, context + 1, 1, decode=True)] = None
        return list(found)


def create(options: object) -> Replay:
    """Called once, at start: the place for everything that is not pure."""
    assert isinstance(options, ReplayOptions)
    if options.file is None:
        raise UsageError("--warmup-policy replay", "it needs recorded lengths", "add --warmup-replay-file FILE")
    return Replay(read_lengths(options.file), options.most)


@hookimpl
def freetoken_warmup_policies() -> list[WarmupPolicySpec]:
    return [
        WarmupPolicySpec(
            name="replay", summary="warm the prompt lengths of recorded traffic", create=create, options=ReplayOptions
        )
    ]


@hookimpl
def freetoken_options() -> list[OptionsSpec]:
    return [OptionsSpec(owner="warmup-replay", cls=ReplayOptions, summary="the warmup policy replay")]
