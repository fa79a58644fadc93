"""``GET /health``, ``/ready`` and ``/metrics``: how the server is."""

from __future__ import annotations

import time

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST

from freetoken.serve.http.errors import UNAVAILABLE_RETRY_S
from freetoken.serve.http.services import Services, services_of
from freetoken.serve.supervisor import DEAD, RESTARTING, SERVING, STOPPING

_LIMITS = (
    "max_seq_tokens", "max_prefill_tokens", "max_running_requests", "kv_tokens", "page_tokens", "vocab_size",
)  # fmt: skip


async def health(request: Request) -> Response:
    """200 while there is an engine or hope for one, loading and restarting included; 503 once it has given up."""
    services = services_of(request)
    return JSONResponse(_report(services), 503 if services.engine.status.phase == DEAD else 200)


async def ready(request: Request) -> Response:
    """200 only while requests are taken."""
    services = services_of(request)
    status = services.engine.status
    body = {"ready": services.engine.serving, "phase": status.phase, "progress": round(status.fraction, 4)}
    if status.reason:
        body["reason"] = status.reason
    if services.engine.serving:
        return JSONResponse(body)
    return JSONResponse(body, 503, headers={"Retry-After": str(UNAVAILABLE_RETRY_S)})


async def metrics(request: Request) -> Response:
    """Prometheus' text format; the names are in ``docs/metrics.md``."""
    return Response(services_of(request).metrics.text(), media_type=CONTENT_TYPE_LATEST)


def _report(services: Services) -> dict[str, object]:
    status, stats = services.engine.status, services.engine.stats
    word = {SERVING: "ok", DEAD: "dead", RESTARTING: "restarting", STOPPING: "stopping"}.get(status.phase, "loading")
    report: dict[str, object] = {
        "status": word,
        "model": services.served_name,
        "phase": status.phase,
        "phase_seconds": round(time.monotonic() - status.since, 3),
        "progress": round(status.fraction, 4),
        "detail": status.detail,
        "restarts": status.restarts,
        "running": stats.running,
        "waiting": stats.waiting,
        "kv_pages_used": stats.kv_pages_used,
        "kv_pages_cached": stats.kv_pages_cached,
        "kv_pages_total": stats.kv_pages_total,
        "late_events": {"compiles": stats.late_compiles, "loads": stats.late_loads},
    }
    if status.reason:
        report["reason"] = status.reason
    if status.ready is not None:
        report["start_seconds"] = status.ready.seconds
        report["plugins"] = dict(status.ready.plugins)
        report["warmup_fingerprint"] = status.ready.fingerprint
        limits = {name: getattr(status.ready, name) for name in _LIMITS}
        # Ids that a prompt may hold: many models have rows for more than their tokenizer knows.
        limits["vocab_size"] = min(limits["vocab_size"], services.tokenizer.vocab_size)
        report["limits"] = limits
    return report
