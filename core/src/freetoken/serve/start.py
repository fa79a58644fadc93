"""What a start needs to know, as plain data that travels to the engine's process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from attrs import frozen

from freetoken.config.choices import Prober
from freetoken.config.engine_options import CoreOptions
from freetoken.config.facts import CheckpointFacts
from freetoken.config.resolve import Inputs, Resolved, resolve
from freetoken.config.sources import Settings
from freetoken.plugin.catalog import Catalogs
from freetoken.plugin.manager import Plugins
from freetoken.plugin.selection import Selection
from freetoken.vocab.errors import Refusal, RefusedPlan
from freetoken.vocab.hardware import Hardware
from freetoken.weights.checkpoint import Checkpoint, open_checkpoint


@frozen
class EngineStart:
    """The plugin selection, every option, and where the model lies. Picklable."""

    selection: Selection
    settings: Settings
    model_path: Path
    short_name: str

    @property
    def options(self) -> CoreOptions:
        return self.settings.core(CoreOptions)


def check_names(options: CoreOptions, catalogs: Catalogs) -> None:
    """Raise for a named backend, strategy or policy that nobody offers, before anything slow is done."""
    for catalog, name in (
        (catalogs.attention_backends, options.attention_backend),
        (catalogs.moe_strategies, options.moe_strategy),
        (catalogs.warmup_policies, options.warmup_policy),
    ):
        if name != "auto":
            catalog.get(name)  # type: ignore[attr-defined]
    for word in options.kernel:
        if "=" in word:
            catalogs.kernels.get(word)


def open_model(start: EngineStart, plugins: Plugins) -> Checkpoint:
    formats = tuple(plugins.catalogs.weight_formats)
    return open_checkpoint(start.model_path, formats, dummy=start.options.load_format == "dummy")


def checkpoint_facts(checkpoint: Checkpoint, short_name: str) -> CheckpointFacts:
    """What planning needs of an opened checkpoint."""
    names = checkpoint.architectures
    if checkpoint.gguf_architecture:
        names = (checkpoint.gguf_architecture,)
    return CheckpointFacts(
        path=str(checkpoint.path),
        short_name=short_name,
        config=checkpoint.config,
        architectures=names,
        index=checkpoint.index,
        dtype=_checkpoint_dtype(checkpoint),
    )


def _checkpoint_dtype(checkpoint: Checkpoint) -> str:
    """The plain format most weights are in; else what the configuration says; else float32 (quantised files)."""
    counts: dict[str, int] = {}
    for info in checkpoint.index.tensors.values():
        counts[info.format] = counts.get(info.format, 0) + info.num_bytes
    common = max(counts, key=lambda f: counts[f]) if counts else ""
    if common in ("float32", "float16", "bfloat16"):
        return common
    config = checkpoint.config
    text = config.get("text_config")
    inner = text if isinstance(text, dict) else {}
    named = config.get("dtype") or config.get("torch_dtype") or inner.get("dtype") or "float32"
    return str(named).removeprefix("torch.")


def make_plan(
    start: EngineStart, plugins: Plugins, checkpoint: Checkpoint, hardware: Hardware, probe: Prober
) -> Resolved:
    """Resolve; raises ``RefusedPlan`` with the refusal's three parts."""
    inputs = Inputs(
        options=start.options,
        facts=checkpoint_facts(checkpoint, start.short_name),
        hardware=hardware,
        catalogs=plugins.catalogs,
        choose=plugins.choose,
        probe=probe,
        options_of=options_by_class(start.settings, plugins),
        option_values=start.settings.public_values,
    )
    result = resolve(inputs)
    if isinstance(result, Refusal):
        raise RefusedPlan(result.asked, result.found, result.fix)
    return result


def options_by_class(settings: Settings, plugins: Plugins) -> Callable[[type | None], object]:
    """Finds the instance of a plugin's option class; ``None`` for no class."""

    def options_of(cls: type | None) -> object:
        if cls is None:
            return None
        owner = next(spec for spec in plugins.catalogs.options if spec.cls is cls)
        return settings.of(owner)

    return options_of
