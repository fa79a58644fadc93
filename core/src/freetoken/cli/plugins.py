"""``freetoken plugins``: every plugin, its version, its state, and what it offers. Never imports torch."""

from __future__ import annotations

import json

from freetoken.memory.hardware import probe_hardware
from freetoken.plugin.commands import CommandContext
from freetoken.plugin.report import PluginRow, plugin_rows


def plugins(context: CommandContext) -> int:
    """Without ``--all`` only what was installed on top of the core, and everything that is not well."""
    deep = bool(context.args.all)
    rows = plugin_rows(context.plugins, probe_hardware(), deep=deep)
    if not deep:
        rows = tuple(r for r in rows if not r.record.builtin or r.state != "active")
    if context.args.json:
        print(json.dumps([_as_json(row) for row in rows], indent=2))
        return 0
    if not rows:
        print("Only the built-in plugins are installed; --all lists them.")
    for row in rows:
        _print(row, deep)
    return 0


def _print(row: PluginRow, deep: bool) -> None:
    record = row.record
    origin = f"{record.distribution} {record.version}".strip() or record.origin
    print(f"{record.name}  ({origin})  {row.state}")
    if record.imports_torch:
        print("  note: importing it imports torch, which slows every command")
    by_kind: dict[str, list[str]] = {}
    for offer in row.offers:
        text = offer.name if offer.available or row.state != "active" else f"{offer.name} ({offer.available})"
        by_kind.setdefault(offer.kind, []).append(text)
        if deep and offer.summary and offer.kind not in ("kernel", "weight format"):
            by_kind[offer.kind][-1] += f" ({offer.summary})"
    for kind, names in by_kind.items():
        print(f"  {kind}: {', '.join(names)}")


def _as_json(row: PluginRow) -> dict[str, object]:
    record = row.record
    return {
        "name": record.name,
        "distribution": record.distribution,
        "version": record.version,
        "origin": record.origin,
        "builtin": record.builtin,
        "state": row.state,
        "offers": [
            {"kind": o.kind, "name": o.name, "summary": o.summary, "available": o.available.ok, "why": str(o.available)}
            for o in row.offers
        ],
    }
