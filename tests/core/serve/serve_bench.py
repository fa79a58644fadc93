"""A served fake engine: real uvicorn on loopback, a real spawned process, a tokenizer whose tokens are bytes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
from attrs import frozen
from serve_fake_worker import EOS, TARGET, FakeStart
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from freetoken.serve.http.server import HttpServer, bind_socket
from freetoken.serve.http.services import Services
from freetoken.serve.supervisor import RestartPolicy, Supervisor
from freetoken.serve.text import ChatTemplate, TextTokenizer
from freetoken.serve.text.token_bytes import BYTE_TO_CHAR, byte_level
from freetoken.serve.text.tokenizer_parts import TokenizerParts

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' and not m.tool_call_id %}{{ raise_exception('no id') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}\n{% endfor %}[assistant]{% if shout %}!{% endif %}"
)


def byte_tokenizer() -> TextTokenizer:
    """Token ``i`` is byte ``i``; 256 ends a text."""
    vocab = {char: byte for byte, char in BYTE_TO_CHAR.items()}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|end|>", special=True)])
    return TextTokenizer(TokenizerParts(backend, byte_level, {"eos_token": "<|end|>"}, (EOS,)))


@frozen
class Served:
    """A running server, and its insides."""

    base: str
    services: Services
    server: HttpServer

    def http(self, **kwargs: Any) -> httpx.Client:
        return httpx.Client(base_url=self.base, timeout=20, **kwargs)

    def counter(self, name: str) -> float:
        """One of the fake engine's own counters."""
        return dict(self.services.engine.stats.counters).get(name, 0.0)


def wait_until(condition: Callable[[], Any], seconds: float = 15.0) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "it did not happen in time"
        time.sleep(0.005)


def fake_services(start: FakeStart = FakeStart(), policy: RestartPolicy | None = None, **more: Any) -> Services:
    """What the app is given; ``more`` goes to ``Services``."""
    tokenizer = byte_tokenizer()
    return Services(
        engine=Supervisor(TARGET, start, policy or RestartPolicy(first=0.05, longest=0.2, max_failures=3)),
        tokenizer=tokenizer,
        template=ChatTemplate({"default": TEMPLATE}, tokenizer.special_tokens),
        served_name="fake/model",
        **more,
    )


@contextmanager
def serve(
    start: FakeStart = FakeStart(), *, ready: bool = True, policy: RestartPolicy | None = None, **more: Any
) -> Iterator[Served]:
    """A server in a thread, shut down at the end; ``ready`` waits until it serves."""
    services = fake_services(start, policy, **more)
    sock = bind_socket("127.0.0.1", 0)
    server = HttpServer(services)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
    thread.start()
    try:
        wait_until(lambda: server.started)
        if ready:
            wait_until(lambda: services.engine.serving)
        yield Served(f"http://127.0.0.1:{sock.getsockname()[1]}", services, server)
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive(), "the server did not shut down"
