"""Llama against transformers in float32."""

from __future__ import annotations

import torch
import transformers

from freetoken.models.llama import FAMILY
from freetoken.testing.mini_runner import MiniRunner


def test_prefill():
    torch.manual_seed(0)
    cfg = transformers.LlamaConfig(**FAMILY.tiny())
    m = transformers.LlamaForCausalLM(cfg).eval()
    for p in m.parameters():
        p.data.normal_(0, 0.08) if p.ndim > 1 else p.data.normal_(1, 0.1)
    r = MiniRunner(FAMILY, FAMILY.tiny(), dict(m.state_dict()))
    toks = torch.randint(0, 260, (50,)).tolist()
    with torch.no_grad():
        want = m(torch.tensor([toks])).logits[0]
    print(want.abs().max(), (r.logits(toks) - want).abs().max(), (r.logits(toks, 7) - want).abs().max())
    assert (r.logits(toks) - want).abs().max() < 1e-4
