"""The core's answer to ``freetoken_choose``: the first candidate, which is the best ranked. Anybody may overrule it."""

from __future__ import annotations

from collections.abc import Sequence

from freetoken.plugin.markers import hookimpl
from freetoken.plugin.specs import Candidate


@hookimpl(trylast=True)
def freetoken_choose(candidates: Sequence[Candidate]) -> str | None:
    return candidates[0].name
