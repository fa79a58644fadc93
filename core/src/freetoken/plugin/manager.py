"""Loads plugins one by one, each in a guard, and turns what they offer into catalogs.

A plugin that fails is reported against its own name and the others load. There is no global: one ``Plugins`` an engine.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import pluggy
from attrs import define, evolve, field, frozen

from freetoken.plugin import hookspecs
from freetoken.plugin.catalog import Catalog, Catalogs, Offer, offer_key
from freetoken.plugin.checks import check_hooks, collect
from freetoken.plugin.commands import CommandGroup
from freetoken.plugin.markers import ENTRY_POINT_GROUP, PROJECT
from freetoken.plugin.options import option_fields
from freetoken.plugin.selection import Selection
from freetoken.plugin.specs import Candidate, OptionsSpec
from freetoken.vocab import kinds
from freetoken.vocab.errors import FreeTokenError, PluginError, UsageError
from freetoken.vocab.hardware import Hardware
from freetoken.vocab.plan import Plan, Sizing


@frozen
class PluginRecord:
    """One plugin and what became of it. ``state`` is ``"active"``, ``"blocked"`` or ``"failed"``."""

    name: str
    origin: str  # module path
    distribution: str
    version: str
    builtin: bool
    state: str = "active"
    reason: str = ""
    offers: tuple[tuple[str, str], ...] = ()  # (kind's word, name)
    imports_torch: bool = False


@frozen
class _Source:
    name: str
    module: str
    distribution: str = ""
    version: str = ""
    builtin: bool = False


@define
class Plugins:
    """The loaded plugins: their catalogs, their records, and one typed method per hook that is not an offer."""

    manager: pluggy.PluginManager
    selection: Selection
    records: dict[str, PluginRecord]
    catalogs: Catalogs
    _modules: dict[str, ModuleType] = field(factory=dict)

    def choose(self, kind: str, subject: str, candidates: Sequence[Candidate], hardware: Hardware) -> str:
        """The name picked among ``candidates``; ``PluginError`` when a plugin picks something else."""
        picked = self.manager.hook.freetoken_choose(
            kind=kind, subject=subject, candidates=tuple(candidates), hardware=hardware
        )
        if picked not in [c.name for c in candidates]:
            raise PluginError(f"choosing a {kind}", f"freetoken_choose answered {picked!r}, which is no candidate")
        return str(picked)

    def add_commands(self, commands: CommandGroup) -> None:
        """Let every plugin add commands; a plugin that fails here is recorded and its commands are left out."""
        for name in list(self._modules):
            commands.owner = name
            self._tell(name, "freetoken_add_commands", commands=commands)

    def plan_resolved(self, plan: Plan) -> None:
        self._tell_all("freetoken_plan_resolved", plan=plan)

    def ready(self, plan: Plan, sizing: Sizing) -> None:
        self._tell_all("freetoken_ready", plan=plan, sizing=sizing)

    def shutdown(self, plan: Plan) -> None:
        self._tell_all("freetoken_shutdown", plan=plan)

    def _tell_all(self, hook: str, **arguments: object) -> None:
        for name in self._modules:
            self._tell(name, hook, **arguments)

    def _tell(self, name: str, hook: str, **arguments: Any) -> None:
        caller = getattr(self.manager.hook, hook)
        for impl in caller.get_hookimpls():
            if impl.plugin_name != name:
                continue
            try:
                impl.function(**{a: arguments[a] for a in impl.argnames})
            except FreeTokenError:
                raise
            except Exception as error:
                raise PluginError(
                    f"plugin {name}", f"{hook} raised {type(error).__name__}: {error}",
                    f"block it with --plugin no:{name}",
                ) from error  # fmt: skip


def build_plugins(selection: Selection, builtins: Mapping[str, str]) -> Plugins:
    """Load the built-ins (name → module) and every entry point of the group ``freetoken``.

    Raises ``UsageError`` when a plugin that ``selection`` requires is absent or failed.
    """
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(hookspecs)
    loader = _Loader(manager)
    for source in _sources(selection, builtins):
        if source.name in selection.blocked:
            loader.records[source.name] = _record(source, state="blocked")
        else:
            loader.load(source)
    plugins = Plugins(manager, selection, loader.records, loader.catalogs(), loader.modules)
    _check_required(plugins)
    return plugins


def _sources(selection: Selection, builtins: Mapping[str, str]) -> list[_Source]:
    """Built-ins first, then strangers by name: the order decides who keeps a name that two offer."""
    version = _core_version()
    found = [_Source(n, m, "freetoken-core", version, builtin=True) for n, m in sorted(builtins.items())]
    points = sorted(importlib.metadata.entry_points(group=ENTRY_POINT_GROUP), key=lambda p: (p.name, p.value))
    for point in points:
        dist = point.dist
        found.append(_Source(point.name, point.value, dist.name if dist else "", dist.version if dist else ""))
    names = {source.name for source in found}
    # A required name without an entry point may be a plain module on the path: handy while writing a plugin.
    found += [_Source(n, n) for n in sorted(selection.required - names) if _is_module(n)]
    return found


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _core_version() -> str:
    import freetoken

    return freetoken.__version__


def _record(source: _Source, **changes: object) -> PluginRecord:
    base = PluginRecord(source.name, source.module, source.distribution, source.version, source.builtin)
    return evolve(base, **changes)  # type: ignore[arg-type]


@define
class _Loader:
    manager: pluggy.PluginManager
    records: dict[str, PluginRecord] = field(factory=dict)
    modules: dict[str, ModuleType] = field(factory=dict)
    offers: dict[kinds.OfferKind, dict[str, Offer[object]]] = field(
        factory=lambda: {kind: {} for kind in kinds.OFFER_KINDS}
    )
    option_names: dict[str, str] = field(factory=dict)  # every flag, variable and file key → plugin

    def load(self, source: _Source) -> None:
        had_torch = "torch" in sys.modules
        try:
            if source.name in self.records:
                other = self.records[source.name]
                raise PluginError(
                    f"plugin {source.name}",
                    f"two plugins have this name: {other.origin} and {source.module}",
                )
            found = self._accept(source)
        except PluginError as error:
            self._fail(source, error)
            return
        except (Exception, SystemExit) as error:
            reason = f"{source.module} cannot be imported: {type(error).__name__}: {error}"
            self._fail(source, PluginError(f"plugin {source.name}", reason))
            return
        offers = tuple((kind.word, offer_key(spec)) for kind, spec in found)
        self.records[source.name] = _record(
            source, offers=offers, imports_torch=not had_torch and "torch" in sys.modules
        )

    def _accept(self, source: _Source) -> list[tuple[kinds.OfferKind, object]]:
        module = importlib.import_module(source.module)
        try:
            self.manager.register(module, source.name)
        except pluggy.PluginValidationError as error:
            raise PluginError(f"plugin {source.name}", " ".join(str(error).split())) from None
        except ValueError as error:
            raise PluginError(f"plugin {source.name}", str(error)) from None
        check_hooks(self.manager, module, source.name)
        found = [(kind, spec) for kind in kinds.OFFER_KINDS for spec in self._offers_of(source.name, kind)]
        self._claim_names(source.name, found)
        self.modules[source.name] = module
        return found

    def _offers_of(self, name: str, kind: kinds.OfferKind) -> tuple[object, ...]:
        caller = getattr(self.manager.hook, kind.hook)
        impls = [impl for impl in caller.get_hookimpls() if impl.plugin_name == name]
        return tuple(spec for impl in impls for spec in collect(name, kind, impl.function))

    def _claim_names(self, name: str, found: list[tuple[kinds.OfferKind, object]]) -> None:
        """All or nothing: a plugin whose offers clash with somebody's brings none."""
        mine: dict[tuple[str, str], None] = {}
        option_names: dict[str, str] = {}
        for kind, spec in found:
            key = offer_key(spec)
            taken = self.offers[kind].get(key)
            if taken is not None or (kind.hook, key) in mine:
                other = taken.owner if taken is not None else name
                raise PluginError(f"plugin {name}", f"offers the {kind.word} {key!r}, which {other} already offers")
            mine[(kind.hook, key)] = None
            if isinstance(spec, OptionsSpec):
                option_names.update(self._option_names(name, spec, option_names))
        for kind, spec in found:
            self.offers[kind][offer_key(spec)] = Offer(spec, name)
        self.option_names.update(option_names)

    def _option_names(self, name: str, spec: OptionsSpec, own: Mapping[str, str]) -> dict[str, str]:
        names: dict[str, str] = {}
        for option in option_fields(spec):
            for word in (*option.flags, *option.variables, f"freetoken.toml: {option.file_key}"):
                other = self.option_names.get(word) or own.get(word) or names.get(word)
                if other is not None:
                    raise PluginError(f"plugin {name}", f"brings {word}, which {other} already brings")
                names[word] = name
        return names

    def _fail(self, source: _Source, error: PluginError) -> None:
        module = self.manager.get_plugin(source.name)
        if module is not None and source.name not in self.modules:
            self.manager.unregister(name=source.name)
        reason = error.refusal.found + (f" ({error.refusal.fix})" if error.refusal.fix else "")
        name = source.name
        if name in self.records:  # a second plugin of the same name must not hide the first
            name = f"{source.name} [{source.distribution or source.module}]"
        self.records[name] = _record(source, state="failed", reason=reason)

    def catalogs(self) -> Catalogs:
        failures = {n: r.reason for n, r in self.records.items() if r.state == "failed"}

        def catalog(kind: kinds.OfferKind) -> Catalog[Any]:
            return Catalog(kind, self.offers[kind], failures)

        return Catalogs(
            attention_backends=catalog(kinds.ATTENTION_BACKEND),
            moe_strategies=catalog(kinds.MOE_STRATEGY),
            kernels=catalog(kinds.KERNEL),
            warmup_policies=catalog(kinds.WARMUP_POLICY),
            model_families=catalog(kinds.MODEL_FAMILY),
            weight_formats=catalog(kinds.WEIGHT_FORMAT),
            options=catalog(kinds.OPTIONS),
        )


def _check_required(plugins: Plugins) -> None:
    for name in sorted(plugins.selection.required):
        record = plugins.records.get(name)
        if record is None:
            known = ", ".join(sorted(plugins.records))
            raise UsageError(f"--plugin {name}", "no plugin of this name is installed", f"installed: {known}")
        if record.state == "failed":
            raise UsageError(f"--plugin {name}", f"it failed: {record.reason}")
