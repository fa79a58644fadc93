"""Launching what a launch space declares: a ``TritonLaunch`` bound to its kernel, called with tensors.

The run-time launch goes through the same value that enumeration sees, so that what is declared is what runs. Importing
this file imports neither triton nor torch.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from freetoken.ops.triton_stub import RECORDING, base_offset_bytes, call_arguments, launch_options, resolve
from freetoken.vocab.dtypes import itemsize_bytes
from freetoken.vocab.errors import EngineError, PluginError
from freetoken.vocab.launch import TritonLaunch

if TYPE_CHECKING:
    from torch import Tensor

ALIGN_BYTES = 16


class BoundLaunch:
    """A launch ready to be called with its tensors, in the order of its ``TensorArg``s.

    The first call asserts the alignment contract and goes through Triton's ordinary launch. Later calls go straight to
    the compiled kernel, after checking of every tensor what the key depends on: its dtype and its base address.
    """

    __slots__ = ("_checked", "_compiled", "_dtypes", "_fn", "_options", "_run", "_slots", "_values", "launch")

    def __init__(self, launch: TritonLaunch) -> None:
        self.launch = launch
        self._fn = resolve(launch.kernel)
        if not hasattr(self._fn, "params"):  # an interpreted function has no parameters of Triton's own
            self._fn = _with_params(self._fn)
        self._values, tensors = call_arguments(self._fn, launch, lambda _: None)
        self._slots = [index for index, _ in tensors]
        self._dtypes: list[Any] = [arg.dtype for _, arg in tensors]
        self._options = launch_options(launch)
        self._run: Callable[..., None] | None = None
        self._compiled: Any = None
        self._checked = False

    def __call__(self, *tensors: Tensor) -> None:
        """Launch on the current stream. Raises ``EngineError`` for a tensor that breaks the contract."""
        values = self._values.copy()
        run = self._run
        if run is None or RECORDING or self._fn.pre_run_hooks:
            return self._first(values, tensors)
        for slot, dtype, tensor in zip(self._slots, self._dtypes, tensors, strict=True):
            if tensor.data_ptr() & 15 or tensor.dtype is not dtype:
                _refuse(self.launch, self._fn, slot, dtype, tensor)
            values[slot] = tensor
        run(*values)
        return None

    def _first(self, values: list[Any], tensors: tuple[Tensor, ...]) -> None:
        if len(tensors) != len(self._slots):
            raise EngineError(
                f"a launch of {self.launch.kernel}", f"it takes {len(self._slots)} tensors and got {len(tensors)}"
            )
        if not self._checked:
            self._dtypes = [_torch_dtype(dtype) for dtype in self._dtypes]
            self._checked = True
        for slot, dtype, tensor in zip(self._slots, self._dtypes, tensors, strict=True):
            if tensor.dtype is not dtype or base_offset_bytes(tensor) % ALIGN_BYTES or not rows_aligned(tensor):
                _refuse(self.launch, self._fn, slot, dtype, tensor)
            values[slot] = tensor
        compiled = self._fn[self.launch.grid](*values, **self._options)
        # A GPU launch returns the compiled kernel; the interpreter and the recorder return nothing.
        if compiled is not None and not RECORDING and type(compiled).__name__ == "CompiledKernel":
            self._compiled = compiled  # held: newer Tritons unload a kernel that nobody holds
            self._run = compiled[self.launch.grid]


def bind(launch: TritonLaunch) -> BoundLaunch:
    """Resolve the kernel of ``launch`` and lay its arguments out; call the result with the tensors, in order."""
    return BoundLaunch(launch)


def memoised(make: Callable[..., TritonLaunch], size: int = 4096) -> Callable[..., BoundLaunch]:
    """``make(*ints)`` bound, remembered by its arguments: the layers of one step share one bound launch.

    ``make`` must be pure and its arguments hashable.
    """

    @lru_cache(maxsize=size)
    def bound(*arguments: Hashable) -> BoundLaunch:
        return BoundLaunch(make(*arguments))

    return bound


def rows_aligned(tensor: Tensor) -> bool:
    """Whether a strided view's rows start at multiples of 16 bytes. Contiguous tensors are addressed flat."""
    if tensor.ndim < 2 or tensor.is_contiguous():
        return True
    size = tensor.element_size()
    return all(
        stride * size % ALIGN_BYTES == 0
        for stride, n in zip(tensor.stride()[:-1], tensor.shape[:-1], strict=True)
        if n > 1
    )


def _torch_dtype(name: str) -> Any:
    import torch

    itemsize_bytes(name)  # a KeyError here is a dtype outside the vocabulary
    return getattr(torch, name)


def _refuse(launch: TritonLaunch, fn: Any, slot: int, dtype: Any, tensor: Tensor) -> None:
    name = fn.params[slot].name
    if tensor.dtype is not dtype:
        found = f"{name} is {tensor.dtype}; the launch space declares {dtype}"
    else:
        found = (
            f"{name} of shape {tuple(tensor.shape)}, strides {tuple(tensor.stride())}, starts "
            f"{base_offset_bytes(tensor) % ALIGN_BYTES} bytes past a multiple of {ALIGN_BYTES}, or its rows do not lie "
            f"at multiples of {ALIGN_BYTES} bytes"
        )
    raise EngineError(f"a launch of {launch.kernel}", found, "bring the tensor as declared, aligned")


class _Interpreted:
    """An interpreted function with the parameter list a launch is laid out by."""

    def __init__(self, fn: Any) -> None:
        import inspect

        from triton.runtime.jit import KernelParam

        signature = inspect.signature(fn.fn)
        self.params = [KernelParam(i, p, False, False) for i, p in enumerate(signature.parameters.values())]
        self.pre_run_hooks: list[Any] = []
        self._fn = fn

    def __getitem__(self, grid: Any) -> Any:
        return self._fn[grid]


def _with_params(fn: Any) -> Any:
    if type(fn).__name__ != "InterpretedFunction":
        raise PluginError(
            f"the kernel {fn!r}",
            f"it is a {type(fn).__name__}, not a plain @triton.jit function",
            "choose tiles by a pure table of shape and device instead of decorating the kernel",
        )
    return _Interpreted(fn)
