"""The scheduler under random use. Oracles: each request alone without scheduler or cache, and a simulated device.

Requests come, are aborted, run out of time and fail at every moment; after every step the cache's books are audited.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from schedule_device import EOS, VOCAB, Answers, make_core, plain_answer, run, simulated

from freetoken.kv.audit import audit
from freetoken.vocab.errors import UsageError
from freetoken.vocab.sampling import SamplingParams

PREFIX = (1, 2, 3, 1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 3, 5, 7, 9, 2, 4, 6)

prompts = st.builds(
    lambda shared, own: [*PREFIX[:shared], *own],
    st.integers(0, len(PREFIX)),
    st.lists(st.integers(0, 2), min_size=1, max_size=6),
)
wishes = st.builds(
    SamplingParams,
    max_tokens=st.none() | st.integers(3, 12),
    min_tokens=st.integers(0, 3),
    stop_token_ids=st.sampled_from([(), (3,), (0, 5)]),
    ignore_eos=st.booleans(),
)


class EngineMachine(RuleBasedStateMachine):
    @initialize(
        page_tokens=st.integers(1, 4),
        pages=st.integers(3, 14),
        max_running=st.integers(1, 4),
        max_step_tokens=st.integers(1, 12),
        hybrid=st.booleans(),
        snapshots=st.integers(0, 3),
        overlap=st.booleans(),
        prefix_cache=st.sampled_from([True, True, False]),
        window=st.sampled_from([0, 0, 1, 2, 5]),
    )
    def start(self, window, max_step_tokens, max_running, **sizes):
        step = max(max_step_tokens, max_running)
        self.core = make_core(
            max_running=max_running, max_step_tokens=step, max_context=40, max_gap_ms=5, window=window * step, **sizes
        )
        self.engine = simulated(self.core)
        self.answers = Answers()
        self.expected: dict[str, tuple[list[int], str]] = {}
        self.causes: dict[str, set[str]] = {}  # request → other ends that it was given cause for
        self.arrived: list[str] = []

    @rule(prompt=prompts, params=wishes, deadline_ms=st.none() | st.integers(1, 60))
    def submit(self, prompt, params, deadline_ms):
        name = f"r{len(self.arrived)}"
        longest = self.core.limits.max_context_tokens
        deadline = None if deadline_ms is None else self.engine.clock.now + deadline_ms / 1000
        if len(prompt) >= longest:
            try:
                self.core.submit(name, prompt, params, deadline)
            except UsageError:
                return
            raise AssertionError("a prompt without room for an answer was taken")
        self.core.submit(name, prompt, params, deadline)
        self.arrived.append(name)
        self.expected[name] = plain_answer(prompt, params, longest)
        self.causes[name] = set() if deadline is None else {"deadline"}

    @rule(steps=st.integers(1, 6))
    def step(self, steps):
        for _ in range(steps):
            now = self.engine.clock.now
            self.answers.take(self.core.step(), now)
            self.books_are_right()

    @rule(which=st.integers(0, 40))
    def abort(self, which):
        name = f"r{which}"
        self.core.abort(name)  # unknown ones are ignored
        if name in self.expected and name not in self.answers.finish:
            self.answers.finish[name] = "aborted"
            self.causes[name].add("aborted")

    @rule(ms=st.integers(1, 30))
    def wait(self, ms):
        self.engine.clock.now += ms / 1000

    @rule(where=st.sampled_from(["fail_launch", "fail_read"]))
    def fail(self, where):
        """The next step fails: whoever is in it gets an error, the others never notice."""
        setattr(self.engine, where, True)

    # -- what always holds ----------------------------------------------------------------------------------------

    @invariant()
    def books_are_right(self):
        if not hasattr(self, "core"):
            return
        assert not self.engine.faults
        audit(self.core.cache)
        scheduler = self.core.scheduler
        assert all(r.cache is not None and r.lane >= 0 for r in scheduler.running)
        assert all(r.cache is None and r.lane == -1 for r in scheduler.waiting)
        order = [r.request_id for r in (*scheduler.running, *scheduler.waiting)]
        assert order == sorted(order, key=self.arrived.index), "somebody overtook"
        lanes = [r.lane for r in scheduler.running] + scheduler._lanes
        assert sorted(lanes) == list(range(self.core.limits.max_running))
        assert set(self.engine.known) <= set(order), "the sampler was not told of an end"

    @invariant()
    def every_token_is_the_plain_one(self):
        for name, tokens in getattr(self, "answers", Answers()).tokens.items():
            expected, finish = self.expected[name]
            assert tokens == expected[: len(tokens)]
            end = self.answers.finish.get(name)
            if end in ("stop", "length"):
                assert (tokens, end) == (expected, finish)
            elif end is not None:
                assert end in self.causes[name] or (end == "error" and name in self.engine.failed), (name, end)
            logprobs = self.answers.logprobs[name]
            assert logprobs == [-float(token) for token in tokens]

    def teardown(self):
        if not hasattr(self, "core"):
            return
        self.engine.fail_launch = self.engine.fail_read = False
        run(self.core, self.answers)
        self.books_are_right()
        self.every_token_is_the_plain_one()
        assert set(self.answers.finish) == set(self.arrived), "somebody was forgotten"
        stats = self.core.cache.stats()
        assert stats.pages_used == 0
        assert stats.sequences == 0
        assert not self.engine.known


EngineMachine.TestCase.settings = settings(
    max_examples=120, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestEngineMachine = EngineMachine.TestCase
assert EOS < VOCAB


@pytest.fixture(autouse=True, scope="module")
def _quiet_engine() -> Iterator[None]:
    """Failed steps are meant here, and there are thousands; other modules want to see theirs."""
    logger = logging.getLogger("freetoken.engine")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(before)
