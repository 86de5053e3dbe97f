"""Requests in JSON: a field that is not known is an error, and so is one that the server has nothing for."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from mindspeed_mm.core.json_file import parse_json
from mindspeed_mm.core.suggest import did_you_mean
from mindspeed_mm.core.whole_text import HALF_CHARACTER, has_lone_surrogate
from mindspeed_mm.tasks.serve.limits import RefusedError

Request = TypeVar("Request", bound="RequestFields")


class RequestFields(BaseModel):
    """A request as JSON has it."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    model: str = ""
    user: Any = None
    metadata: Any = None


def read_fields(body: bytes, kind: type[Request]) -> Request:
    """The fields of a request.

    Raises:
        RefusedError: It is not JSON, or a field is off.
    """
    try:
        value = parse_json(body)
    except (ValueError, RecursionError) as error:
        raise RefusedError(400, f"the request is not JSON: {error}"[:200], code="invalid_json") from error
    if has_lone_surrogate(value):
        raise RefusedError(400, f"the request holds {HALF_CHARACTER}.", code="invalid_json")
    if not isinstance(value, dict):
        raise RefusedError(400, "the request is JSON, and no object.", code="invalid_json")
    try:
        return kind.model_validate(value)
    except (ValidationError, RecursionError) as error:
        raise _refused_field(error, kind) from error


def refuse_unsupported(fields: RequestFields, table: Mapping[str, tuple[Collection[Any], str]]) -> None:
    """Raise `RefusedError` for a field that the server has nothing for, unless its value asks for nothing.

    Args:
        fields: Of the request.
        table: Field → values that ask for nothing, and what to do instead.
    """
    for name, (harmless, way_out) in table.items():
        if (given := getattr(fields, name)) not in harmless:
            message = f"'{name}': {given!r:.60} is not supported here. {way_out}"
            raise RefusedError(400, message, param=name, code="unsupported_value")


def _refused_field(error: ValidationError | RecursionError, kind: type[BaseModel]) -> RefusedError:
    if isinstance(error, RecursionError):
        return RefusedError(400, "the request is nested too deeply.", code="invalid_json")
    first = error.errors(include_url=False, include_input=False)[0]
    name = ".".join(str(part) for part in first["loc"])[:100]
    if first["type"] == "extra_forbidden":
        message = f"'{name}' is not a field of this request. {did_you_mean(name, kind.model_fields)}"
        return RefusedError(400, message, param=name, code="unknown_parameter")
    return RefusedError(400, f"'{name}': {first['msg']}.", param=name, code="invalid_value")
