"""Requests in JSON and in `multipart/form-data`, and the name of the model in them. A field that is not known is an
error, and so is one that the server has nothing for."""

from __future__ import annotations

import io
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from werkzeug.exceptions import HTTPException
from werkzeug.formparser import MultiPartParser
from werkzeug.http import parse_options_header

from mindspeed_mm.core.json_file import JsonObject, parse_json
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


def refuse_unsupported(fields: RequestFields, table: Mapping[str, tuple[Collection[object], str]]) -> None:
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
    # without the input: what a client sent is not sent back
    first = error.errors(include_url=False, include_input=False)[0]
    name = ".".join(str(part) for part in first["loc"])[:100]
    if first["type"] == "extra_forbidden":
        message = f"'{name}' is not a field of this request. {did_you_mean(name, kind.model_fields)}"
        return RefusedError(400, message, param=name, code="unknown_parameter")
    return RefusedError(400, f"'{name}': {first['msg']}.", param=name, code="invalid_value")


# --- forms ------------------------------------------------------------------------------------------------------------

_MOST_PARTS = 50
_LONGEST_FIELD_BYTES = 2**18


def read_form(content_type: str, body: bytes) -> tuple[dict[str, str], dict[str, bytes]]:
    """Fields and files of a request by name.

    Raises:
        RefusedError: It is no form, a broken one, or has two of one name.
    """
    kind, options = parse_options_header(content_type)
    boundary = options.get("boundary", "")
    if kind != "multipart/form-data" or not boundary:
        raise RefusedError(415, "the request is not multipart/form-data.", code="invalid_form")
    parser = MultiPartParser(max_form_memory_size=_LONGEST_FIELD_BYTES, max_form_parts=_MOST_PARTS)
    try:
        fields, files = parser.parse(io.BytesIO(body), boundary.encode("ascii", "replace"), len(body))
    except (ValueError, HTTPException) as error:
        raise RefusedError(400, f"the form is broken: {error}"[:200], code="invalid_form") from error
    for given in (fields, files):
        for name, values in given.lists():
            # a proxy and this server might take different ones of the two
            if len(values) > 1 and not name.endswith("[]"):
                raise RefusedError(400, f"the form has '{name[:100]}' twice.", param=name[:100], code="invalid_form")
    return dict(fields.items()), {name: file.stream.read() for name, file in files.items()}


# --- names of the model -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Names:
    """The model's name, and those of its adapters; a request that gives none means the model without."""

    shown: str
    adapters: tuple[str, ...] = ()
    routes: tuple[str, ...] = ()
    """What it answers: of `chat`, `transcriptions`, `images`, `videos` and `speech`."""
    voices: tuple[str, ...] = ()
    """That requests for speech may name."""
    created: int = field(default_factory=lambda: int(time.time()))

    def check(self, asked: str) -> None:
        """Raise when a request names another model.

        Raises:
            RefusedError: With the name of this one.
        """
        self.chosen(asked)

    def chosen(self, asked: str) -> str | None:
        """The adapters that a request names; None: none.

        Raises:
            RefusedError: It names another model.
        """
        if asked in ("", self.shown):
            return None
        if asked in self.adapters:
            return asked
        known = ", ".join(f"'{name}'" for name in (self.shown, *self.adapters))
        message = f"there is no model '{asked[:100]}' here, only {known}."
        raise RefusedError(404, message, param="model", code="model_not_found")

    def listed(self) -> list[JsonObject]:
        """Return an entry of `/v1/models` for the model and for each of its adapters."""
        facts = {"object": "model", "created": self.created, "owned_by": "mindspeed-mm", "routes": list(self.routes)}
        if self.voices:
            facts["voices"] = list(self.voices)
        return [{"id": name, **facts} for name in (self.shown, *self.adapters)]
