"""The engine client against a scripted worker in a real spawned process."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable

import pytest
from serve_fake_worker import EOS, TARGET, FakeStart

from freetoken.serve.client import EngineClient, EngineDied, RequestRefused, StatusMessage, describe_exit
from freetoken.serve.messages import EngineStats, Progress, Ready, Submit
from freetoken.vocab.sampling import SamplingParams

SCRIPT = [*FakeStart().answer.encode(), EOS]


class Bench:
    """A launched client, what it reported, and a wait for it."""

    def __init__(self, start: FakeStart) -> None:
        self.messages: list[StatusMessage] = []
        self.exits: list[str] = []
        self.client = EngineClient(TARGET, start, self.messages.append, self.exits.append)

    async def until(self, kind: type[StatusMessage]) -> None:
        while not any(isinstance(m, kind) for m in self.messages):
            await asyncio.sleep(0.005)

    @property
    def counters(self) -> dict[str, float]:
        stats = [m for m in self.messages if isinstance(m, EngineStats)]
        return dict(stats[-1].counters) if stats else {}


def run(work: Callable[[Bench], Awaitable[None]], start: FakeStart = FakeStart()) -> Bench:
    async def main() -> Bench:
        bench = Bench(start)
        bench.client.launch()
        async with asyncio.timeout(20):
            await bench.until(Ready)
            await work(bench)
            bench.client.kill()
            await bench.client.wait_closed()
        return bench

    return asyncio.run(main())


def submit(name: str, prompt: str = "hi", **params: object) -> Submit:
    return Submit(name, tuple(prompt.encode()), SamplingParams(**params))  # type: ignore[arg-type]


def test_a_stream_is_the_script_in_order() -> None:
    """Oracle: the script the worker was given."""

    async def work(bench: Bench) -> None:
        with bench.client.submit([submit("a")]) as stream:
            deltas = [delta async for delta in stream]
        assert [token for delta in deltas for token in delta.tokens] == SCRIPT
        assert [delta.finish for delta in deltas if delta.finish] == ["stop"]

    run(work)


def test_several_ids_share_one_stream_and_each_is_whole() -> None:
    """Oracle: the script, once for every id."""

    async def work(bench: Bench) -> None:
        tokens: dict[str, list[int]] = {}
        with bench.client.submit([submit(name) for name in "abc"]) as stream:
            async for delta in stream:
                tokens.setdefault(delta.request_id, []).extend(delta.tokens)
        assert tokens == dict.fromkeys("abc", SCRIPT)

    run(work)


def test_progress_and_limits_are_reported_before_any_request() -> None:
    """Oracle: the order in which the worker sends them."""

    async def work(_: Bench) -> None:
        return

    assert [type(m) for m in run(work).messages[:2]] == [Progress, Ready]


def test_leaving_a_stream_early_aborts_it_at_the_engine() -> None:
    """Oracle: the worker's own count of the requests it dropped."""

    async def work(bench: Bench) -> None:
        with bench.client.submit([submit("a", ignore_eos=True)]) as stream:
            await anext(stream)
        while bench.counters.get("aborts") != 1:
            await asyncio.sleep(0.005)

    run(work, FakeStart(step_s=0.01))


def test_what_is_finished_is_dropped_even_if_it_had_already_come() -> None:
    """Oracle: no delta of an id after the consumer said that it has enough."""

    async def work(bench: Bench) -> None:
        with bench.client.submit([submit("a", ignore_eos=True), submit("b", max_tokens=30)]) as stream:
            await anext(stream)
            await asyncio.sleep(0.1)  # let some pile up
            stream.finish("a")
            assert {delta.request_id async for delta in stream} == {"b"}

    run(work, FakeStart(step_s=0.002))


def test_a_refused_request_fails_alone() -> None:
    """Oracle: the refusal the worker sent, and the script for the other."""

    async def work(bench: Bench) -> None:
        good = bench.client.submit([submit("a")])
        with bench.client.submit([submit("b", "FAIL")]) as bad, pytest.raises(RequestRefused, match="boom") as caught:
            await anext(bad)
        assert caught.value.status == 500
        assert [token async for delta in good for token in delta.tokens] == SCRIPT

    run(work)


def test_death_fails_every_stream_and_says_which_signal_it_was() -> None:
    """Oracle: SIGKILL, sent here; 20 streams wait."""

    async def work(bench: Bench) -> None:
        streams = [bench.client.submit([submit(f"r{i}", ignore_eos=True)]) for i in range(20)]
        for stream in streams:
            await anext(stream)
        assert bench.client.pid is not None
        os.kill(bench.client.pid, signal.SIGKILL)

        async def drain(index: int) -> None:
            async for _ in streams[index]:
                pass

        ends = await asyncio.gather(*(drain(i) for i in range(20)), return_exceptions=True)
        assert [type(end) for end in ends] == [EngineDied] * 20
        await bench.client.wait_closed()
        with pytest.raises(EngineDied):
            bench.client.submit([submit("late")])

    bench = run(work, FakeStart(step_s=0.01))
    assert len(bench.exits) == 1
    assert "SIGKILL" in bench.exits[0]


def test_the_engine_survives_ctrl_c_and_sigterm_meant_for_its_parent() -> None:
    """Oracle: the script still comes whole after both signals."""

    async def work(bench: Bench) -> None:
        assert bench.client.pid is not None
        with bench.client.submit([submit("a")]) as stream:
            for number in (signal.SIGINT, signal.SIGTERM):
                os.kill(bench.client.pid, number)
            assert [token async for delta in stream for token in delta.tokens] == SCRIPT

    run(work)


def test_an_exit_code_is_told_from_a_signal() -> None:
    """Oracle: the numbering of multiprocessing (negative is a signal)."""
    assert "exit code 7" in describe_exit(7)
    assert "SIGSEGV" in describe_exit(-11)
    assert "signal 250" in describe_exit(-250)
