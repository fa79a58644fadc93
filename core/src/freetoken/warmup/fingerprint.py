"""What a warmed start rests on: once any of these facts changes, what an earlier start proved says nothing."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

from attrs import frozen

from freetoken.vocab.hardware import Device
from freetoken.vocab.plan import Plan

CORE_PACKAGE = "freetoken"
_LIBRARIES = ("torch", "triton")
_IGNORED = frozenset({"TRITON_CACHE_DIR", "TRITON_HOME", "TRITON_DUMP_DIR", "TRITON_OVERRIDE_DIR"})
"""Where caches lie says nothing about what is in them."""


@frozen
class Fingerprint:
    """Facts by name, in order of name."""

    facts: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, facts: Mapping[str, str]) -> Fingerprint:
        return cls(tuple(sorted(facts.items())))

    @property
    def digest(self) -> str:
        """64 hexadecimal digits that stand for all facts."""
        return hashlib.sha256(repr(self.facts).encode()).hexdigest()

    def differences(self, other: Fingerprint) -> tuple[str, ...]:
        """What differs in ``other``, as ``triton: 3.6.0, was 3.7.1``."""
        mine, theirs = dict(self.facts), dict(other.facts)
        names = sorted({*mine, *theirs})
        return tuple(
            f"{name}: {_short(mine.get(name))}, was {_short(theirs.get(name))}"
            for name in names
            if mine.get(name) != theirs.get(name)
        )


def _short(value: str | None) -> str:
    if value is None:
        return "absent"
    return value if len(value) <= 40 else value[:12] + "…"


def take_fingerprint(plan: Plan, plugins: Mapping[str, tuple[str, str]]) -> Fingerprint:
    """The fingerprint of a start. ``plugins`` are the active ones by name: version and module."""
    facts = {
        "core sources": package_digest(CORE_PACKAGE),
        "configuration": configuration_digest(plan),
        "environment": environment_digest(os.environ),
        "ptxas": os.environ.get("TRITON_PTXAS_PATH", "triton's own"),
        **device_facts(plan.device),
        **{name: _version(name) for name in _LIBRARIES},
    }
    for name, (version, module) in plugins.items():
        package = module.partition(".")[0]
        facts[f"plugin {name}"] = version
        if package != CORE_PACKAGE:
            facts[f"plugin {name} sources"] = package_digest(package)
    return Fingerprint.of(facts)


def device_facts(device: Device) -> dict[str, str]:
    """The card, its architecture and multiprocessors, and the driver's version."""
    if device.kind == "cpu":
        return {"device": "cpu"}
    return {
        "device": f"{device.name}, compute capability {device.arch}, {device.multiprocessors} multiprocessors",
        "driver": driver_version(),
    }


def driver_version(root: Path = Path("/")) -> str:
    """The NVIDIA kernel driver's version as it says itself; empty where it is not told."""
    told = root / "proc/driver/nvidia/version"
    try:
        words = told.read_text(encoding="utf-8", errors="replace").split()
    except OSError:
        return ""
    return next((word for word in words if word[:1].isdigit() and "." in word), "")


@cache
def package_digest(package: str) -> str:
    """A digest of all Python sources of a package or module; ``"absent"`` where there is none of that name."""
    spec = importlib.util.find_spec(package)
    if spec is None:
        return "absent"
    folders = [Path(p) for p in spec.submodule_search_locations or ()]
    files = [(path, path.relative_to(folder)) for folder in folders for path in folder.rglob("*.py")]
    if not folders and spec.origin:
        files = [(Path(spec.origin), Path(Path(spec.origin).name))]
    return _digest((str(name), path.read_bytes()) for path, name in sorted(files, key=lambda item: item[1]))


def _digest(pieces: Iterable[tuple[str, bytes]]) -> str:
    whole = hashlib.sha256()
    for name, content in pieces:
        whole.update(f"{name}\0{len(content)}\0".encode() + content)
    return whole.hexdigest()


def configuration_digest(plan: Plan) -> str:
    """Dimensions, caps, dtype and choices: all of a plan that launches can depend on."""
    model = plan.model
    chosen = (
        [(kernel.shape, kernel.choice.name) for kernel in plan.kernels],
        [choice.name for choice in plan.attention],
        plan.moe.name,
        plan.warmup.name,
    )
    sizes = (model.num_layers, model.hidden, model.vocab_size, model.caches, model.attention, model.moe)
    options = sorted((v.owner, v.name, repr(v.value)) for v in plan.options if v.owner != "core")
    whole = (plan.step_space, plan.dtype, plan.page_tokens, model.family, sizes, chosen, options)
    return hashlib.sha256(repr(whole).encode()).hexdigest()


def environment_digest(environment: Mapping[str, str]) -> str:
    """The variables that change what Triton compiles."""
    named = ("TRITON_", "DISABLE_", "USE_IR_LOC", "CUDA_MODULE_LOADING", "FREETOKEN_DEPENDENT_LAUNCH")
    found = [(k, v) for k, v in environment.items() if k.startswith(named) and k not in _IGNORED]
    return hashlib.sha256(repr(sorted(found)).encode()).hexdigest()[:16] if found else "nothing set"


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "absent"
