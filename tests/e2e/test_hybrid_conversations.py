"""Two hundred conversations with a hybrid model that share prefixes and crowd each other out of the cache.

Oracle: every answer alone, without a cache. A recurrent state that is resumed from the wrong place, copied a step too
late or overwritten gives another answer.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from attrs import define

from freetoken import LLM, SamplingParams
from freetoken.kv.audit import audit
from freetoken.models import qwen3_5_moe
from freetoken.testing.checkpoints import write_tiny
from freetoken.testing.plain_answers import PlainAnswers

CONVERSATIONS = 200
CONTEXT = 256
KEPT_STATES = 6
FAMILY = qwen3_5_moe.FAMILY


@define
class Conversation:
    """What was said so far, what the user will still say, and how many tokens each answer has."""

    said: list[int]
    turns: list[list[int]]
    tokens: int


def conversations(seed: int) -> list[Conversation]:
    """System prompts of a few kinds, some cut off at odd places, then one to three turns."""
    rng = random.Random(seed)
    systems = [[rng.randrange(250) for _ in range(length)] for length in (48, 61, 100)]
    made = []
    for _ in range(CONVERSATIONS):
        system = rng.choice(systems)
        cut = rng.choice([len(system), len(system), rng.randrange(1, len(system))])
        turns = [[rng.randrange(250) for _ in range(rng.randrange(1, 24))] for _ in range(rng.choice((1, 1, 2, 3)))]
        made.append(Conversation(system[:cut], turns, rng.randrange(2, 8)))
    return made


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(FAMILY, tmp_path_factory.mktemp("hybrid"), seed=5)


@pytest.fixture(scope="module")
def plain(model: Path) -> Iterator[PlainAnswers]:
    with PlainAnswers(model, max_seq_len=CONTEXT, threads=1) as answers:
        yield answers


@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlapped"])
def test_every_answer_is_the_uncached_one(model: Path, plain: PlainAnswers, overlap: bool) -> None:
    state_bytes = FAMILY.read_config(FAMILY.tiny(), "float32").state_slot_bytes
    with LLM(
        str(model), dtype="float32", threads=1, max_seq_len=CONTEXT, max_running_requests=8, max_prefill_tokens=48,
        kv_tokens=640, snapshot_bytes=KEPT_STATES * state_bytes,
    ) as llm:  # fmt: skip
        core, cache = llm.running.core, llm.running.built.cache
        core.overlap = overlap
        waiting = conversations(seed=1)
        talking: dict[str, tuple[Conversation, list[int]]] = {}
        checked, numbers = 0, itertools.count()

        def ask(conversation: Conversation) -> None:
            prompt = [*conversation.said, *conversation.turns.pop(0)]
            name = f"turn-{next(numbers)}"
            params = SamplingParams(temperature=0, max_tokens=conversation.tokens, ignore_eos=True)
            core.submit(name, prompt, params)
            conversation.said = prompt
            talking[name] = conversation, []

        while waiting or talking:
            while waiting and len(talking) < 16:
                ask(waiting.pop())
            for output in core.step():
                conversation, answer = talking[output.request_id]
                answer += output.tokens
                if not output.finish:
                    continue
                expected = plain.answer(conversation.said, conversation.tokens)
                assert tuple(answer[: len(expected)]) == expected, f"answer {checked}, {output.cached_tokens} cached"
                checked += 1
                del talking[output.request_id]
                conversation.said += answer
                if conversation.turns:
                    ask(conversation)
        audit(cache)
        stats = cache.stats()
        assert checked >= CONVERSATIONS
        assert stats.pages_used == 0
        assert stats.hit_tokens > 0.2 * stats.query_tokens, "they did share"
        assert stats.evictions > 100
        assert stats.snapshot_evictions > 100
