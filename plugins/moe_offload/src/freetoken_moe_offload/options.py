"""The options of the strategy ``offload``."""

from __future__ import annotations

from attrs import frozen

from freetoken.plugin.options import option

POLICIES = ("lfu-decay", "lru")


@frozen
class OffloadOptions:
    """How many experts the device holds, which leave first, and how much of a prompt passes a layer at once."""

    slots: int | None = option(
        None, help="experts kept on the device, over all layers; default: as many as fit", unit="experts", low=1
    )
    fraction: float | None = option(None, help="share of all experts kept on the device", low=0.0, high=1.0)
    memory_bytes: int | None = option(
        None, help="device memory for experts and what moves them, all included", unit="bytes", low=1
    )
    policy: str = option(
        POLICIES[0], choices=POLICIES,
        help="which expert leaves the device first: the least often used of late, or the longest unused",
    )  # fmt: skip
    window_tokens: int = option(
        32768, help="most tokens of one prompt that pass a layer before the next; each expert crosses once a window",
        unit="tokens", low=1,
    )  # fmt: skip
    foresee: bool = option(
        True, help="within a long prompt, fetch what the next layer is all but sure to need while this one computes"
    )
