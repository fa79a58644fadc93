"""The core's attention conformance on this backend, in Triton's interpreter. Run by ``test_interpreted.py`` alone.

float32 and float16, since the interpreter computes bfloat16 wrongly; few cases of the matrix, since it is slow.
"""

from freetoken.testing.attention import AttentionCase, AttentionConformance
from freetoken_attention_triton.spec import SPEC

POINTS = (
    ("float32", 64, None, 16),
    ("float32", 80, 7, 1),
    ("float16", 128, 7, 16),
)


class TestTritonAttention(AttentionConformance):
    spec = "freetoken_attention_triton.spec:SPEC"
    heads = ((6, 2), (4, 4), (8, 1))

    @classmethod
    def cases(cls) -> list[AttentionCase]:
        return [AttentionCase(SPEC, "cpu", *point) for point in POINTS]
