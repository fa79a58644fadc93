"""``freetoken serve``: the HTTP process. It names what is missing before anything slow, and imports no torch."""

from __future__ import annotations

import logging
import sys

from freetoken.cli.model_argument import engine_start
from freetoken.cli.progress import StartProgress
from freetoken.config.engine_options import CoreOptions
from freetoken.config.facts import find_family
from freetoken.plugin.commands import CommandContext
from freetoken.serve.client import spawn_engine
from freetoken.serve.http.server import bind_socket, serve_http
from freetoken.serve.http.services import Services
from freetoken.serve.limits import ServerLimits
from freetoken.serve.start import checkpoint_facts, open_model
from freetoken.serve.supervisor import Supervisor
from freetoken.serve.text_side import text_side
from freetoken.serve.worker import LOG_FORMAT

WORKER = "freetoken.serve.worker:worker_main"


def serve(context: CommandContext) -> int:
    """Bind the port, read the text side of the checkpoint, then start the engine and serve until a signal."""
    start = engine_start(context)
    options = start.options
    sock = bind_socket(options.host, options.port)
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT, stream=sys.stderr)
    with open_model(start, context.plugins) as checkpoint:
        family = find_family(context.plugins.catalogs.model_families, checkpoint_facts(checkpoint, start.short_name))
        engine = spawn_engine(WORKER, start)  # it imports torch and plans while the tokenizer is made here
        try:
            text = text_side(checkpoint, family)
        except BaseException:
            engine.kill()
            raise
    name = options.served_model_name or start.short_name
    host, port = sock.getsockname()[:2]
    progress = StartProgress(sys.stderr, name, f"http://{host}:{port}")
    supervisor = Supervisor(WORKER, start, on_status=progress.show, spawned=engine)
    services = Services(
        engine=supervisor,
        tokenizer=text.tokenizer,
        template=text.template,
        served_name=name,
        defaults=text.defaults,
        limits=_limits(options),
        api_key=options.api_key,
        profile_endpoint=options.profile_endpoint,
    )
    serve_http(services, options.host, options.port, sock)
    return 0


def _limits(options: CoreOptions) -> ServerLimits:
    return ServerLimits(
        max_body_bytes=options.max_body_bytes,
        max_queue=options.max_queue,
        drain_s=options.drain_timeout_s,
        request_timeout_s=options.request_timeout_s,
    )
