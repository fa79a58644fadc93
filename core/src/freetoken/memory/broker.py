"""The memory broker: do the claims of all parts fit, and if not, what would make them. Pure arithmetic with reasons."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from attrs import frozen

from freetoken.vocab.errors import Refusal
from freetoken.vocab.hardware import Device
from freetoken.vocab.memory import MemoryClaim
from freetoken.vocab.units import format_bytes

DEVICE, HOST = "device", "host"


@frozen
class Remedy:
    """An option that would free memory: the text to type, and how many bytes of ``where`` it frees."""

    option: str
    frees_bytes: int
    where: str = DEVICE


@frozen
class Fit:
    """Claims that fit: ``needed_bytes`` of ``available_bytes``."""

    needed_bytes: int
    available_bytes: int
    because: str

    @property
    def spare_bytes(self) -> int:
        return self.available_bytes - self.needed_bytes


@frozen
class KVFit:
    """How many tokens of K and V fit, in whole pages and without the scratch page, and why not more."""

    tokens: int
    because: str


def steady_bytes(claims: Iterable[MemoryClaim]) -> int:
    """Bytes that stay taken while serving."""
    return sum(claim.steady_bytes for claim in claims)


def needed_bytes(claims: Iterable[MemoryClaim]) -> int:
    """Bytes that must be there for ``claims`` to be met: every part's worst moment, all at once.

    Parts do peak together (a step's activations stand beside a backend's scratch and a fetch in flight), and nobody
    declares which do not, so the sum of the peaks is what is sure to be enough.
    """
    return sum(claim.worst_bytes for claim in claims)


def claims_on(claims: Iterable[MemoryClaim], where: str, device: Device) -> tuple[MemoryClaim, ...]:
    """The claims on ``where``. On a CPU both places are one: all claims are on the device and none on the host."""
    if device.kind == "cpu":
        return tuple(claims) if where == DEVICE else ()
    return tuple(claim for claim in claims if claim.where == where)


def fit(
    claims: Sequence[MemoryClaim], available_bytes: int, *, place: str = "device memory",
    remedies: Sequence[Remedy] = (),
) -> Fit | Refusal:  # fmt: skip
    """Whether ``claims`` fit into ``available_bytes`` of ``place``; if not, the numbers and the options that help."""
    needed = needed_bytes(claims)
    text = f"{format_bytes(needed)} of {format_bytes(available_bytes)} {place}"
    if needed <= available_bytes:
        return Fit(needed, available_bytes, text)
    short = needed - available_bytes
    return Refusal(
        asked=f"a plan that takes {format_bytes(needed)} of {place}",
        found=f"{format_bytes(available_bytes)} may be taken, {format_bytes(short)} too little: {list_claims(claims)}",
        fix=_advice(short, remedies),
    )


def fit_machine(
    claims: Sequence[MemoryClaim], device: Device, device_bytes: int, host_bytes: int, *,
    remedies: Sequence[Remedy] = (),
) -> tuple[Fit, ...] | Refusal:  # fmt: skip
    """``fit`` for the device and, where the host is another memory, for the host; the first refusal counts."""
    fits = []
    for where, available, place in (
        (DEVICE, device_bytes, f"{device.torch_name} memory"),
        (HOST, host_bytes, "host memory"),
    ):
        some = claims_on(claims, where, device)
        answer = fit(some, available, place=place, remedies=_remedies_on(remedies, where, device))
        if isinstance(answer, Refusal):
            return answer
        if some:
            fits.append(answer)
    return tuple(fits)


def kv_tokens_that_fit(
    claims: Sequence[MemoryClaim], available_bytes: int, *, kv_token_bytes: int, page_tokens: int,
    wanted_tokens: int, least_tokens: int = 1, remedies: Sequence[Remedy] = (),
) -> KVFit | Refusal:  # fmt: skip
    """The KV tokens that fit beside ``claims``: ``wanted_tokens`` if possible, never fewer than ``least_tokens``.

    Whole pages; the scratch page is paid for and not counted.
    """
    wanted_pages = -(-wanted_tokens // page_tokens)
    if kv_token_bytes == 0:
        return KVFit(wanted_pages * page_tokens, "the model keeps no K and V")
    page_bytes = page_tokens * kv_token_bytes
    left = available_bytes - needed_bytes(claims)
    pages = left // page_bytes - 1
    if pages * page_tokens < least_tokens:
        need = (-(-least_tokens // page_tokens) + 1) * page_bytes
        return Refusal(
            asked=f"a KV cache for {least_tokens} tokens",
            found=f"it takes {format_bytes(need)}; {format_bytes(max(left, 0))} of {format_bytes(available_bytes)} "
            f"are left beside {list_claims(claims)}",
            fix=_advice(need - left, remedies),
        )
    if pages >= wanted_pages:
        return KVFit(wanted_pages * page_tokens, f"as many as are wanted, {format_bytes(wanted_pages * page_bytes)}")
    return KVFit(pages * page_tokens, f"as many as fit into the {format_bytes(left)} left")


def list_claims(claims: Sequence[MemoryClaim]) -> str:
    """The claims in words, the largest first."""
    parts = []
    for claim in sorted(claims, key=lambda c: (-c.worst_bytes, c.owner, c.what)):
        transient = claim.worst_bytes - claim.steady_bytes
        more = f" and {format_bytes(transient)} at the peak" if transient and claim.steady_bytes else ""
        size = claim.steady_bytes or transient
        parts.append(f"{claim.owner} {format_bytes(size)}{more} ({claim.what})")
    return "; ".join(parts) or "nothing else"


def _remedies_on(remedies: Sequence[Remedy], where: str, device: Device) -> tuple[Remedy, ...]:
    if device.kind == "cpu":
        return tuple(remedies)
    return tuple(remedy for remedy in remedies if remedy.where == where)


def _advice(short_bytes: int, remedies: Sequence[Remedy]) -> str:
    """Each option that is enough by itself; failing that, the fewest together; failing that, what all would free."""
    ranked = sorted((r for r in remedies if r.frees_bytes > 0), key=lambda r: (-r.frees_bytes, r.option))
    enough = [r for r in ranked if r.frees_bytes >= short_bytes]
    if enough:
        return "use " + ", or ".join(_described(r) for r in reversed(enough))
    together: list[Remedy] = []
    for remedy in ranked:
        together.append(remedy)
        if sum(r.frees_bytes for r in together) >= short_bytes:
            return "use together " + " and ".join(_described(r) for r in together)
    if ranked:
        freed = format_bytes(sum(r.frees_bytes for r in ranked))
        return f"no option is enough: {' and '.join(_described(r) for r in ranked)} free {freed}; use a smaller model"
    return "use a smaller model, or a machine with more memory"


def _described(remedy: Remedy) -> str:
    return f"{remedy.option} (frees {format_bytes(remedy.frees_bytes)})"
