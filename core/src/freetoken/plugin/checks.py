"""Is a plugin module sound: its hooks exist, its signatures can be called, its offers are of the right kind."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import pluggy

from freetoken.plugin import specs
from freetoken.plugin.options import option_fields
from freetoken.vocab import kinds
from freetoken.vocab.errors import PluginError
from freetoken.vocab.ops import OPS

_SPEC_CLASS: dict[kinds.OfferKind, type] = {
    kinds.ATTENTION_BACKEND: specs.AttentionBackendSpec,
    kinds.MOE_STRATEGY: specs.MoEStrategySpec,
    kinds.KERNEL: specs.KernelSpec,
    kinds.WARMUP_POLICY: specs.WarmupPolicySpec,
    kinds.MODEL_FAMILY: specs.ModelFamilySpec,
    kinds.WEIGHT_FORMAT: specs.WeightFormatSpec,
    kinds.OPTIONS: specs.OptionsSpec,
}


def check_hooks(manager: pluggy.PluginManager, plugin: object, name: str) -> None:
    """Every hook implementation of ``plugin`` has a spec and can be called by keyword.

    Raises ``PluginError`` naming the hook and, for a misspelt one, the closest that exists.
    """
    callers = manager.get_hookcallers(plugin) or []
    known = [h for h in dir(manager.hook) if h.startswith("freetoken_") and getattr(manager.hook, h).has_spec()]
    if not callers:
        raise PluginError(f"plugin {name}", "it implements no hook", "mark its functions with freetoken.hookimpl")
    for caller in callers:
        if not caller.has_spec():
            raise PluginError(f"plugin {name}", f"unknown hook {caller.name!r}", _did_you_mean(caller.name, known))
        for impl in caller.get_hookimpls():
            if impl.plugin is plugin:
                _check_signature(name, caller.name, impl)


def _check_signature(name: str, hook: str, impl: pluggy.HookImpl) -> None:
    if impl.kwargnames:
        raise PluginError(
            f"plugin {name}", f"{hook} gives a default to {', '.join(impl.kwargnames)}, which would never be filled",
            "remove the default",
        )  # fmt: skip
    parameters = inspect.signature(impl.function).parameters.values()
    bad = [p.name for p in parameters if p.kind not in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if bad:
        raise PluginError(
            f"plugin {name}", f"{hook} takes {', '.join(bad)} as keyword-only or variadic", "use plain parameters"
        )


def collect(name: str, kind: kinds.OfferKind, impl: Any) -> tuple[object, ...]:
    """What one offer hook of one plugin returns, checked; any failure becomes a ``PluginError`` naming the hook."""
    try:
        result = impl()
    except Exception as error:
        raise PluginError(f"plugin {name}", f"{kind.hook} raised {type(error).__name__}: {error}") from error
    if not isinstance(result, Iterable) or isinstance(result, str):
        raise PluginError(f"plugin {name}", f"{kind.hook} returned {type(result).__name__}", "return a list of specs")
    offers = tuple(result)
    for offer in offers:
        if not isinstance(offer, _SPEC_CLASS[kind]):
            raise PluginError(
                f"plugin {name}", f"{kind.hook} offered a {type(offer).__name__}",
                f"it must be a {_SPEC_CLASS[kind].__name__}",
            )  # fmt: skip
        _check_offer(name, offer)
    return offers


def _check_offer(name: str, offer: object) -> None:
    if isinstance(offer, specs.OptionsSpec):
        option_fields(offer)
    if isinstance(offer, specs.KernelSpec) and offer.op not in OPS:
        raise PluginError(f"plugin {name}", f"kernel {offer.name!r} implements {offer.op!r}, which is no op")


def _did_you_mean(word: str, known: list[str]) -> str:
    from difflib import get_close_matches  # slow to import, and only a broken plugin needs it

    close = get_close_matches(word, known, n=1)
    return f"did you mean {close[0]}?" if close else f"the hooks are {', '.join(known)}"
