"""``freetoken warmup report``: what earlier starts took, kernel by kernel, and what they met too late."""

from __future__ import annotations

import json
from collections import Counter

from freetoken.config.engine_options import CoreOptions
from freetoken.plugin.commands import CommandContext
from freetoken.run.warmup import describe_point
from freetoken.warmup.keys import kernel_of
from freetoken.warmup.manifest import Manifest, ManifestStore, default_cache_dir, read_manifest, to_json


def report(context: CommandContext) -> int:
    """One section a manifest, newest first; of one model where it is named."""
    options = context.settings.core(CoreOptions)
    store = ManifestStore(default_cache_dir(options.cache_dir))
    wanted = context.args.model_argument
    found, damaged = [], []
    for path in store.paths():
        one = read_manifest(path)
        if one.manifest is None:
            damaged.append(one.because)
        elif wanted is None or one.manifest.model == wanted:
            found.append(one.manifest)
    found.sort(key=lambda m: m.written, reverse=True)
    if context.args.json:
        print(json.dumps([summary(m) for m in found], indent=1))
        return 0
    if not found:
        print(f"no manifest{f' of {wanted}' if wanted else ''} in {store.folder}: nothing was warmed here yet")
    print("\n\n".join(report_text(m) for m in found))
    for reason in damaged:
        print(f"ignored: {reason}")
    return 0


def report_text(manifest: Manifest) -> str:
    """Seconds and keys by phase and by kernel, the late events, and the certificate."""
    facts = dict(manifest.fingerprint.facts)
    state = "proven" if manifest.proven else "not proven"
    lines = [f"{manifest.model}, {manifest.written}, {facts.get('device', '')}, {len(manifest.compiled)} keys, {state}"]
    phases = [f"{name} {seconds:.2f} s" for name, seconds in manifest.seconds.items() if seconds >= 0.005]
    lines.append("  last start: " + (", ".join(phases) or "nothing to do"))
    keys = Counter(kernel_of(key) for key in manifest.compiled)
    for kernel, count in sorted(keys.items(), key=lambda item: (-manifest.kernel_seconds.get(item[0], 0.0), item[0])):
        seconds = manifest.kernel_seconds.get(kernel)
        took = f"{seconds:7.2f} s compiling" if seconds is not None else "compiled by an earlier start"
        lines.append(f"  {kernel:<64} {count:>3} keys  {took}")
    lines.append(f"  late: {len(manifest.late) or 'nothing'}")
    lines += [f"    {describe_point(note.point)}: {', '.join(note.events)}" for note in manifest.late]
    lines.append(f"  certificate: {_certificate(manifest)}")
    return "\n".join(lines)


def _certificate(manifest: Manifest) -> str:
    found = manifest.certificate
    if found is None:
        return "none; run `freetoken warmup verify`"
    verdict = "passes" if found.get("passes") else "does not pass"
    return f"{verdict}, {found.get('probes')} probes up to {found.get('up_to_tokens')} tokens, {found.get('written')}"


def summary(manifest: Manifest) -> dict[str, object]:
    """The manifest without its survey, which is for machines."""
    return {name: value for name, value in to_json(manifest).items() if name != "survey"}
