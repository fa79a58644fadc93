"""How often each expert was used in earlier runs of a model: a small file beside the manifests, and what it decides.

A file is replaced in one step. One that cannot be read, or is of another model, is ignored with the reason.
"""

from __future__ import annotations

import contextlib
import json
import os
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from attrs import frozen

from freetoken_moe_offload.budget import Group

FORMAT = 1
PAST = 0.5  # of the shares so far, where new ones come
MOST_FILES = 50
"""More in one folder are of models long gone; the oldest are deleted."""

Shares = Mapping[int, tuple[float, ...]]
"""Layer → each expert's share of its layer's uses."""


@frozen
class Known:
    """What the file says, or nothing, and why."""

    shares: Shares
    because: str


def read(path: Path | None, layers: Sequence[int], experts: int) -> Known:
    """The shares in ``path`` for a model of these layers."""
    none = Known({}, "no earlier run of this model is known")
    if path is None:
        return none
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["format"] != FORMAT:
            return Known({}, f"{path.name} is of format {found['format']}, not {FORMAT}")
        shares = {int(layer): tuple(map(float, each)) for layer, each in found["shares"].items()}
    except FileNotFoundError:
        return none
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return Known({}, f"{path.name} cannot be read ({type(error).__name__}: {error})")
    wrong = [layer for layer, each in shares.items() if len(each) != experts or not all(0 <= x <= 1 for x in each)]
    if wrong or not set(layers) <= shares.keys():
        return Known({}, f"{path.name} is not of a model with {experts} experts in each of {len(layers)} layers")
    return Known({layer: shares[layer] for layer in layers}, f"uses in earlier runs, from {path.name}")


def blend(before: Shares, counts: Mapping[int, Sequence[int]]) -> Shares:
    """``before`` with the uses since: both weigh alike, and layers without new uses stay as they were."""
    merged = dict(before)
    for layer, each in counts.items():
        total = sum(each)
        if total:
            fresh = [count / total for count in each]
            old = before.get(layer)
            mixed = fresh if old is None else [PAST * a + (1 - PAST) * b for a, b in zip(old, fresh, strict=True)]
            merged[layer] = tuple(mixed)
    return merged


def write(path: Path, shares: Shares) -> None:
    """Replace the file in one step. Raises ``OSError`` where the folder cannot be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{uuid.uuid4().hex[:8]}")
    rounded = {str(layer): [round(x, 6) for x in each] for layer, each in shares.items()}
    try:
        temporary.write_text(json.dumps({"format": FORMAT, "shares": rounded}, separators=(",", ":")), encoding="utf-8")
        temporary.replace(path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
    ages = []
    for other in path.parent.glob("*.json"):
        with contextlib.suppress(FileNotFoundError):  # another server may be pruning too
            ages.append((other.stat().st_mtime, other))
    for _, other in sorted(ages)[:-MOST_FILES]:
        other.unlink(missing_ok=True)


def first_experts(group: Group, slots: int, shares: Shares) -> tuple[frozenset[int], ...]:
    """The experts of each of the group's layers that the slots start with: the most used of all, and where nothing is
    known as many of each layer, its first ones."""
    none = (0.0,) * group.experts
    order = sorted(
        (-shares.get(layer, none)[expert], expert, row)
        for row, layer in enumerate(group.layers)
        for expert in range(group.experts)
    )
    chosen: list[set[int]] = [set() for _ in group.layers]
    for _, expert, row in order[:slots]:
        chosen[row].add(expert)
    return tuple(map(frozenset, chosen))
