"""Requests for a transcript: OpenAI's form → a sound and how it is heard."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from mindspeed_mm.core.suggest import did_you_mean
from mindspeed_mm.tasks.serve.limits import RefusedError

_FIELDS = ("model", "language", "prompt", "response_format", "temperature", "stream")
_FORMATS = ("json", "text")
_WAYS_OUT = {
    "timestamp_granularities[]": "Leave it out: transcripts have no times here.",
    "timestamp_granularities": "Leave it out: transcripts have no times here.",
    "include[]": "Leave it out: transcripts come without log-probabilities here.",
    "chunking_strategy": "Leave it out, and send parts of the sound one by one.",
}
"""Fields of OpenAI's that this server has nothing for."""


@dataclass(frozen=True)
class TranscriptionCall:
    """A checked request for a transcript: the sound file, and how to transcribe it."""

    file: bytes
    model: str = ""
    language: str | None = None
    prompt: str = ""
    temperature: float | None = None
    is_plain: bool = False
    """The answer is the text alone, not JSON."""


def read_transcription(form: Mapping[str, str], files: Mapping[str, bytes]) -> TranscriptionCall:
    """A request.

    Raises:
        RefusedError: Naming the field.
    """
    check_fields(form, files)
    kind = form.get("response_format", "json")
    if kind not in _FORMATS:
        message = f"'{kind[:40]}' is not a format of this server: {' or '.join(_FORMATS)}."
        raise RefusedError(400, message, param="response_format", code="unsupported_value")
    if form.get("stream", "false").lower() not in ("false", "0", ""):
        message = "'stream': transcripts come whole; leave it out."
        raise RefusedError(400, message, param="stream", code="unsupported_value")
    return TranscriptionCall(
        file=files["file"],
        model=form.get("model", ""),
        language=form.get("language", "").strip().lower() or None,
        prompt=form.get("prompt", ""),
        temperature=_temperature(form.get("temperature", "")),
        is_plain=kind == "text",
    )


def check_fields(form: Mapping[str, str], files: Mapping[str, bytes]) -> None:
    """Raise `RefusedError` for a form without its file, or with a field that is not known."""
    if "file" not in files:
        raise RefusedError(400, "there is no 'file'.", param="file", code="invalid_value")
    for name in (*form, *files):
        if name in _WAYS_OUT:
            raise RefusedError(
                400, f"'{name}' is not supported here. {_WAYS_OUT[name]}", param=name, code="unsupported_value"
            )
    unknown = [name for name in form if name not in _FIELDS] + [name for name in files if name != "file"]
    if unknown:
        shown = unknown[0][:100]
        message = f"'{shown}' is not a field of this request. {did_you_mean(shown, (*_FIELDS, 'file'))}"
        raise RefusedError(400, message, param=shown, code="unknown_parameter")


def _temperature(given: str) -> float | None:
    if not given.strip():
        return None
    try:
        found = float(given)
    except ValueError:
        found = math.nan
    if not 0 <= found <= 1:
        message = f"'temperature' is a number from 0 to 1, not '{given[:40]}'."
        raise RefusedError(400, message, param="temperature", code="invalid_value")
    return found
