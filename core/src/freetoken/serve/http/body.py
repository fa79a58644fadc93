"""A request's body: read within the limit, parsed strictly, checked against its model with messages people can use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, from_json
from starlette.requests import ClientDisconnect

from freetoken.serve.http.errors import ApiError, ClientGone
from freetoken.serve.http.request_models import NotImplementedField, RequestBody
from freetoken.vocab.units import MIB, format_bytes

Body = TypeVar("Body", bound=RequestBody)

# Read and thrown away before a 413: closing on a client that still writes would reset the connection, answer and all.
_DISCARDED_BYTES = 256 * MIB

_KINDS = {
    "string_type": "a string",
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
}
_TAGS = {"str": "a string", "list[str]": "a list of strings", "list[dict[str,any]]": "a list of parts"}


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The whole body. Raises ``ApiError`` 413 beyond ``max_bytes`` and ``ClientGone`` when it is cut off."""
    parts: list[bytes] = []
    size = 0
    try:
        async for part in request.stream():
            size += len(part)
            if size <= max_bytes:
                parts.append(part)
            elif size > max_bytes + _DISCARDED_BYTES:
                break
    except ClientDisconnect:
        raise ClientGone from None
    if size > max_bytes:
        raise ApiError(413, f"the body is larger than this server takes ({format_bytes(max_bytes)})")
    return b"".join(parts)


def parse_body(raw: bytes, model: type[Body]) -> Body:
    """``raw`` as ``model``; ``ApiError`` 400 says what is wrong and where."""
    try:
        value = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise ApiError(400, f"the body must be a JSON object, not {_name(value)}", code="invalid_json")
    implemented = _without_neutral(value, model)
    _refuse_unknown(implemented, model)
    try:
        return model.model_validate(implemented)
    except ValidationError as error:
        raise _explain(error.errors(include_url=False), implemented) from None


def _without_neutral(value: Mapping[str, object], model: type[RequestBody]) -> dict[str, object]:
    """Drop fields that are known but not implemented, if they ask for nothing; refuse them by name if they do."""
    kept = {}
    for name, wanted in value.items():
        known: NotImplementedField | None = model.not_implemented.get(name)
        if known is None:
            kept[name] = wanted
        elif not known.asks_nothing(wanted):
            message = f"{name!r} is not implemented by this server" + (f": {known.why}" if known.why else "")
            raise ApiError(400, message, param=name, code="not_implemented")
    return kept


def _refuse_unknown(value: Mapping[str, object], model: type[BaseModel]) -> None:
    unknown = [name for name in value if name not in model.model_fields]
    if unknown:
        names = ", ".join(repr(name) for name in unknown[:5])
        known = ", ".join(sorted(model.model_fields))
        message = f"unknown field{'s' if len(unknown) > 1 else ''} {names}; this endpoint takes {known}"
        raise ApiError(400, message, param=unknown[0], code="unknown_field")


def _explain(errors: list[ErrorDetails], value: object) -> ApiError:
    """The first field at fault, and everything it would have taken."""
    path, found, tag = _locate(errors[0], value)
    if errors[0]["type"] == "missing":
        return ApiError(400, f"{path!r} is required", param=path, code="missing_field")
    if errors[0]["type"] == "extra_forbidden":
        return ApiError(400, f"unknown field {path!r}", param=path, code="unknown_field")
    wanted = [_KINDS.get(errors[0]["type"], "")]
    if tag:
        tags = (_locate(error, value) for error in errors)
        wanted = list(dict.fromkeys(_TAGS.get(other, other) for where, _, other in tags if where == path))
    if all(wanted):
        message = f"{path!r} must be {' or '.join(wanted)}, not {_name(found)}"
    else:
        message = f"{path!r}: {errors[0]['msg']}"
    return ApiError(400, message, param=path, code="invalid_value")


def _locate(error: ErrorDetails, value: object) -> tuple[str, object, str]:
    """Where in ``value`` an error lies: its path, what is there, and the union's branch if there was a union."""
    path = ""
    for step in error["loc"]:
        if isinstance(value, list) and isinstance(step, int):
            path += f"[{step}]"
            value = value[step]
        elif isinstance(value, dict) and isinstance(step, str) and (step in value or error["type"] == "missing"):
            path += f".{step}" if path else step
            value = value.get(step)
        else:
            return path, value, str(step)
    return path, value, ""


def _name(value: object) -> str:
    """A value as a message quotes it: its kind, and the value when it is short."""
    kinds = {str: "string", bool: "boolean", int: "number", float: "number", list: "list", dict: "object"}
    if value is None:
        return "null"
    kind = kinds.get(type(value), type(value).__name__)
    if isinstance(value, list | dict):
        return f"{'an' if kind == 'object' else 'a'} {kind}"
    text = repr(value)
    return f"the {kind} {text}" if len(text) <= 40 else f"a {kind} of {len(text)} characters"
