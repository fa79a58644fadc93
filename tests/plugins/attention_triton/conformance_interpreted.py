"""This backend in Triton's interpreter: the core's conformance suite, and what its short contexts do not reach.

Run by ``test_interpreted.py`` alone, in a process of its own. float32 and float16, since the interpreter computes
bfloat16 wrongly; a few points of the matrix, since it is slow.
"""

import pytest
import torch

from freetoken.plugin.protocols import AttentionLimits, AttentionSetup
from freetoken.testing.attention import AttentionCase, AttentionConformance
from freetoken.testing.fakes import make_batch, sequence_slots
from freetoken.testing.tolerances import assert_close
from freetoken.vocab.cache_spec import PagedKV
from freetoken.vocab.hardware import Device
from freetoken.vocab.model_spec import AttentionGroup
from freetoken_attention_triton.spec import SPEC

POINTS = (("float32", 64, None, 16), ("float16", 80, 7, 1))


class TestTritonAttention(AttentionConformance):
    spec = "freetoken_attention_triton.spec:SPEC"
    heads = ((6, 2), (4, 4), (8, 1))

    @classmethod
    def cases(cls) -> list[AttentionCase]:
        return [AttentionCase(SPEC, "cpu", *point) for point in POINTS]


@pytest.mark.parametrize(
    ("query_lens", "prefix_lens", "parts"),
    [
        ((3,), (1200,), (3, 0)),
        ((2, 1), (700, 1100), (3, 12)),
        ((1,), (1300,), (0, 24)),
        ((40,), (0,), (1, 0)),
    ],
    ids=("extend-split", "mixed-split", "decode-split", "prefill-blocks"),
)
@pytest.mark.parametrize("window", [None, 150])
def test_long_contexts_are_split_and_joined(query_lens, prefix_lens, parts, window) -> None:
    """Oracle: softmax in float32 over the gathered keys, with v narrower than k."""
    torch.manual_seed(len(query_lens))
    heads, kv_heads, dim, v_dim = 3, 1, 32, 16
    cache = PagedKV(kv_heads, dim, v_dim, "float32", window)
    limits = AttentionLimits(16, 2048, 8, 64)
    group = AttentionGroup("g", (0,), heads, cache, dim**-0.5)
    backend = SPEC.create(AttentionSetup(group, Device(), "float32", limits))
    batch = make_batch(query_lens, prefix_lens)
    pages = int(batch.page_table.max()) + 1
    pools = [torch.full((pages, 16, kv_heads, size), float("nan")) for size in (dim, v_dim)]
    q = torch.randn(batch.num_tokens, heads, dim)
    expected, row = torch.empty(batch.num_tokens, heads, v_dim), 0
    for b, (length, prefix) in enumerate(zip(query_lens, prefix_lens, strict=True)):
        slots = sequence_slots(batch, b, 16)
        k, v = torch.randn(len(slots), dim), torch.randn(len(slots), v_dim)
        pools[0].view(-1, dim)[slots], pools[1].view(-1, v_dim)[slots] = k, v
        for position in range(prefix, prefix + length):
            seen = slice(0 if window is None else max(0, position + 1 - window), position + 1)
            expected[row] = torch.softmax(q[row] @ k[seen].T * dim**-0.5, -1) @ v[seen]
            row += 1
    plan = backend.plan(batch)
    assert (plan.parts.prefill, plan.parts.decode) == parts
    assert_close(backend.forward(q, *pools, 0, plan), expected, "float32", 1300)


def test_only_the_parts_that_a_context_has_are_joined() -> None:
    """Oracle: softmax in float32. All scratch is NaN, so a part that nobody wrote would show; 99 places for contexts of
    1, 100 and 9,000 keys, of which the last has 71 parts, more than are joined at once."""
    torch.manual_seed(0)
    heads, dim, contexts = 2, 16, (1, 100, 9000)
    group = AttentionGroup("g", (0,), heads, PagedKV(1, dim, dim, "float32", None), dim**-0.5)
    device = Device(multiprocessors=99, shared_memory_bytes=99 * 1024)
    backend = SPEC.create(AttentionSetup(group, device, "float32", AttentionLimits(16, 9008, 8, 64)))
    batch = make_batch((1,) * len(contexts), tuple(n - 1 for n in contexts))
    pools = [torch.full((int(batch.page_table.max()) + 1, 16, 1, dim), float("nan")) for _ in range(2)]
    q = torch.randn(len(contexts), heads, dim)
    expected = torch.empty_like(q)
    for b, length in enumerate(contexts):
        k, v = torch.randn(length, dim), torch.randn(length, dim)
        slots = sequence_slots(batch, b, 16)
        pools[0].view(-1, dim)[slots], pools[1].view(-1, dim)[slots] = k, v
        expected[b] = torch.softmax(q[b] @ k.T * dim**-0.5, -1) @ v
    plan = backend.plan(batch)
    assert plan.parts.decode == 99
    plan.partial.fill_(float("nan"))
    plan.lse.fill_(float("nan"))
    assert_close(backend.forward(q, *pools, 0, plan), expected, "float32", 9000)
