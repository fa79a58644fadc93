"""``freetoken warmup verify``: probe a server over HTTP and store what that proved."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from freetoken.cli.verify_progress import LogTail, ProbeProgress
from freetoken.cli.warmup_prober import Prober, Stopped
from freetoken.config.engine_options import CoreOptions
from freetoken.config.sources import OptionTable, Settings
from freetoken.plugin.commands import CommandContext
from freetoken.serve.child import die_with_parent
from freetoken.vocab.errors import EngineError, UsageError
from freetoken.warmup.certificate import Certificate, to_json
from freetoken.warmup.manifest import ManifestStore, default_cache_dir, read_manifest

_log = logging.getLogger("freetoken.warmup")
_START_LIMIT_S = 1800.0


def verify(context: CommandContext) -> int:
    """Exit code 0 when certified, 1 when not. What ends it early still leaves what was proven until then."""
    args, settings = context.args, context.settings
    options = settings.core(CoreOptions)
    asked = args.model_argument
    if args.probes < 1:
        raise UsageError(f"--probes {args.probes}", "at least one is needed")
    until = None if args.time_limit is None else time.monotonic() + args.time_limit
    progress = ProbeProgress(sys.stderr, args.probes)
    certificate: Certificate | None = None
    try:
        with sigterm_stops():
            if asked is not None and asked.startswith(("http://", "https://")):
                certificate = _probe(asked.rstrip("/"), options, args, progress, until)
            else:
                with _server(context, asked, progress, until) as url:
                    certificate = _probe(url, options, args, progress, until)
                    progress.say("the probes are over; ending the server")
    except Stopped as stop:
        if certificate is None:
            heard = progress.last or "nothing"
            print(f"not certified: 0 of {args.probes} probes: {stop}; the last that was heard: {heard}")
            return 1
    assert certificate is not None  # any other end is an exception
    path = store(default_cache_dir(options.cache_dir), certificate)
    print(json.dumps(to_json(certificate), indent=1) if args.json else f"{certificate}\nstored in {path}", flush=True)
    if certificate.stopped:
        print(certificate.stopped, file=sys.stderr)
    return 0 if certificate.passes else 1


def _probe(url: str, options: CoreOptions, args: Any, progress: ProbeProgress, until: float | None) -> Certificate:
    prober = Prober(url, options.api_key, until)
    try:
        return prober.run(args.probes, args.seed, progress, args.profiled)
    finally:
        progress.close()


@contextmanager
def sigterm_stops() -> Iterator[None]:
    """The first SIGTERM is raised as ``Stopped``, so that what is known by then is told; further ones are not heard
    (``timeout`` sends two). Elsewhere than in the main thread nothing is changed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, _frame: object) -> None:
        signal.signal(number, lambda *_: None)
        raise Stopped("SIGTERM came")

    earlier = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, earlier)


def store(cache_dir: Path, certificate: Certificate) -> Path:
    """Into the manifest of the start that was probed; beside the manifests where that is not on this machine, or where
    the run did not get to its end: what an earlier one proved stays."""
    manifests = ManifestStore(cache_dir)
    for path in () if certificate.stopped or not certificate.fingerprint else manifests.paths():
        found = read_manifest(path).manifest
        if found is not None and found.fingerprint.digest == certificate.fingerprint:
            return manifests.add_certificate(found, to_json(certificate))
    manifests.folder.mkdir(parents=True, exist_ok=True)
    name = certificate.fingerprint[:16] or "unknown"
    path = manifests.folder / f"certificate-{name}.cert"
    path.write_text(json.dumps(to_json(certificate), indent=1), encoding="utf-8")
    return path


@contextmanager
def _server(context: CommandContext, model: str | None, progress: ProbeProgress, until: float | None) -> Iterator[str]:
    """A server of this very command line on a free port; its phases and warnings are shown while it starts, and its
    whole log when it does not come up. It ends with this process, and hears no Ctrl-C that was meant for it."""
    port = _free_port()
    # The command's own context has the table of options; the protocol that plugins see does not.
    flags = given_flags(context.settings, context.table, model, port)  # type: ignore[attr-defined]
    selection = context.plugins.selection
    words = (*sorted(selection.required), *(f"no:{name}" for name in sorted(selection.blocked)))
    command = [
        sys.executable, "-m", "freetoken", "serve", *flags, *(w for word in words for w in ("--plugin", word)),
        "--profile-endpoint",
    ]  # fmt: skip
    parent = os.getpid()
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, "PYTHONUNBUFFERED": "1"},
            process_group=0, preexec_fn=lambda: die_with_parent(parent),
        )  # fmt: skip
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_ready(url, process, LogTail(log.fileno()), progress, until)
            yield url
        except EngineError as error:
            log.seek(0)
            print(log.read().decode(errors="replace"), file=sys.stderr)
            raise error from None
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def given_flags(settings: Settings, table: OptionTable, model: str | None, port: int) -> list[str]:
    """The flags that were given here, for the server; variables and files reach it by themselves."""
    by_name = {(f.owner, f.name): f for f in table.fields}
    flags: list[str] = []
    for key, value in settings.values.items():
        field = by_name[key]
        if not value.origin.startswith("--") or key in (("core", "port"), ("core", "host"), ("core", "model")):
            continue
        if isinstance(value.value, bool):
            flags.append(field.flag if value.value else "--no-" + field.flag[2:])
        elif isinstance(value.value, tuple):
            flags += [word for item in value.value for word in (field.flag, str(item))]
        else:
            flags += [field.flag, str(value.value)]
    chosen = model if model is not None else settings.core(CoreOptions).model
    return [*flags, *(["--model", chosen] if chosen is not None else []), "--host", "127.0.0.1", "--port", str(port)]


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def _wait_ready(
    url: str, process: subprocess.Popen[bytes], log: LogTail, progress: ProbeProgress, until: float | None
) -> None:
    prober, limit = Prober(url, None), time.monotonic() + _START_LIMIT_S
    while time.monotonic() < limit:
        ready = prober.ready()
        for line in log.news():
            progress.say(f"server: {line}")
        if ready:
            return
        if process.poll() is not None:
            raise EngineError("the server to verify", f"it ended with status {process.returncode}, see its log above")
        if until is not None and time.monotonic() >= until:
            raise Stopped("the time that was given was over before the server was ready")
        time.sleep(0.1)
    raise EngineError("the server to verify", f"it was not ready after {_START_LIMIT_S:.0f} s, see its log above")
