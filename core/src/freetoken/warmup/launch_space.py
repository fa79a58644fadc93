"""The launch space of one plan: what every part of the model can launch, over every step the engine can take.

Launch functions are pure, so their answers are remembered by the variables they really read: a function that looks at
``tokens`` alone is evaluated once a token count, whatever else varies.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any

from freetoken.ops.triton_stub import Target, specialisation_key
from freetoken.vocab.errors import PluginError
from freetoken.vocab.hardware import Device
from freetoken.vocab.launch import Launch, Launches, LaunchSpace, NativeModule, StepPoint, StepSpace, TritonLaunch
from freetoken.vocab.model_spec import AttentionGroup
from freetoken.vocab.ops import OpShape
from freetoken.warmup.keys import native_key
from freetoken.warmup.points import VARIABLES, points_over

Part = tuple[str, tuple[tuple[OpShape, Launches | None], ...]]
"""A part of the model (a layer, the embedding, the head) and its ops with their kernels' launch functions, in order."""

KeyedLaunch = TritonLaunch | NativeModule
"""A launch that has a key; library calls have none."""

_READ = frozenset(VARIABLES)


class _Watched(StepPoint):
    """A point that notes which of its variables are read, in order of first reading."""

    __slots__ = ("reads",)

    def __getattribute__(self, name: str) -> Any:
        if name in _READ:
            reads = object.__getattribute__(self, "reads")
            if name not in reads:
                reads.append(name)
        return object.__getattribute__(self, name)


def _watched(point: StepPoint) -> _Watched:
    copy = _Watched.__new__(_Watched)
    object.__setattr__(copy, "reads", [])
    for name in VARIABLES:
        object.__setattr__(copy, name, getattr(point, name))
    return copy


class KeyCache:
    """Specialisation keys by launch: the binder is asked once for launches that differ in their grid alone."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._target: Target | None = None
        self._known: dict[TritonLaunch, str] = {}

    def key(self, launch: KeyedLaunch) -> str:
        """The key of one launch."""
        if isinstance(launch, NativeModule):
            return native_key(launch)
        found = self._known.get(launch)
        if found is None:
            self._target = self._target or Target.of(self._device)
            found = self._known[launch] = specialisation_key(launch, self._target)
        return found


class _Leaf:
    __slots__ = ("keyed", "launches")

    def __init__(self, launches: tuple[Launch, ...]) -> None:
        self.launches = launches
        self.keyed: tuple[tuple[str, KeyedLaunch], ...] | None = None


class _Branch:
    __slots__ = ("children", "variable")

    def __init__(self, variable: str) -> None:
        self.variable = variable
        self.children: dict[object, _Branch | _Leaf] = {}


class OpLaunches:
    """One op's launch function at one shape and device, remembered by what it reads."""

    def __init__(self, shape: OpShape, function: Launches, device: Device, keys: KeyCache) -> None:
        self.shape = shape
        self.function = function
        self.reads: set[str] = set()
        self._device = device
        self._keys = keys
        self._root: _Branch | _Leaf | None = None

    def launches(self, point: StepPoint) -> tuple[Launch, ...]:
        """The op's launches at ``point``."""
        return self._leaf(point).launches

    def keyed(self, point: StepPoint) -> tuple[tuple[str, KeyedLaunch], ...]:
        """Those launches that have a key, each with it."""
        leaf = self._leaf(point)
        if leaf.keyed is None:
            keyed = (launch for launch in leaf.launches if isinstance(launch, KeyedLaunch))
            leaf.keyed = tuple((self._keys.key(launch), launch) for launch in keyed)
        return leaf.keyed

    def evaluated(self) -> Iterator[tuple[Mapping[str, Any], tuple[Launch, ...]]]:
        """Every answer of the launch function so far, with the values of the variables that it read for it."""
        stack: list[tuple[dict[str, Any], _Branch | _Leaf]] = [] if self._root is None else [({}, self._root)]
        while stack:
            values, node = stack.pop()
            if isinstance(node, _Leaf):
                yield values, node.launches
            else:
                stack += [({**values, node.variable: value}, child) for value, child in node.children.items()]

    def _leaf(self, point: StepPoint) -> _Leaf:
        node = self._root
        while isinstance(node, _Branch):
            node = node.children.get(getattr(point, node.variable))
        return self._evaluate(point) if node is None else node

    def _evaluate(self, point: StepPoint) -> _Leaf:
        watched = _watched(point)
        leaf = _Leaf(tuple(self.function(watched, self.shape, self._device)))
        reads: list[str] = object.__getattribute__(watched, "reads")
        self.reads.update(reads)
        if not reads:
            self._root = leaf
            return leaf
        if self._root is None:
            self._root = _Branch(reads[0])
        node = self._root
        for variable, following in zip(reads, [*reads[1:], None], strict=True):
            if not isinstance(node, _Branch) or node.variable != variable:
                raise PluginError(
                    f"the launches of {self.shape.op}",
                    f"they read the step's variables in an order that changes between equal calls ({variable})",
                    "make the launch function pure: a function of the point, the shape and the device alone",
                )
            value = getattr(point, variable)
            child = node.children.get(value)
            if child is None:
                child = node.children[value] = leaf if following is None else _Branch(following)
            node = child
        return leaf


class DeclaredLaunchSpace:
    """The ``LaunchSpace`` of a plan, built from the launch functions of the kernels it chose."""

    def __init__(self, space: StepSpace, parts: Iterable[Part], device: Device) -> None:
        self._space = space
        self.device = device
        self._parts = tuple(parts)
        keys = KeyCache(device)
        made: dict[tuple[OpShape, Launches], OpLaunches] = {}
        self._ops: dict[str, tuple[OpLaunches, ...]] = {}
        self._opaque_shapes: dict[str, tuple[OpShape, ...]] = {}
        for name, ops in self._parts:
            if name in self._ops:
                raise ValueError(f"two parts are named {name!r}")
            declared = []
            for shape, function in ops:
                if function is None:
                    continue
                if (shape, function) not in made:
                    made[shape, function] = OpLaunches(shape, function, device, keys)
                declared.append(made[shape, function])
            self._ops[name] = tuple(declared)
            self._opaque_shapes[name] = tuple(shape for shape, function in ops if function is None)

    @property
    def space(self) -> StepSpace:
        return self._space

    @cached_property
    def _groups(self) -> dict[str, tuple[str, ...]]:
        """Kind → its parts. A kind bears the name of its first part."""
        groups: dict[str, list[str]] = {}
        for name, _ in self._parts:
            like = next((kind for kind in groups if self._alike(kind, name)), None)
            groups.setdefault(like or name, []).append(name)
        return {kind: tuple(names) for kind, names in groups.items()}

    def _alike(self, one: str, other: str) -> bool:
        """Whether two parts launch the same at every point, and are the same where they are opaque."""
        if self._opaque_shapes[one] != self._opaque_shapes[other]:
            return False
        a, b = self._ops[one], self._ops[other]
        if a == b:
            return True
        # Parts that differ mostly do so everywhere; walking all of the space is for those that may be alike.
        if any(_all(a, point) != _all(b, point) for point in points_over(self._space, ())):
            return False
        seen: set[frozenset[str]] = set()
        while True:  # evaluating may show further variables that are read; then look along those too
            reads = frozenset().union(*(op.reads for op in (*a, *b)))
            if reads in seen:
                return True
            seen.add(reads)
            for point in points_over(self._space, reads):
                if _all(a, point) != _all(b, point):
                    return False

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(self._groups)

    def parts(self, kind: str) -> tuple[str, ...]:
        """The names of the parts that are of ``kind``."""
        return self._groups[kind]

    def ops(self, kind: str) -> tuple[OpLaunches, ...]:
        """The declared ops of one part of ``kind``, in order."""
        return self._ops[kind]

    @property
    def opaque(self) -> tuple[str, ...]:
        """The ops whose kernels declare no launches, each once."""
        return tuple(dict.fromkeys(shape.op for shapes in self._opaque_shapes.values() for shape in shapes))

    def launches(self, kind: str, point: StepPoint) -> tuple[Launch, ...]:
        return _all(self._ops[kind], point)

    def keys(self, kind: str, point: StepPoint) -> frozenset[str]:
        return frozenset(key for op in self._ops[kind] for key, _ in op.keyed(point))


def _all(ops: tuple[OpLaunches, ...], point: StepPoint) -> tuple[Launch, ...]:
    return tuple(launch for op in ops for launch in op.launches(point))


def build_launch_space(space: StepSpace, parts: Iterable[Part], device: Device) -> DeclaredLaunchSpace:
    """The launch space of the model made of ``parts`` on ``device``, over ``space``.

    Each part is a name and its ops in order: the shape and the chosen kernel's ``launches``, ``None`` where it declares
    none (it is then ``opaque``). Nothing is evaluated before it is asked for.
    """
    return DeclaredLaunchSpace(space, parts, device)


def attention_shape(group: AttentionGroup, dtype: str, page_tokens: int) -> OpShape:
    """The shape under which an attention backend's ``launches`` are asked for a group computed in ``dtype``."""
    return OpShape(
        op="attention",
        dtype=dtype,
        q_heads=group.q_heads,
        kv_heads=group.cache.heads,
        head_dim=group.cache.k_dim,
        v_dim=group.cache.v_dim,
        window=group.cache.window or 0,
        page_tokens=page_tokens,
    )


def _conforms(space: DeclaredLaunchSpace) -> LaunchSpace:
    """A type check that the class is what policies are promised."""
    return space
