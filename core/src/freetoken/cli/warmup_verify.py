"""``freetoken warmup verify``: probe a server over HTTP and store what that proved."""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from freetoken.cli.warmup_prober import Prober
from freetoken.config.engine_options import CoreOptions
from freetoken.config.sources import OptionTable, Settings
from freetoken.plugin.commands import CommandContext
from freetoken.vocab.errors import EngineError, UsageError
from freetoken.warmup.certificate import Certificate, to_json
from freetoken.warmup.manifest import ManifestStore, default_cache_dir, read_manifest

_log = logging.getLogger("freetoken.warmup")
_START_LIMIT_S = 1800.0


def verify(context: CommandContext) -> int:
    """Exit code 0 when certified, 1 when not."""
    args, settings = context.args, context.settings
    options = settings.core(CoreOptions)
    asked = args.model_argument
    if args.probes < 1:
        raise UsageError(f"--probes {args.probes}", "at least one is needed")
    if asked is not None and asked.startswith(("http://", "https://")):
        certificate = _probe(asked.rstrip("/"), options, args)
    else:
        with _server(context, asked) as url:
            certificate = _probe(url, options, args)
    path = store(default_cache_dir(options.cache_dir), certificate)
    print(json.dumps(to_json(certificate), indent=1) if args.json else f"{certificate}\nstored in {path}")
    return 0 if certificate.passes else 1


def _probe(url: str, options: CoreOptions, args: Any) -> Certificate:
    def progress(done: int, words: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\x1b[K{done} of {args.probes}  {words}", end="", file=sys.stderr, flush=True)

    certificate = Prober(url, options.api_key).run(args.probes, args.seed, progress)
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr)
    return certificate


def store(cache_dir: Path, certificate: Certificate) -> Path:
    """Into the manifest of the start that was probed; beside the manifests where that is not on this machine."""
    manifests = ManifestStore(cache_dir)
    for path in manifests.paths():
        found = read_manifest(path).manifest
        if found is not None and certificate.fingerprint and found.fingerprint.digest == certificate.fingerprint:
            return manifests.add_certificate(found, to_json(certificate))
    manifests.folder.mkdir(parents=True, exist_ok=True)
    name = certificate.fingerprint[:16] or "unknown"
    path = manifests.folder / f"certificate-{name}.cert"
    path.write_text(json.dumps(to_json(certificate), indent=1), encoding="utf-8")
    return path


@contextmanager
def _server(context: CommandContext, model: str | None) -> Iterator[str]:
    """A server of this very command line on a free port; its log is shown when it does not come up."""
    port = _free_port()
    # The command's own context has the table of options; the protocol that plugins see does not.
    flags = given_flags(context.settings, context.table, model, port)  # type: ignore[attr-defined]
    selection = context.plugins.selection
    words = (*sorted(selection.required), *(f"no:{name}" for name in sorted(selection.blocked)))
    command = [sys.executable, "-m", "freetoken", "serve", *flags, *(w for word in words for w in ("--plugin", word))]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=dict(os.environ))
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_ready(url, process)
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


def _wait_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    prober, limit = Prober(url, None), time.monotonic() + _START_LIMIT_S
    while time.monotonic() < limit:
        if process.poll() is not None:
            raise EngineError("the server to verify", f"it ended with status {process.returncode}, see its log above")
        if prober.ready():
            return
        time.sleep(0.2)
    raise EngineError("the server to verify", f"it was not ready after {_START_LIMIT_S:.0f} s, see its log above")
