"""Requests in `multipart/form-data`: fields of text, and files."""

from __future__ import annotations

import io

from werkzeug.exceptions import HTTPException
from werkzeug.formparser import MultiPartParser
from werkzeug.http import parse_options_header

from mindspeed_mm.tasks.serve.limits import RefusedError

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
            if len(values) > 1 and not name.endswith("[]"):
                raise RefusedError(400, f"the form has '{name[:100]}' twice.", param=name[:100], code="invalid_form")
    return dict(fields.items()), {name: file.stream.read() for name, file in files.items()}
