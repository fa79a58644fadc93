"""The engine around a model that takes no time, and the processes it runs in: what is left is the loop's own cost."""

from __future__ import annotations

import threading
import time
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any, cast

import torch
from attrs import frozen

from freetoken.kv.manager import CacheManager
from freetoken.run.batch_builder import BatchBuilder
from freetoken.run.engine import Engine
from freetoken.run.runner import ModelRunner
from freetoken.run.sampler import Sampler
from freetoken.schedule.engine_core import EngineCore
from freetoken.schedule.scheduler import SchedulerLimits
from freetoken.serve.engine_start import RunningEngine
from freetoken.serve.http.server import HttpServer, bind_socket
from freetoken.serve.http.services import Services
from freetoken.serve.messages import Ready
from freetoken.serve.supervisor import Supervisor
from freetoken.serve.text import ChatTemplate, TextTokenizer
from freetoken.serve.text.token_bytes import byte_level
from freetoken.serve.text.tokenizer_parts import TokenizerParts
from freetoken.serve.worker_loop import WorkerLoop
from freetoken.testing.tiny_tokenizer import END_OF_TURN, tiny_tokenizer
from freetoken.vocab.hardware import Device

VOCAB = 256
PAGE_TOKENS = 16
TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"


@frozen
class NullStart:
    """``model_ms`` is how long the model sleeps in every step, as a model on another device would."""

    streams: int = 32
    max_seq_tokens: int = 4096
    model_ms: float = 0.0
    overlap: bool = False


class NullRunner:
    """Stands for the model's runner: sleeps, and gives logits that nobody looks at. ``slept_s`` adds up the sleep."""

    def __init__(self, start: NullStart) -> None:
        self._logits = torch.zeros(start.streams, VOCAB)
        self._model_s = start.model_ms / 1000
        self.slept_s = 0.0

    def run(self, batch: Any) -> torch.Tensor | None:
        if self._model_s:
            before = time.perf_counter()
            time.sleep(self._model_s)
            self.slept_s += time.perf_counter() - before
        rows = batch.logit_rows.numel()
        return self._logits[:rows] if rows else None


def null_core(start: NullStart) -> tuple[EngineCore, NullRunner]:
    """The real scheduler, cache manager, batch builder and sampler state; tokens are random bytes."""
    runner = NullRunner(start)
    chunk = 2048
    builder = BatchBuilder(torch.device("cpu"), start.streams, start.max_seq_tokens, chunk, PAGE_TOKENS)
    letters = torch.randint(97, 123, (start.streams,))
    sampler = Sampler(VOCAB, "cpu", lambda logits, *_: letters[: len(logits)])
    engine = Engine(cast(ModelRunner, runner), builder, sampler, start.streams, "cpu")
    pages = start.streams * (start.max_seq_tokens // PAGE_TOKENS + 1) + 1
    core = EngineCore(
        engine=engine,
        cache=CacheManager(num_pages=pages, page_tokens=PAGE_TOKENS),
        limits=SchedulerLimits(start.streams, chunk, start.max_seq_tokens, 100.0, PAGE_TOKENS),
        eos_ids=frozenset(),
        vocab_size=VOCAB,
        overlap=start.overlap,
    )
    return core, runner


def null_running(core: EngineCore) -> RunningEngine:
    """``core`` as the worker's loop wants it."""
    built = SimpleNamespace(cache=core.cache, moe=None, plan=SimpleNamespace(device=Device()))
    return RunningEngine(core, cast(Any, built), cast(Any, None))


def null_worker(conn: Connection, start: object) -> None:
    """The engine process's main function: the real loop."""
    assert isinstance(start, NullStart)
    core, _ = null_core(start)
    kv_tokens = core.cache.num_pages * PAGE_TOKENS
    conn.send(Ready("null", start.max_seq_tokens, start.streams, kv_tokens, VOCAB, 0.0))
    WorkerLoop(conn, null_running(core)).run()


def null_http(control: Connection, start: NullStart) -> None:
    """The HTTP process's main function. Sends its port; then answers every message with the CPU seconds it has used."""
    sock = bind_socket("127.0.0.1", 0)
    tokenizer = TextTokenizer(TokenizerParts(tiny_tokenizer(), byte_level, {"eos_token": END_OF_TURN}, eos_ids=(257,)))
    services = Services(
        engine=Supervisor("null_engine:null_worker", start),
        tokenizer=tokenizer,
        template=ChatTemplate({"default": TEMPLATE}, tokenizer.special_tokens),
        served_name="null",
    )
    server = HttpServer(services)

    def answer() -> None:
        control.send(sock.getsockname()[1])
        try:
            while control.recv() is not None:
                control.send(time.process_time())
        except EOFError:
            pass
        server.should_exit = True

    threading.Thread(target=answer, daemon=True).start()
    server.run(sockets=[sock])
