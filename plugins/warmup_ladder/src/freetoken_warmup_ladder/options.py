"""What the ladder can be told."""

from __future__ import annotations

from attrs import frozen

from freetoken.plugin.options import option


@frozen
class LadderOptions:
    """The options of ``warmup-ladder``; every one may be given as a flag, as a variable, or in ``freetoken.toml``."""

    max_tokens: int | None = option(
        None,
        help="warm steps of at most this many tokens; default: the largest prefill chunk. Contexts are never capped",
        unit="tokens",
        low=1,
        aliases=("FREETOKEN_WARMUP_MAX_LEN",),
    )
    workers: int | None = option(
        None,
        help="processes that compile at once; default: the cores, as far as 1.5 GB of memory for each allow",
        low=1,
    )
    skip: bool = option(
        False, help="warm nothing; graphs are captured all the same", aliases=("--skip-prefill-warmup",)
    )
