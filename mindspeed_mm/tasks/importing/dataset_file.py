"""The TOML of data sets that a setup of kohya or musubi-tuner names beside its own settings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from mindspeed_mm.fsdp.params.other_tools import words_of
from mindspeed_mm.tasks.importing.draft import PeerSetup
from mindspeed_mm.tasks.importing.given import read_file

_LEVELS = ("datasets[].subsets[].", "datasets[].", "general.", "")
"""Where kohya's and musubi-tuner's TOML may have a setting of a data set, which goes down to the levels below."""


def plain_key(tool: str, key: str) -> str:
    """A setting of a TOML as the table has it: at the level that it lists, or without its section."""
    known, last = words_of(tool), key.rpartition(".")[2].removeprefix("[].")
    if key in known:
        return key
    if not key.startswith(("datasets[].", "general.")):
        return last
    return next((level + last for level in _LEVELS if level + last in known), last)


def with_dataset_file(draft: PeerSetup) -> None:
    """Read the TOML that `dataset_config` names, beside the file or in the working directory."""
    name = draft.get("dataset_config")
    if not isinstance(name, str) or draft.tool.name not in ("kohya", "musubi"):
        return
    path = next((each for each in (Path(name), draft.given.folder / name) if each.is_file()), None)
    if path is None:
        return
    of_data = read_file(path)
    settings = [replace(each, key=plain_key(draft.tool.name, each.key)) for each in of_data.settings]
    draft.given.settings.extend(settings)
    # the file names the source of errors; its own settings come after those of the command, which win
    draft.given = type(draft.given)(
        draft.given.source,
        draft.given.settings,
        {**draft.given.tree, **of_data.tree},
        draft.given.program,
        draft.given.environment,
        draft.given.folder,
    )
    for each in settings:
        if each.value is not None:
            draft.settings.setdefault(each.key, each)
