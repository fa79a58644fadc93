"""The supervisor: its restart decision as a pure function, and its life around a worker that dies in every way."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from serve_fake_worker import TARGET, FakeStart

from freetoken.serve.messages import Submit
from freetoken.serve.supervisor import EngineStatus, EngineUnavailable, RestartPolicy, Supervisor, next_try
from freetoken.vocab.sampling import SamplingParams

QUICK = RestartPolicy(first=0.02, longest=0.1, healthy=60, max_failures=3)


@given(st.integers(0, 20), st.floats(0, 1000), st.floats(0.1, 5), st.floats(5, 60), st.integers(1, 10))
def test_back_off_doubles_to_its_limit_and_ends(
    failures: int, served_s: float, first: float, longest: float, most: int
) -> None:
    """Property: the definition of the policy, written the other way round."""
    policy = RestartPolicy(first, longest, healthy=60, max_failures=most)
    decision = next_try(policy, failures, served_s, "why")
    assert "why" in decision.reason
    in_a_row = 1 if served_s >= 60 else failures + 1
    assert decision.failures == in_a_row
    assert (decision.delay_s is None) == (in_a_row >= most)
    if decision.delay_s is not None:
        assert first <= decision.delay_s <= longest
        following = next_try(policy, decision.failures, 0, "why").delay_s
        assert following is None or following == min(longest, 2 * decision.delay_s)


def run(work: Callable[[Supervisor], Awaitable[None]], start: FakeStart, policy: RestartPolicy = QUICK) -> list[str]:
    """Runs ``work`` beside a supervisor; the phases it went through."""
    phases: list[str] = []

    def note(status: EngineStatus) -> None:
        phases.append(status.phase)

    async def main() -> None:
        supervisor = Supervisor(TARGET, start, policy, note)
        supervisor.start()
        async with asyncio.timeout(30):
            await work(supervisor)
            await supervisor.stop()

    asyncio.run(main())
    return phases


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


def test_a_start_goes_through_its_phases_and_stops() -> None:
    """Oracle: the phases the worker sends."""

    async def work(supervisor: Supervisor) -> None:
        with pytest.raises(EngineUnavailable) as caught:
            supervisor.limits()
        assert caught.value.code == "engine_starting"
        await until(lambda: supervisor.serving)
        assert supervisor.limits().max_seq_tokens == 4096

    assert run(work, FakeStart()) == ["starting", "weights", "serving", "stopping"]


def test_a_killed_engine_is_replaced_and_serves_again() -> None:
    """Oracle: another process id answers after SIGKILL, and the reason names the signal meanwhile."""

    async def work(supervisor: Supervisor) -> None:
        await until(lambda: supervisor.serving)
        first = supervisor.engine_pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        await until(lambda: not supervisor.serving)
        assert "SIGKILL" in supervisor.status.reason
        with pytest.raises(EngineUnavailable) as caught:
            supervisor.limits()
        assert caught.value.code == "engine_dead"
        await until(lambda: supervisor.serving)
        assert supervisor.engine_pid != first
        assert (supervisor.status.restarts, supervisor.status.reason) == (1, "")
        prompt = Submit("a", (1,), SamplingParams())
        with supervisor.submit([prompt]) as stream:
            assert len([delta async for delta in stream]) > 1

    run(work, FakeStart())


def test_an_engine_that_always_crashes_is_given_up_with_the_reason() -> None:
    """Oracle: the policy's number of failures, and the exit code the worker leaves with."""

    async def work(supervisor: Supervisor) -> None:
        await supervisor.ended.wait()
        assert supervisor.failed is not None
        assert not supervisor.refused
        assert "exit code 7" in supervisor.failed.found
        assert "3 failures" in supervisor.failed.found
        with pytest.raises(EngineUnavailable) as caught:
            supervisor.limits()
        assert caught.value.code == "engine_dead"

    phases = run(work, FakeStart(start="crash"))
    assert phases.count("starting") == 3
    assert phases[-1] == "dead"


def test_a_start_that_cannot_succeed_is_not_tried_again() -> None:
    """Oracle: the refusal the worker sends, unchanged."""

    async def work(supervisor: Supervisor) -> None:
        await supervisor.ended.wait()
        assert supervisor.failed is not None
        assert supervisor.refused
        assert supervisor.failed.found == "it takes 99 GiB and there are 2"

    assert run(work, FakeStart(start="refuse")).count("starting") == 1


def test_a_start_that_may_succeed_later_is_tried_again_and_then_given_up() -> None:
    """Oracle: the policy, and the refusal's text in the reason."""

    async def work(supervisor: Supervisor) -> None:
        await supervisor.ended.wait()
        assert supervisor.failed is not None
        assert not supervisor.refused
        assert "99 GiB" in supervisor.failed.found

    assert run(work, FakeStart(start="retry")).count("starting") == 3


def test_a_stop_during_the_start_does_not_wait_for_it() -> None:
    """Oracle: the start would take 60 s, the timeout of this test is 30."""

    async def work(supervisor: Supervisor) -> None:
        await until(lambda: supervisor.engine_pid)

    run(work, FakeStart(start_s=60))


PARENT = """
import asyncio, sys
sys.path.insert(0, {folder!r})
from serve_fake_worker import TARGET, FakeStart
from freetoken.serve.supervisor import Supervisor
async def main():
    supervisor = Supervisor(TARGET, FakeStart())
    supervisor.start()
    while not supervisor.serving:
        await asyncio.sleep(0.01)
    print(supervisor.engine_pid, flush=True)
    await asyncio.sleep(60)
if __name__ == "__main__":
    asyncio.run(main())
"""


def test_the_engine_dies_with_its_parent(tmp_path: Path) -> None:
    """Oracle: the kernel's process table after SIGKILL to the parent."""
    script = tmp_path / "parent.py"
    script.write_text(PARENT.format(folder=str(Path(__file__).parent)))
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()
    limit = time.monotonic() + 10
    while _alive(child):
        assert time.monotonic() < limit, "the engine process outlived its parent"
        time.sleep(0.02)


def _alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
