"""The first moments of an engine process, before torch: plugins, hardware, and the probes that need a child process."""

from __future__ import annotations

import logging
import threading

from attrs import frozen

from freetoken.builtin import BUILTINS
from freetoken.config.choices import Prober
from freetoken.memory.hardware import probe_hardware
from freetoken.plugin.catalog import Catalogs
from freetoken.plugin.manager import Plugins, build_plugins
from freetoken.plugin.report import availability
from freetoken.serve.start import EngineStart
from freetoken.vocab.availability import Availability
from freetoken.vocab.hardware import Hardware

_log = logging.getLogger("freetoken.engine")


class DeepProbes:
    """Answers whether an offer can run here. Each package's deep probe runs once, in a child, from the beginning on:
    importing torch takes as long as they do, so nobody waits for them."""

    def __init__(self, hardware: Hardware, catalogs: Catalogs) -> None:
        self._hardware = hardware
        self._answers: dict[str, Availability] = {}
        self._threads: dict[str, threading.Thread] = {}
        for catalog in (catalogs.attention_backends, catalogs.moe_strategies, catalogs.kernels):
            for spec in catalog:  # type: ignore[attr-defined]
                self._begin(spec)

    def _begin(self, spec: object) -> None:
        target = str(getattr(spec, "deep_probe", ""))
        if target and target not in self._threads and availability(spec, self._hardware, deep=False):
            thread = threading.Thread(target=self._ask, args=(target, spec), daemon=True, name=f"probe-{target}")
            self._threads[target] = thread
            thread.start()

    def _ask(self, target: str, spec: object) -> None:
        try:
            self._answers[target] = availability(spec, self._hardware, deep=True)
        except Exception as error:  # for whoever asks for the answer: this thread has nobody to raise it to
            _log.exception("the deep probe %s", target)
            self._answers[target] = Availability.no(f"its probe could not be asked: {type(error).__name__}: {error}")

    def __call__(self, spec: object) -> Availability:
        """The answer for one offer; waits for its package's child where that still runs."""
        shallow = availability(spec, self._hardware, deep=False)
        target = str(getattr(spec, "deep_probe", ""))
        if not shallow or not target:
            return shallow
        self._begin(spec)
        self._threads[target].join()
        return self._answers[target]


def shallow_probe(hardware: Hardware) -> Prober:
    """Answers from declared facts and cheap probes alone."""
    return lambda spec: availability(spec, hardware, deep=False)


@frozen(eq=False)
class Prepared:
    """What a start has before torch is imported."""

    plugins: Plugins
    hardware: Hardware
    probe: DeepProbes


def prepare(start: EngineStart, plugins: Plugins | None = None) -> Prepared:
    """Load the plugins (unless given), look at the machine, and set the probes going."""
    loaded = plugins if plugins is not None else build_plugins(start.selection, BUILTINS)
    options = start.options
    hardware = probe_hardware(accelerators=options.device != "cpu", host_memory_bytes=options.host_memory_bytes)
    return Prepared(loaded, hardware, DeepProbes(hardware, loaded.catalogs))
