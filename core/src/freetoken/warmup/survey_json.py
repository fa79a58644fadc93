"""A survey as JSON and back: launches are plain values, so nothing is lost but native modules, which keep their key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from freetoken.vocab.launch import LaunchArg, StepPoint, TensorArg, TritonLaunch
from freetoken.warmup.enumerate import KeyUse
from freetoken.warmup.survey import LibraryUse, Survey

Json = Mapping[str, Any]


def survey_to_json(survey: Survey) -> dict[str, Any]:
    return {
        "keys": {key: _use_to_json(use) for key, use in survey.uses.items()},
        "libraries": [{**attrs.asdict(use), "point": point_to_json(use.point)} for use in survey.libraries],
    }


def survey_from_json(data: Json) -> Survey:
    """Raises ``KeyError``, ``TypeError`` or ``ValueError`` for what no survey was ever written as."""
    uses = {str(key): _use_from_json(str(key), value) for key, value in data["keys"].items()}
    libraries = [LibraryUse(**{**value, "point": point_from_json(value["point"])}) for value in data["libraries"]]
    return Survey(uses, tuple(libraries))


def point_to_json(point: StepPoint) -> dict[str, Any]:
    return attrs.asdict(point)


def point_from_json(data: Json) -> StepPoint:
    point = StepPoint(**data)
    numbers = (point.tokens, point.sequences, point.max_query, point.max_context, point.rows)
    if not all(isinstance(n, int) for n in numbers) or not isinstance(point.decode, bool):
        raise ValueError(f"{data} is no step")
    return point


def _use_to_json(use: KeyUse) -> dict[str, Any]:
    launch = _launch_to_json(use.launch) if isinstance(use.launch, TritonLaunch) else None
    return {"launch": launch, "kinds": list(use.kinds), "witnesses": [point_to_json(p) for p in use.witnesses]}


def _use_from_json(key: str, data: Json) -> KeyUse:
    launch = None if data["launch"] is None else _launch_from_json(data["launch"])
    witnesses = tuple(point_from_json(p) for p in data["witnesses"])
    if not witnesses:
        raise ValueError(f"{key} has no witness")
    return KeyUse(key, launch, tuple(data["kinds"]), witnesses)


def _launch_to_json(launch: TritonLaunch) -> dict[str, Any]:
    return {
        "kernel": launch.kernel,
        "args": [[name, _arg_to_json(value)] for name, value in launch.args],
        "constexprs": [list(pair) for pair in launch.constexprs],
        "num_warps": launch.num_warps,
        "num_stages": launch.num_stages,
        "options": [list(pair) for pair in launch.options],
    }


def _launch_from_json(data: Json) -> TritonLaunch:
    return TritonLaunch(
        kernel=str(data["kernel"]),
        args=tuple((str(name), _arg_from_json(value)) for name, value in data["args"]),
        constexprs=tuple((str(name), value) for name, value in data["constexprs"]),
        grid=(1, 1, 1),
        num_warps=int(data["num_warps"]),
        num_stages=int(data["num_stages"]),
        options=tuple((str(name), value) for name, value in data["options"]),
    )


def _arg_to_json(value: LaunchArg) -> Any:
    return {"tensor": value.dtype} if isinstance(value, TensorArg) else value


def _arg_from_json(value: Any) -> LaunchArg:
    if isinstance(value, Mapping):
        return TensorArg(str(value["tensor"]))
    if value is None or isinstance(value, bool | int | float):
        return value
    raise ValueError(f"{value!r} is no argument of a launch")
