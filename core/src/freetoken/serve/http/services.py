"""What the endpoints are given: the engine, the text side, the limits and the books, in one frozen bundle."""

from __future__ import annotations

import time
from typing import cast

from attrs import define, field, frozen
from starlette.requests import HTTPConnection

from freetoken.serve.limits import Load, ServerLimits
from freetoken.serve.metrics import EngineView, ServerMetrics
from freetoken.serve.requestlog import RequestRecord
from freetoken.serve.supervisor import Supervisor
from freetoken.serve.text import ChatTemplate, GenerationDefaults, TextTokenizer

RECORD_KEY = "freetoken.record"
_SMOOTHING = 0.2


@define
class Traffic:
    """Sequences at the engine now, and a running mean of how long an answer took."""

    in_flight: int = 0
    recent_s: float = 0.0

    def enter(self, sequences: int) -> None:
        self.in_flight += sequences

    def leave(self, sequences: int, took_s: float) -> None:
        self.in_flight -= sequences
        self.recent_s += (took_s - self.recent_s) * (_SMOOTHING if self.recent_s else 1.0)

    def load(self) -> Load:
        return Load(self.in_flight, self.recent_s)


@frozen(eq=False)
class Services:
    """``api_key`` ``None`` lets everybody in. ``started_unix`` is the model's ``created``."""

    engine: Supervisor
    tokenizer: TextTokenizer
    template: ChatTemplate
    served_name: str
    defaults: GenerationDefaults = field(factory=GenerationDefaults)
    limits: ServerLimits = field(factory=ServerLimits)
    api_key: str | None = None
    started_unix: int = field(factory=lambda: int(time.time()))
    profile_endpoint: bool = False
    traffic: Traffic = field(factory=Traffic, init=False)
    metrics: ServerMetrics = field(init=False)

    @metrics.default
    def _own_metrics(self) -> ServerMetrics:
        engine = self.engine
        return ServerMetrics(lambda: EngineView(engine.stats, engine.serving, engine.status.restarts))

    @property
    def eos_ids(self) -> frozenset[int]:
        return frozenset((*self.tokenizer.eos_ids, *self.defaults.eos_token_ids))


def services_of(request: HTTPConnection) -> Services:
    """The bundle of the app that serves ``request``."""
    return cast(Services, request.app.state.services)


def record_of(request: HTTPConnection) -> RequestRecord:
    """The record of ``request``, which the gate opened."""
    return cast(RequestRecord, request.scope[RECORD_KEY])
