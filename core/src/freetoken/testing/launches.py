"""The conformance suite for kernels' launch spaces: what is declared is what is launched, and it can all be warmed.

Subclass ``LaunchSpaceConformance`` in a plugin's tests. The oracle is a trace: the kernel's real call site, run on CPU
or meta tensors under the stub driver, with every launch recorded.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from freetoken.ops.triton_stub import RecordedLaunch, Target, record_launches
from freetoken.vocab.hardware import Device
from freetoken.vocab.launch import Launches, Range, StepPoint, StepSpace
from freetoken.vocab.ops import OpShape
from freetoken.warmup.enumerate import enumerate_keys
from freetoken.warmup.launch_space import DeclaredLaunchSpace, build_launch_space
from freetoken.warmup.lint import lint

__all__ = ["DEVICES", "LaunchSpaceConformance", "RecordedLaunch", "record_launches", "small_space"]

_CARDS = {
    "a100": ("A100", (8, 0), 108, 166_912),
    "rtx3090": ("RTX 3090", (8, 6), 82, 101_376),
    "rtx4090": ("RTX 4090", (8, 9), 128, 101_376),
    "h200": ("H200", (9, 0), 132, 232_448),
    "rtx5090": ("RTX 5090", (12, 0), 170, 101_376),
}

DEVICES = {
    short: Device("cuda", 0, name, capability, multiprocessors, shared)
    for short, (name, capability, multiprocessors, shared) in _CARDS.items()
}
"""Cards that people own, with the shared memory one block may take."""


def small_space(max_tokens: int = 300, max_sequences: int = 20, max_context: int = 1000) -> StepSpace:
    """A step space that a test walks in a second."""
    return StepSpace(
        tokens=Range(1, max_tokens),
        sequences=Range(1, max_sequences),
        chunk=Range(1, max_tokens),
        prefix=Range(0, max_context - 1),
        context=Range(1, max_context),
        decode_sequences=Range(1, max_sequences),
    )


class LaunchSpaceConformance:
    """Give the op's shapes, its launch function, and its real call site."""

    device: Device = DEVICES["h200"]

    @abstractmethod
    def shapes(self) -> Sequence[OpShape]:
        """The shapes to test at."""

    @abstractmethod
    def launches(self) -> Launches:
        """The declared launch function."""

    @abstractmethod
    def call(self, point: StepPoint, shape: OpShape, device: Device) -> None:
        """Run the op as the engine would at ``point``, on CPU or meta tensors; launches are recorded around it."""

    def space(self) -> StepSpace:
        """The step space to walk."""
        return small_space()

    def points(self) -> Sequence[StepPoint]:
        """Points at which the call site is run, besides one for every declared key."""
        return ()

    def declared(self, shape: OpShape) -> DeclaredLaunchSpace:
        return build_launch_space(self.space(), [("part", ((shape, self.launches()),))], self.device)

    def test_recorded_keys_are_declared_and_declared_keys_are_recorded(self) -> None:
        for shape in self.shapes():
            declared = self.declared(shape)
            uses = enumerate_keys(declared).uses.values()
            points = dict.fromkeys([*(point for use in uses for point in use.witnesses), *self.points()])
            recorded: set[str] = set()
            for point in points:
                with record_launches(Target.of(self.device)) as records:
                    self.call(point, shape, self.device)
                keys = {record.key for record in records}
                expected = declared.keys("part", point)
                assert keys == expected, f"at {point}: launched {keys - expected}, declared {expected - keys}"
                grids = [record.grid for record in records]
                at = [launch.grid for launch in declared.launches("part", point) if hasattr(launch, "grid")]
                assert grids == at, f"at {point}: grids {grids}, declared {at}"
                recorded |= keys
            assert recorded == {use.key for use in uses}

    def test_the_space_passes_the_lint(self) -> None:
        for shape in self.shapes():
            findings = lint(self.declared(shape))
            assert not findings, "\n".join(map(str, findings))

    def test_launches_are_pure(self) -> None:
        function = self.launches()
        for shape in self.shapes():
            for use in enumerate_keys(self.declared(shape)).uses.values():
                for point in use.witnesses:
                    first, again = function(point, shape, self.device), function(point, shape, self.device)
                    assert first == again
                    assert [getattr(x, "grid", None) for x in first] == [getattr(x, "grid", None) for x in again]
