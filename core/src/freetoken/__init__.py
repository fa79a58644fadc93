"""FreeToken: an LLM serving engine for one machine, in which everything on the hot path is a plugin.

Plugin authors import from here: ``hookimpl``, ``option`` and the spec classes in ``freetoken.plugin.specs``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from freetoken.plugin.markers import hookimpl
from freetoken.plugin.options import option
from freetoken.vocab.sampling import SamplingParams

if TYPE_CHECKING:
    from freetoken.serve.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__", "hookimpl", "option"]


def __getattr__(name: str) -> Any:
    # LLM pulls in torch; everything else here must not.
    if name == "LLM":
        from freetoken.serve.llm import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
