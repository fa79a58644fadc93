"""What ``/health`` says of limits. Oracle: the server's own answers to requests at them."""

from __future__ import annotations

import pytest
from serve_bench import serve
from serve_fake_worker import VOCAB, FakeStart


@pytest.mark.parametrize("rows", [VOCAB, VOCAB + 1000])
def test_ids_below_its_vocabulary_are_taken_and_no_others(rows: int) -> None:
    """Where the model has rows for more ids than its tokenizer knows, too."""
    with serve(FakeStart(vocab_size=rows)) as served, served.http() as http:
        limit = http.get("/health").json()["limits"]["vocab_size"]
        assert limit <= rows
        taken, refused = (
            http.post("/v1/completions", json={"prompt": [i], "max_tokens": 1}).status_code for i in (limit - 1, limit)
        )
        assert (taken, refused) == (200, 400)
