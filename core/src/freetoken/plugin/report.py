"""The rows of ``freetoken plugins``: every plugin, its state, and what it offers with each offer's availability."""

from __future__ import annotations

from collections.abc import Callable

from attrs import frozen

from freetoken.plugin.manager import PluginRecord, Plugins
from freetoken.plugin.probe import deep_probe
from freetoken.vocab.availability import Availability
from freetoken.vocab.hardware import Hardware


@frozen
class OfferRow:
    kind: str
    name: str
    summary: str
    available: Availability


@frozen
class PluginRow:
    """``state`` reads ``active``, ``blocked``, ``failed: …`` or ``unavailable: … → fix``."""

    record: PluginRecord
    state: str
    offers: tuple[OfferRow, ...]


def plugin_rows(plugins: Plugins, hardware: Hardware, deep: bool = False) -> tuple[PluginRow, ...]:
    """One row a plugin, strangers first, then by name. ``deep`` also runs the probes that need a child process."""
    records = sorted(plugins.records.items(), key=lambda item: (item[1].builtin, item[0]))
    return tuple(_row(plugins, name, record, hardware, deep) for name, record in records)


def _row(plugins: Plugins, name: str, record: PluginRecord, hardware: Hardware, deep: bool) -> PluginRow:
    if record.state != "active":
        state = record.state + (f": {record.reason}" if record.reason else "")
        return PluginRow(record, state, ())
    offers = tuple(_offers(plugins, name, hardware, deep))
    broken = [o.available for o in offers if not o.available]
    state = str(broken[0]) if broken and len(broken) == len(offers) else "active"
    return PluginRow(record, state, offers)


def _offers(plugins: Plugins, owner: str, hardware: Hardware, deep: bool) -> list[OfferRow]:
    catalogs = plugins.catalogs
    rows = []
    for catalog in (
        catalogs.attention_backends,
        catalogs.moe_strategies,
        catalogs.kernels,
        catalogs.warmup_policies,
        catalogs.model_families,
        catalogs.weight_formats,
        catalogs.options,
    ):
        for key, offer in catalog.offers.items():
            if offer.owner == owner:
                spec = offer.spec
                available = availability(spec, hardware, deep)
                rows.append(OfferRow(catalog.kind.word, key, str(getattr(spec, "summary", "")), available))
    return rows


def availability(spec: object, hardware: Hardware, deep: bool) -> Availability:
    """Can an offer run on this machine: its devices, its cheap probe, and its deep one when asked."""
    devices = getattr(spec, "devices", None)
    if devices is not None and not any(hardware.device(kind) for kind in devices):
        return Availability.no(f"it runs on {', '.join(sorted(devices))}, which this machine has not")
    probe: Callable[[Hardware], Availability] | None = getattr(spec, "probe", None)
    answer = probe(hardware) if probe is not None else Availability.yes()
    target = getattr(spec, "deep_probe", "")
    return deep_probe(target, hardware) if answer and deep and target else answer
