"""The op table: the kernel chosen for each op at each shape, bound once at start."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from attrs import evolve, field, frozen

from freetoken.plugin.protocols import LoadedKernel
from freetoken.vocab.ops import OpShape


def _copied(kernels: Mapping[OpShape, LoadedKernel]) -> Mapping[OpShape, LoadedKernel]:
    return dict(kernels)


@frozen(eq=False)
class OpTable:
    """Implements ``plugin.protocols.Ops`` over kernels that are loaded already."""

    kernels: Mapping[OpShape, LoadedKernel] = field(converter=_copied)

    def bind(self, shape: OpShape) -> Callable[..., Any]:
        """The function to call for ``shape``.

        A shape without ``formats`` finds the one kernel that serves its sizes, whatever formats the planner filled in.
        ``KeyError`` where the family did not declare the shape in ``op_shapes``, or where kernels for several formats
        serve the same sizes, so that only a shape with ``formats`` can tell them apart.
        """
        return self.kernel(shape).call

    def kernel(self, shape: OpShape) -> LoadedKernel:
        """The whole kernel, with its ``pack``; ``KeyError`` as for ``bind``."""
        if shape in self.kernels:
            return self.kernels[shape]
        found = [] if shape.formats else [k for s, k in self.kernels.items() if evolve(s, formats=()) == shape]
        calls = {kernel.call for kernel in found}
        if not calls:
            raise KeyError(self._missing(shape))
        if len(calls) > 1:
            raise KeyError(f"{len(calls)} kernels serve {shape.op} at {shape}: bind it with the formats of its weights")
        return found[0]

    def _missing(self, shape: OpShape) -> str:
        same = [str(known) for known in self.kernels if known.op == shape.op]
        declared = f"declared for this op: {'; '.join(same)}" if same else "the op is not declared at all"
        return f"no kernel was chosen for {shape.op} at {shape}: add that shape to the family's op_shapes ({declared})"
