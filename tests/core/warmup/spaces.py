"""Launch functions over the tiny kernels, and a step space, shared by the launch-space tests."""

from freetoken.testing.launches import DEVICES
from freetoken.vocab.hardware import Device
from freetoken.vocab.launch import LibraryCall, NativeModule, Range, StepPoint, StepSpace, TensorArg, TritonLaunch
from freetoken.vocab.ops import OpShape

H200 = DEVICES["h200"]
SHAPE = OpShape("rms_norm", "bfloat16", cols=2048)
BUCKETS = (16, 64, 256, 1024, 8192)


def space(tokens: int = 8192, sequences: int = 256, context: int = 40_960) -> StepSpace:
    return StepSpace(
        tokens=Range(1, tokens),
        sequences=Range(1, sequences),
        chunk=Range(1, tokens),
        prefix=Range(0, context - 1),
        context=Range(1, context),
        decode_sequences=Range(1, sequences),
    )


def one(kernel: str, tokens: int, block: int, **options: object) -> tuple[TritonLaunch, ...]:
    return (
        TritonLaunch(
            kernel=f"space_kernels:{kernel}",
            args=(("x", TensorArg("bfloat16")), ("tokens", tokens)),
            constexprs=(("BLOCK", block),),
            grid=(-(-tokens // block), 1, 1),
            **options,  # type: ignore[arg-type]
        ),
    )


def flat(point: StepPoint, shape: OpShape, device: Device) -> tuple[TritonLaunch, ...]:
    """One kernel for every token count."""
    return one("by_row", point.tokens, 128)


def bucketed(point: StepPoint, shape: OpShape, device: Device) -> tuple[TritonLaunch, ...]:
    """A kernel a bucket; the top bucket takes the maximum too."""
    return one("by_row", point.tokens, next(b for b in BUCKETS if point.tokens <= b))


def half_open(point: StepPoint, shape: OpShape, device: Device) -> tuple[TritonLaunch, ...]:
    """The classical fault: the range leaves its maximum out."""
    return one("by_row", point.tokens, next(b for b in BUCKETS if point.tokens < b))


def silent_top(point: StepPoint, shape: OpShape, device: Device) -> tuple[TritonLaunch, ...]:
    """The same fault without an exception."""
    return one("by_row", point.tokens, 128) if point.max_context < 40_960 else ()


def unbounded(point: StepPoint, shape: OpShape, device: Device) -> tuple[TritonLaunch, ...]:
    """The token count as a compile-time value."""
    return one("by_row", point.tokens, 128, options=()) if point.tokens < 1 else one("by_row", 5, point.tokens)


def specialising(point: StepPoint, shape: OpShape, device: Device) -> tuple[TritonLaunch, ...]:
    return one("specialising", point.tokens, 128)


def tuned(point: StepPoint, shape: OpShape, device: Device) -> tuple[TritonLaunch, ...]:
    return one("tuned", point.tokens, 64)


def by_mode(point: StepPoint, shape: OpShape, device: Device) -> tuple[TritonLaunch, ...]:
    """Reads further variables in one branch alone."""
    if point.decode:
        return one("by_row", 16, 32 if point.max_context > 4096 else 64)
    return one("by_row", 16, 128)


def native(point: StepPoint, shape: OpShape, device: Device) -> tuple[NativeModule, LibraryCall]:
    return (
        NativeModule(f"module-{point.tokens > 100}", lambda: None, lambda: None),
        LibraryCall("gemm", lambda tokens: None),
    )
