"""The conformance suite for warmup policies: they end, they are pure, and what they promise to cover they cover.

Subclass ``WarmupPolicyConformance`` in a package's tests and give the policy. It needs neither triton nor a GPU: the
launch space here is made of native modules in buckets, a library, and an op that declares nothing.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from itertools import islice

from freetoken.models import llama
from freetoken.plugin.protocols import WarmupPolicy
from freetoken.testing.launches import DEVICES
from freetoken.testing.plans import planned
from freetoken.vocab.hardware import Device
from freetoken.vocab.launch import Launch, LibraryCall, NativeModule, Range, StepPoint, StepSpace
from freetoken.vocab.ops import OpShape
from freetoken.vocab.plan import Plan
from freetoken.vocab.warmup import Capture, CompileKeys, Forward, Known, LoadKeys, Touch, WarmupStep
from freetoken.warmup.cover import needed_aspects, redundant, uncovered
from freetoken.warmup.launch_space import DeclaredLaunchSpace, build_launch_space
from freetoken.warmup.survey import survey_of

MOST_STEPS = 10_000
BUCKETS = (1, 8, 16, 100, 512)


def _nothing() -> None: ...


def _module(name: str) -> NativeModule:
    return NativeModule(name, build=_nothing, load=_nothing)


def bucketed(point: StepPoint, shape: OpShape, _: Device) -> tuple[Launch, ...]:
    """A module a bucket of tokens, another for decode, and a library above the first bucket."""
    bucket = next(b for b in BUCKETS if point.tokens <= b)
    found: list[Launch] = [_module(f"{shape.op}-{bucket}")]
    if point.decode:
        found.append(_module(f"{shape.op}-decode-{'many' if point.sequences > 1 else 'one'}"))
    if point.tokens > BUCKETS[0]:
        found.append(LibraryCall(f"product {shape.rows}x{shape.cols}", sweep=lambda _: None))
    return tuple(found)


def long_context(point: StepPoint, _shape: OpShape, _device: Device) -> tuple[Launch, ...]:
    """A module for short contexts and one for long ones."""
    return (_module(f"attention-{'long' if point.max_context > 300 else 'short'}"),)


def by_route(point: StepPoint, _shape: OpShape, _device: Device) -> tuple[Launch, ...]:
    return (_module(f"sample-{point.sampler_route}"),)


def example_space(max_tokens: int = 512, max_sequences: int = 8, max_context: int = 1024) -> DeclaredLaunchSpace:
    """Two kinds of layer, a head, an op that declares nothing; small enough to be walked in a second."""
    space = StepSpace(
        tokens=Range(1, max_tokens),
        sequences=Range(1, max_sequences),
        chunk=Range(1, max_tokens),
        prefix=Range(0, max_context - 1),
        context=Range(1, max_context),
        decode_sequences=Range(1, max_sequences),
    )
    linear, experts = OpShape("linear", "bfloat16", rows=64, cols=32), OpShape("experts", "bfloat16", experts=8)
    attention, sample = OpShape("attention", "bfloat16", q_heads=2), OpShape("sample", "float32", rows=99)
    parts = [
        ("embed", ((OpShape("embedding", "bfloat16", rows=99, cols=32), None),)),
        ("layers.0", ((linear, bucketed), (attention, long_context))),
        ("layers.1", ((experts, bucketed), (attention, long_context))),
        ("head", ((sample, by_route),)),
    ]
    return build_launch_space(space, parts, DEVICES["h200"])


def bare_space() -> DeclaredLaunchSpace:
    """Like an engine on a CPU: nothing is declared."""
    whole = example_space()
    shapes = [
        ("embed", ((OpShape("embedding", "float32"), None),)),
        ("layers.0", ((OpShape("linear", "float32"), None),)),
    ]
    return build_launch_space(whole.space, shapes, Device())


class WarmupPolicyConformance:
    """``promises`` says up to how many tokens the policy covers every key; ``None`` for one that promises nothing."""

    promises: int | None = None

    @abstractmethod
    def policy(self) -> WarmupPolicy:
        """A new instance of the policy."""

    def plan(self) -> Plan:
        """The plan it is asked with: a small model on a CPU, since the launch space is what matters."""
        return planned(llama.tiny(), dtype="float32").plan

    def spaces(self) -> Sequence[DeclaredLaunchSpace]:
        return (example_space(), example_space(max_tokens=5, max_sequences=2), bare_space())

    def known(self, space: DeclaredLaunchSpace) -> Sequence[Known]:
        """No manifest, half of the keys, all of them proven, and a late point."""
        keys = sorted(survey_of(space).keys)
        late = StepPoint(1, 1, 1, min(3, space.space.context.high), 1, decode=True)
        return (
            Known(),
            Known(compiled=frozenset(keys[::2]), because="half a manifest"),
            Known(compiled=frozenset(keys), proven=True, because="a manifest"),
            Known(compiled=frozenset(keys), proven=True, late=(late,), because="a manifest with a late point"),
        )

    def cases(self) -> Iterator[tuple[DeclaredLaunchSpace, Known, list[WarmupStep]]]:
        for space in self.spaces():
            for known in self.known(space):
                steps = list(islice(self.policy().steps(self.plan(), space, known), MOST_STEPS))
                yield space, known, steps

    def test_it_ends(self) -> None:
        for _, _, steps in self.cases():
            assert len(steps) < MOST_STEPS

    def test_it_is_pure(self) -> None:
        """Asked again, and asked anew, it answers the same: no clock, no chance, no memory."""
        for space, known, steps in self.cases():
            policy, plan = self.policy(), self.plan()
            assert list(policy.steps(plan, space, known)) == steps
            assert list(policy.steps(plan, space, known)) == steps

    def test_steps_are_of_the_five_kinds_and_name_what_exists(self) -> None:
        for space, _, steps in self.cases():
            found = survey_of(space)
            names = {use.name for use in found.libraries} | {key.partition(":")[2] for key in found.keys}
            for step in steps:
                assert isinstance(step, CompileKeys | LoadKeys | Touch | Forward | Capture), step
                assert step.workers >= 1, step
                if isinstance(step, CompileKeys | LoadKeys):
                    assert step.keys, f"no keys in {step}"
                    assert found.keys.issuperset(step.keys), f"unknown keys in {step}"
                if isinstance(step, Touch):
                    assert step.name in names, f"nothing is called {step.name}"

    def test_forwards_are_steps_that_the_engine_can_take(self) -> None:
        for space, _, steps in self.cases():
            for step in steps:
                if isinstance(step, Forward):
                    assert not impossible(step.point, space.space), impossible(step.point, space.space)

    def test_keys_are_compiled_before_they_are_loaded_and_loaded_before_graphs_are_captured(self) -> None:
        for _, _, steps in self.cases():
            loaded: set[str] = set()
            captured = False
            for step in steps:
                if isinstance(step, CompileKeys):
                    assert not loaded.intersection(step.keys), "compiled after it was loaded"
                if isinstance(step, LoadKeys):
                    assert not captured, "loaded after the capture, which may launch it first"
                    loaded.update(step.keys)
                captured = captured or isinstance(step, Capture)

    def test_what_is_known_is_not_compiled_again(self) -> None:
        for _, known, steps in self.cases():
            for step in steps:
                if isinstance(step, CompileKeys):
                    assert not known.compiled.intersection(step.keys)

    def test_it_covers_what_it_promises(self) -> None:
        if self.promises is None:
            return
        for space, _, steps in self.cases():
            missed = survey_of(space).reachable(self.promises).intersection(uncovered(steps, space))
            assert not missed, f"never loaded nor launched: {sorted(missed)}"

    def test_no_step_of_a_first_start_can_be_dropped(self) -> None:
        if self.promises is None:
            return
        for space, known, steps in self.cases():
            if not known.compiled:
                cap = min(self.promises, space.space.tokens.high)
                needless = redundant(steps, space, needed_aspects(space, cap))
                assert not needless, f"others cover all of {needless}"


def impossible(point: StepPoint, space: StepSpace) -> str:
    """Why the engine can never take a step at ``point``; empty when it can."""
    if point.tokens not in Range(1, space.tokens.high):
        return f"{point.tokens} tokens are outside 1 to {space.tokens.high}"
    if not 1 <= point.sequences <= point.tokens:
        return f"{point.sequences} sequences of {point.tokens} tokens"
    if not -(-point.tokens // point.sequences) <= point.max_query <= point.tokens - point.sequences + 1:
        return f"a longest query of {point.max_query} in {point.tokens} tokens over {point.sequences} sequences"
    if not point.max_query <= point.max_context <= space.context.high:
        return f"a context of {point.max_context} after a query of {point.max_query}"
    if not 0 <= point.rows <= point.sequences:
        return f"{point.rows} rows of logits for {point.sequences} sequences"
    if point.decode and (point.tokens != point.sequences or point.max_context < 2):
        return "a decode step brings one token a sequence, each after a context"
    if point.sampler_route not in space.sampler_routes:
        return f"the sampler has no route {point.sampler_route!r}"
    return ""
