"""The comparison of logits. Oracles: distributions with a known divergence, and torch's ``kl_div``."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from accuracy import PROMPTS, answers, compare, freetoken_logits
from torch import Tensor
from torch.nn import functional as F

import freetoken

FLOAT32 = ("linear=torch", "embedding=torch", "rms_norm=torch", "add_rms_norm=torch", "rope_write=torch")


def fixed(logits: Tensor) -> object:
    return lambda tokens: logits[: len(tokens)]


def test_equal_logits_agree_whatever_their_offset() -> None:
    logits = torch.randn(7, 30)
    same = compare(fixed(logits), fixed(logits + 5), [(range(7), 4)])
    assert (same.tokens, same.top1) == (4, 1.0)
    assert same.mean_kl == pytest.approx(0, abs=1e-12)


def test_the_divergence_is_torchs() -> None:
    p, q = torch.randn(6, 30), torch.randn(6, 30)
    found = compare(fixed(p), fixed(q), [(range(6), 6)])
    each = F.kl_div(q.log_softmax(-1), p.log_softmax(-1), log_target=True, reduction="none").sum(-1)
    assert found.mean_kl == pytest.approx(float(each.mean()), rel=1e-4)
    assert found.worst_kl == pytest.approx(float(each.max()), rel=1e-4)
    assert found.top1 == int((p.argmax(-1) == q.argmax(-1)).sum()) / 6


def test_a_coin_against_a_loaded_one() -> None:
    """½ ln(½ / ¾) + ½ ln(½ / ¼)."""
    fair, loaded = torch.zeros(1, 2), torch.tensor([[math.log(3.0), 0.0]])
    found = compare(fixed(fair), fixed(loaded), [([0], 1)])
    assert found.mean_kl == pytest.approx(0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25))


@pytest.mark.model
@pytest.mark.slow
def test_the_default_on_a_cpu_is_close_to_float32() -> None:
    """Oracle: the reference kernels in float32. The floors are the full benchmark's, over a part of its texts."""
    common = {"dtype": "float32", "device": "cpu", "max_seq_len": 256, "kv_tokens": 512, "prefix_cache": False,
              "warmup_policy": "none", "threads": 1}  # fmt: skip
    with freetoken.LLM("smollm2", **common) as fast:
        texts: Sequence[tuple[Sequence[int], int]] = answers(fast, PROMPTS[:3], 24)
        with freetoken.LLM("smollm2", kernel=FLOAT32, **common) as exact:
            found = compare(freetoken_logits(exact), freetoken_logits(fast), texts)
    assert found.tokens == 72
    assert found.top1 >= 0.97
    assert found.mean_kl <= 0.01
