"""The engine's process. It tells what goes wrong at the start, and loops over messages and steps until told to stop.

Nothing here imports torch before ``prepare`` has set going what can run beside that import.
"""

from __future__ import annotations

import logging
import os
import time
from multiprocessing.connection import Connection

from freetoken.config.engine_options import CoreOptions
from freetoken.memory.threads import compute_threads, thread_environment
from freetoken.serve.messages import Progress, StartFailed
from freetoken.serve.prepare import prepare
from freetoken.serve.start import EngineStart
from freetoken.serve.start_clock import StartClock
from freetoken.vocab.errors import CheckpointError, FreeTokenError, Refusal, UsageError
from freetoken.vocab.hardware import Hardware

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_log = logging.getLogger("freetoken.engine")


def worker_main(conn: Connection, start: object) -> None:
    """The process's main function; ``start`` is an ``EngineStart``. Returns when told to, or when the pipe closes."""
    assert isinstance(start, EngineStart)
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
    try:
        _run(conn, start)
    except (UsageError, CheckpointError) as error:
        conn.send(StartFailed(error.refusal, retry=False))
    except FreeTokenError as error:
        _log.exception("the engine could not start")
        conn.send(StartFailed(error.refusal, retry=True))


def set_thread_environment(hardware: Hardware, options: CoreOptions) -> None:
    """How torch's threads wait, before it is imported; what the user has set stays."""
    kind = "cpu" if options.device == "cpu" or not hardware.accelerators else "cuda"
    threads = compute_threads(hardware.cores, options.threads, device_kind=kind)
    for name, value in thread_environment(threads).items():
        os.environ.setdefault(name, value)


def _run(conn: Connection, start: EngineStart) -> None:
    began = time.perf_counter()
    clock = StartClock(lambda phase, part, detail: conn.send(Progress(phase, part, detail)))
    try:
        clock("plugins", 0.0, "")
        prepared = prepare(start)
        set_thread_environment(prepared.hardware, start.options)
        clock("libraries", 0.0, "torch")
        from freetoken.serve.engine_start import start_engine
        from freetoken.serve.worker_loop import WorkerLoop, ready_message

        running = start_engine(start, clock, prepared)
        _log.info("start: %s", clock.summary())
    except FreeTokenError:
        raise
    except Exception as error:
        # A bug or the device's own error; the parent restarts with back-off and stops when it does not help.
        _log.exception("the engine could not start")
        found = f"it failed while starting: {type(error).__name__}: {error}"
        conn.send(StartFailed(Refusal("start the engine", found, "the log has the whole trace"), retry=True))
        return
    conn.send(ready_message(running, time.perf_counter() - began))
    try:
        WorkerLoop(conn, running).run()
    finally:
        running.close()
