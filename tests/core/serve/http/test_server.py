"""The server's own life: its port, the signals, the ways it ends."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from subprocess import PIPE

import httpx
import pytest

from freetoken.serve.http.server import bind_socket
from freetoken.vocab.errors import UsageError

PROGRAM = """
import sys
sys.path.insert(0, {folder!r})
if __name__ == "__main__":  # the spawned child imports this file too, and needs none of the rest
    from serve_bench import fake_services
    from serve_fake_worker import FakeStart
    from freetoken.serve.http.server import bind_socket, serve_http
    from freetoken.serve.limits import ServerLimits
    from freetoken.serve.supervisor import RestartPolicy
    from freetoken.vocab.errors import EngineError, UsageError

    limits, policy = ServerLimits(drain_s={drain_s}), RestartPolicy(first=0.02, max_failures=2)
    services = fake_services(FakeStart({start}), policy, limits=limits)
    sock = bind_socket("127.0.0.1", 0)
    print(sock.getsockname()[1], flush=True)
    try:
        serve_http(services, "127.0.0.1", 0, sock)
    except UsageError as error:
        print("refused:", error)
        sys.exit(2)
    except EngineError as error:
        print("failed:", error)
        sys.exit(1)
    print("torch" in sys.modules, "ended in order")
"""


class Program:
    """``serve_http`` as a process of its own, as ``freetoken serve`` runs it."""

    def __init__(self, folder: Path, start: str = "", drain_s: float = 10) -> None:
        # From a file: a spawned child imports its parent's main module again.
        path = folder / "program.py"
        path.write_text(PROGRAM.format(folder=str(Path(__file__).parents[1]), start=start, drain_s=drain_s))
        self.process = subprocess.Popen([sys.executable, str(path)], stdout=PIPE, stderr=PIPE, text=True)
        assert self.process.stdout is not None
        self.base = f"http://127.0.0.1:{int(self.process.stdout.readline())}"

    def wait_ready(self) -> None:
        for _ in range(1500):
            try:
                if httpx.get(f"{self.base}/ready").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.01)
        raise AssertionError("it did not get ready")

    def end(self) -> tuple[int, str]:
        out, self.errors = self.process.communicate(timeout=30)
        return self.process.returncode, out


def test_a_port_in_use_is_refused_with_the_port_and_the_fix() -> None:
    """Oracle: a socket that listens there already."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=rf"port {port} is in use") as caught:
            bind_socket("127.0.0.1", port)
    assert f"--port {port + 1}" in caught.value.refusal.fix


@pytest.mark.parametrize(
    ("host", "port", "word"),
    [
        ("no.such.host.invalid", 1919, "cannot be resolved"),
        ("192.0.2.1", 1919, "no such address"),
        ("127.0.0.1", 70000, "65535"),
    ],
)
def test_an_address_that_cannot_be_had_is_refused(host: str, port: int, word: str) -> None:
    """Oracle: names and addresses reserved for never existing (RFC 2606, RFC 5737)."""
    with pytest.raises(UsageError, match=word):
        bind_socket(host, port)


def test_ipv6_is_an_address_too() -> None:
    """Oracle: the kernel's address family."""
    if not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")
    with bind_socket("::1", 0) as sock:
        assert sock.family == socket.AF_INET6


def test_a_start_that_cannot_succeed_ends_the_program_with_the_refusal(tmp_path: Path) -> None:
    """Oracle: the refusal the worker sends."""
    code, out = Program(tmp_path, "start='refuse'").end()
    assert code == 2
    assert "refused: serve this model\n  found: it takes 99 GiB and there are 2\n  fix:   take a smaller one" in out


def test_a_crash_loop_ends_the_program_with_the_reason(tmp_path: Path) -> None:
    """Oracle: the worker's exit code and the policy's number."""
    code, out = Program(tmp_path, "start='crash'").end()
    assert code == 1
    assert re.search(r"failed: .*\n.*exit code 7; 2 failures", out)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_lets_running_answers_finish(tmp_path: Path, number: signal.Signals) -> None:
    """Oracle: the script comes whole although the signal goes to both processes in its midst; nothing is left over."""
    program = Program(tmp_path, "step_s=0.02")
    program.wait_ready()
    body = {"prompt": "a", "max_tokens": 40, "stream": True}
    with httpx.stream("POST", f"{program.base}/v1/completions", json=body, timeout=20) as answer:
        events = filter(None, answer.iter_lines())
        lines = [next(events)]
        children = _children(program.process.pid)
        for pid in (program.process.pid, *children):
            os.kill(pid, number)
        lines += events
    assert len(lines) == 40  # 40 tokens, of which two are one ö, and the end
    assert '"finish_reason":"length"' in lines[-2]
    assert lines[-1] == "data: [DONE]"
    code, out = program.end()
    assert (code, out) == (0, "False ended in order\n")
    assert "Traceback" not in program.errors
    _wait_gone(children)


def test_the_drain_has_a_deadline_and_then_everybody_is_told(tmp_path: Path) -> None:
    """Oracle: an endless stream ends with an error of its own, not with a broken connection."""
    program = Program(tmp_path, "step_s=0.02", drain_s=0.3)
    program.wait_ready()
    body = {"prompt": "a", "ignore_eos": True, "max_tokens": 4000, "stream": True}
    with httpx.stream("POST", f"{program.base}/v1/completions", json=body, timeout=20) as answer:
        lines = answer.iter_lines()
        next(lines)
        program.process.send_signal(signal.SIGINT)
        rest = list(lines)
    assert '"code":"shutting_down"' in "".join(rest)
    assert program.end()[0] == 0


def test_ctrl_c_twice_ends_at_once_and_leaves_nothing(tmp_path: Path) -> None:
    """Oracle: the drain would take a minute; the kernel's process table."""
    program = Program(tmp_path, "step_s=0.02", drain_s=60)
    program.wait_ready()
    body = {"prompt": "a", "ignore_eos": True, "max_tokens": 4000, "stream": True}
    with httpx.stream("POST", f"{program.base}/v1/completions", json=body, timeout=20) as answer:
        lines = answer.iter_lines()  # kept, for the answer is closed with its iterator
        next(lines)
        children = _children(program.process.pid)
        program.process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        program.process.send_signal(signal.SIGINT)
        rest = "".join(lines)
    assert '"code":"shutting_down"' in rest
    assert program.end() == (0, "False ended in order\n")
    assert "Traceback" not in program.errors
    _wait_gone(children)


def _wait_gone(pids: list[int]) -> None:
    limit = time.monotonic() + 5
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < limit, "a child process was left behind"
        time.sleep(0.02)


def _children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    assert found, "the engine process should be a child"
    return [int(child) for child in found]
