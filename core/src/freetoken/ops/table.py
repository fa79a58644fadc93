"""The op table: the kernel chosen for each op at each shape, bound once at start."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from attrs import field, frozen

from freetoken.plugin.protocols import LoadedKernel
from freetoken.vocab.ops import OpShape


@frozen(eq=False)
class OpTable:
    """Implements ``plugin.protocols.Ops`` over kernels that are loaded already."""

    kernels: Mapping[OpShape, LoadedKernel] = field(converter=dict)

    def bind(self, shape: OpShape) -> Callable[..., Any]:
        """The function to call for ``shape``; ``KeyError`` where the family did not declare it in ``op_shapes``."""
        return self.kernel(shape).call

    def kernel(self, shape: OpShape) -> LoadedKernel:
        """The whole kernel, with its ``pack``; ``KeyError`` as for ``bind``."""
        try:
            return self.kernels[shape]
        except KeyError:
            raise KeyError(self._missing(shape)) from None

    def _missing(self, shape: OpShape) -> str:
        same = [str(known) for known in self.kernels if known.op == shape.op]
        declared = f"declared for this op: {'; '.join(same)}" if same else "the op is not declared at all"
        return f"no kernel was chosen for {shape.op} at {shape}: add that shape to the family's op_shapes ({declared})"
