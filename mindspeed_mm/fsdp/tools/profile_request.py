"""`profile.json`: the file by which somebody asks a run that goes on for a profile."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from mindspeed_mm.core.errors import DataError
from mindspeed_mm.core.json_file import parse_json
from mindspeed_mm.core.suggest import did_you_mean
from mindspeed_mm.fsdp.params.tools_args import StaticProfile

REQUEST_FILE = "profile.json"
_OWN_KEYS = ("start", "steps", "start_step")
_SETTINGS = tuple(name for name in StaticProfile.model_fields if name not in ("start_step", "end_step", "save_path"))


@dataclass(frozen=True)
class ProfileRequest:
    """What a `profile.json` asks for: which steps are recorded, and how."""

    settings: StaticProfile
    steps: int
    first: int | None
    """The first step recorded; None: as soon as may be."""
    start: bool


def read_request(path: Path, defaults: StaticProfile) -> ProfileRequest:
    """Read a request; an empty file asks for one with the settings of the configuration.

    Keys: `start` (false: asks for nothing), `steps`, `start_step`, and `level`, `record_shapes` … as under
    `tools.profile.static_param`.

    Raises:
        DataError: The file is not a JSON object, or holds keys or values that mean nothing.
    """
    where = str(path)
    try:
        text = path.read_text(encoding="utf-8")
        asked: Any = parse_json(text) if text.strip() else {}
    except (OSError, ValueError) as error:
        raise DataError(f"is not JSON ({error})", where=where, way_out='Write for example {"steps": 2}.') from None
    if not isinstance(asked, dict):
        raise DataError("is not a JSON object", where=where, way_out='Write for example {"steps": 2}.')
    for name in asked:
        if name not in (*_OWN_KEYS, *_SETTINGS):
            known = (*_OWN_KEYS, *_SETTINGS)
            raise DataError(f"unknown key '{name}'. {did_you_mean(name, known)}", where=where, way_out="Take it out.")
    steps = asked.get("steps", defaults.end_step - max(1, defaults.start_step))
    first = asked.get("start_step")
    for name, value in (("steps", steps), ("start_step", first)):
        if value is not None and (type(value) is not int or value < 1):
            raise DataError(f"{name} is {value!r}", where=where, way_out="It is a number from 1.")
    given = {name: asked[name] for name in _SETTINGS if name in asked}
    try:
        settings = StaticProfile.model_validate({**defaults.model_dump(), **given})
    except ValidationError as error:
        found = error.errors()[0]
        what = f"{'.'.join(map(str, found['loc']))}: {found['msg']}"
        raise DataError(what, where=where, way_out="Change it.") from None
    return ProfileRequest(settings, steps, first, asked.get("start", True) is not False)
