"""Exact specialisation keys with no GPU: Triton's own binder under a stand-in driver.

Nothing here knows Triton's rules: what specialises and how is asked of ``JITFunction``'s own binder, which only needs a
driver that can name a target. Written for Triton 3.6 to 3.9; the few internals used are gathered in this file.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import Any

from attrs import field, frozen

from freetoken.vocab.errors import PluginError
from freetoken.vocab.hardware import Device
from freetoken.vocab.launch import TensorArg, TritonLaunch

_SWAP = threading.RLock()


class _Recording:
    """How many recorders are open; while any is, every bound launch takes the path that recorders see."""

    def __init__(self) -> None:
        self.open = 0

    def __bool__(self) -> bool:
        return self.open > 0


RECORDING = _Recording()


@frozen
class Target:
    """What Triton compiles for. ``arch`` is the compute capability as one integer, 90 for 9.0."""

    arch: int
    backend: str = "cuda"
    warp_threads: int = 32

    @classmethod
    def of(cls, device: Device) -> Target:
        """The target of a CUDA device. Raises ``PluginError`` for a device that Triton kernels do not run on."""
        if device.kind != "cuda" or not device.arch:
            raise PluginError(
                f"Triton kernels on {device.name}",
                f"a {device.kind} device of compute capability {device.arch} is no target of Triton",
                "declare launches for CUDA devices only",
            )
        return cls(arch=device.arch)

    def gpu_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget(self.backend, self.arch, self.warp_threads)


@frozen
class CompileRequest:
    """All a worker needs to compile one key, as plain picklable data.

    The fields after ``kernel`` are what Triton's binder derived, in the form ``triton.compile`` takes. ``attrs`` and
    ``constants`` are keyed by paths into the parameters.
    """

    key: str
    kernel: str
    target: Target
    signature: Mapping[str, Any] = field(eq=False)
    constants: Mapping[tuple[int, ...], Any] = field(eq=False)
    attrs: Mapping[tuple[int, ...], Any] = field(eq=False)
    options: Mapping[str, Any] = field(eq=False)


class StubDriver:
    """The three questions that Triton's binder asks a driver, answered for ``target`` without a device.

    The device index is a name of our own, so that nothing bound here mixes with the caches of a real device.
    """

    def __init__(self, target: Target) -> None:
        self.target = target
        self.device = f"stub-{target.backend}-{target.arch}"

    def get_current_device(self) -> str:
        return self.device

    def get_current_stream(self, device: object) -> int:
        return 0

    def get_current_target(self) -> Any:
        return self.target.gpu_target()


@contextmanager
def stub_driver(target: Target) -> Iterator[StubDriver]:
    """Make a stand-in the active driver; the one that was active (or none at all) is back afterwards."""
    from triton.runtime.driver import driver

    stub = StubDriver(target)
    with _SWAP:
        before = driver._active
        driver.set_active(stub)
        try:
            yield stub
        finally:
            driver._active = before


class Pointer:
    """A tensor for the binder: a dtype by name and an address, of which only the alignment matters."""

    __slots__ = ("_address", "dtype")

    def __init__(self, dtype: str, address: int = 0) -> None:
        self.dtype = dtype
        self._address = address

    def data_ptr(self) -> int:
        return self._address

    def ptr_range(self) -> int:
        """Only AMD targets ask; 0 is a 32-bit range."""
        return 0


@cache
def _pointer(dtype: str) -> Pointer:
    return Pointer(dtype)


@cache
def resolve(kernel: str) -> Any:
    """``"module:function"`` → the object of that name. Raises ``PluginError`` when there is none."""
    module, _, name = kernel.partition(":")
    try:
        found: Any = import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise PluginError(f"the kernel {kernel!r}", str(error), 'write "module:function" of a @triton.jit') from error
    return found


def jit_function(kernel: str) -> Any:
    """The ``JITFunction`` of that name. Raises ``PluginError`` for anything else, a run-time autotuner included."""
    from triton.runtime.jit import JITFunction

    found = resolve(kernel)
    if not isinstance(found, JITFunction):
        raise PluginError(
            f"the kernel {kernel!r}",
            f"it is a {type(found).__name__}, not a plain @triton.jit function",
            "choose tiles by a pure table of shape and device instead of decorating the kernel",
        )
    return found


def kernel_name(fn: Any) -> str:
    """The name that keys of ``fn`` start with."""
    return f"{fn.fn.__module__}:{fn.fn.__qualname__}"


def launch_options(launch: TritonLaunch) -> dict[str, Any]:
    """The keyword options of a launch, in the one order that both the launch and its key use."""
    return {"num_warps": launch.num_warps, "num_stages": launch.num_stages, **dict(launch.options)}


def call_arguments(
    fn: Any, launch: TritonLaunch, tensor: Callable[[TensorArg], Any]
) -> tuple[list[Any], list[tuple[int, TensorArg]]]:
    """All parameters of ``fn`` in signature order, and where the tensors lie. ``tensor`` makes the stand-ins.

    Raises ``PluginError`` when the launch names a parameter that the kernel does not have, or leaves one out.
    """
    given: dict[str, Any] = dict(launch.args)
    given.update(launch.constexprs)
    values: list[Any] = []
    tensors: list[tuple[int, TensorArg]] = []
    for index, param in enumerate(fn.params):
        if param.name in given:
            value = given.pop(param.name)
        elif param.has_default:
            value = param.default
        else:
            raise PluginError(f"a launch of {launch.kernel}", f"it leaves out the parameter {param.name!r}")
        if isinstance(value, TensorArg):
            tensors.append((index, value))
            value = tensor(value)
        values.append(value)
    if given:
        raise PluginError(f"a launch of {launch.kernel}", f"the kernel has no parameter {', '.join(map(repr, given))}")
    order = [name for name, value in launch.args if isinstance(value, TensorArg)]
    if order != [fn.params[index].name for index, _ in tensors]:
        raise PluginError(f"a launch of {launch.kernel}", "its arguments are not in the order of the signature")
    return values, tensors


class Binder:
    """One kernel's binder for one target: argument values in, Triton's own key out. Compiles nothing."""

    def __init__(self, fn: Any, target: Target) -> None:
        from triton.runtime import jit

        self._fn = fn
        self._target = target
        self._name = kernel_name(fn)
        with stub_driver(target):
            _, self._key_cache, _, self._backend, self._binder = fn.create_binder()
        self._compute_key = jit.compute_cache_key

    def _options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        from triton import knobs

        # JITFunction.run adds these two to every launch before it binds.
        merged = dict(options)
        merged["debug"] = merged.get("debug", self._fn.debug) or knobs.runtime.debug
        merged["instrumentation_mode"] = knobs.compilation.instrumentation_mode
        return merged

    def key(self, values: list[Any], options: Mapping[str, Any]) -> str:
        """The key of a launch with these argument values: ``module:function|`` and Triton's in-memory key.

        ``options`` are the keyword arguments of the launch; some may name parameters, as Triton allows.
        """
        _, specialisation, rest = self._binder(*values, **self._options(options))
        return f"{self._name}|{self._compute_key(self._key_cache, specialisation, rest)}"

    def classes(self, values: list[Any], options: Mapping[str, Any]) -> dict[str, object]:
        """What the key says of each run-time parameter: type and class, as ``i32 D`` for a multiple of 16."""
        _, specialisation, _ = self._binder(*values, **self._options(options))
        named = zip(self._fn.params, specialisation, strict=True)
        return {p.name: " ".join(str(part) for part in what if part) for p, what in named if not p.is_constexpr}

    def request(self, values: list[Any], options: Mapping[str, Any]) -> CompileRequest:
        """What a worker needs to compile that key."""
        merged = self._options(options)
        bound, specialisation, rest = self._binder(*values, **merged)
        key = f"{self._name}|{self._compute_key(self._key_cache, specialisation, rest)}"
        parsed, signature, constants, attrs = self._fn._pack_args(self._backend, merged, bound, specialisation, rest)
        return CompileRequest(
            key=key,
            kernel=self._name,
            target=self._target,
            signature=signature,
            constants=constants,
            attrs=attrs,
            options=dict(parsed.__dict__),
        )


@cache
def binder(fn: Any, target: Target) -> Binder:
    """The binder of ``fn`` for ``target``, made once."""
    return Binder(fn, target)


def specialisation_key(launch: TritonLaunch, target: Target) -> str:
    """The exact key under which Triton would look ``launch`` up on ``target``, prefixed with the kernel's name."""
    fn = jit_function(launch.kernel)
    values, _ = call_arguments(fn, launch, lambda arg: _pointer(arg.dtype))
    return binder(fn, target).key(values, launch_options(launch))


def argument_classes(launch: TritonLaunch, target: Target) -> dict[str, object]:
    """Parameter name → what the key of ``launch`` says of it, compile-time parameters aside."""
    fn = jit_function(launch.kernel)
    values, _ = call_arguments(fn, launch, lambda arg: _pointer(arg.dtype))
    return binder(fn, target).classes(values, launch_options(launch))


def compile_request(launch: TritonLaunch, target: Target) -> CompileRequest:
    """What it takes to compile ``launch`` for ``target`` in another process."""
    fn = jit_function(launch.kernel)
    values, _ = call_arguments(fn, launch, lambda arg: _pointer(arg.dtype))
    return binder(fn, target).request(values, launch_options(launch))


@frozen
class RecordedLaunch:
    """A launch that a call site made while recording: its key and its grid."""

    kernel: str
    key: str
    grid: tuple[int, ...] = field(eq=False)


@contextmanager
def record_launches(target: Target) -> Iterator[list[RecordedLaunch]]:
    """Inside, every ``kernel[grid](…)`` is recorded with its exact key instead of running; nothing is compiled.

    Call sites may hold CPU, meta or fake tensors: their dtypes and alignment are what the key is made of. Sees every
    launch of a ``@triton.jit`` function, bound through ``triton_launch`` or not. For tests and planning only: results
    of the recorded kernels stay unwritten.
    """
    from triton.runtime.jit import JITFunction

    records: list[RecordedLaunch] = []

    def run(self: Any, *args: Any, grid: Any, warmup: bool = False, **keywords: Any) -> None:  # noqa: ARG001
        pointers = [_stand_in(value) for value in args]
        named = {name: _stand_in(value) for name, value in keywords.items()}
        key = binder(self, target).key(pointers, named)
        size = grid(_bound(self, args, keywords)) if callable(grid) else grid
        records.append(RecordedLaunch(kernel=kernel_name(self), key=key, grid=tuple(size)))

    with _SWAP:
        original = JITFunction.run
        JITFunction.run = run
        RECORDING.open += 1
        try:
            yield records
        finally:
            RECORDING.open -= 1
            JITFunction.run = original


def _bound(fn: Any, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> dict[str, Any]:
    known = {name: value for name, value in keywords.items() if name in fn.arg_names}
    bound = fn.signature.bind(*args, **known)
    bound.apply_defaults()
    return dict(bound.arguments)


def _stand_in(value: Any) -> Any:
    if not hasattr(value, "data_ptr"):
        return value
    return Pointer(str(value.dtype).rpartition(".")[2], base_offset_bytes(value) % 16)


def base_offset_bytes(tensor: Any) -> int:
    """The base address, or for a fake or meta tensor its offset into an allocation that is aligned by contract."""
    if tensor.is_meta or type(tensor).__name__ == "FakeTensor":
        return int(tensor.storage_offset()) * int(tensor.element_size())
    return int(tensor.data_ptr())
