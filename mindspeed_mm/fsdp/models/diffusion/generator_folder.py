"""A generator's folder in diffusers' layout, as far as its JSON files tell: components, their configurations, and how
the release is used: what a sample gets for whatever a request leaves out.

The rule: what a request leaves out is the default of the pipeline's `__call__`. A `ReleaseUse` states where that is not
right for a release: distilled releases (few steps, no guidance), releases that share the pipeline of an older one, and
the frame rate of clips, which pipelines do not know. A release is recognised by settings in its folder, never by the
folder's name; a folder that fits no entry is used by the rule. Releases whose folders differ in weights alone cannot be
told apart (Stable Diffusion 3.5 Large Turbo, LTX-Video distilled): their steps and guidance have to be named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from mindspeed_mm.core.errors import ModelFolderError
from mindspeed_mm.core.json_file import JsonMapping, JsonObject, read_json_object


class GeneratorFolder:
    """The settings that a folder holds.

    Args:
        folder: With `model_index.json` and a folder for each component.
        transformer: Settings of the transformer's configuration to change.
    """

    def __init__(self, folder: Path, transformer: Mapping[str, object] | None = None) -> None:
        self.folder = folder
        self._changes = dict(transformer or {})
        self._configs: dict[str, JsonObject] = {}
        self.noted: Mapping[str, JsonObject] = {}
        """Configurations of components that the folder lacks, see `note_components`."""

    def component_config(self, name: str) -> JsonObject:
        """The JSON configuration of a component (`vae`, `scheduler` …), read once; when the folder lacks it, what was
        noted of it, else empty.

        Raises:
            ModelFolderError: It is not JSON.
        """
        if name not in self._configs:
            self._configs[name] = self._read_config(name)
        return self._configs[name]

    def _read_config(self, name: str) -> JsonObject:
        for file in ("config.json", "scheduler_config.json", "preprocessor_config.json", "tokenizer_config.json"):
            path = self.folder / name / file
            if path.is_file():
                return read_json(path)
        return self.noted.get(name, {})

    def note_components(self, configs: Mapping[str, JsonObject]) -> None:
        """Take configurations of components that the folder lacks from elsewhere: a run on features needs no VAE, but
        for what sizes follow from."""
        self.noted = {name: configs[name] for name in filter(self.lacks, configs)}
        self._configs.clear()
        for derived in ("geometry", "usage"):
            self.__dict__.pop(derived, None)

    def lacks(self, name: str) -> bool:
        """Whether the folder's pipeline has a component whose own folder is not there."""
        return self.has_component(name) and not (self.folder / name).is_dir()

    def require(self, name: str) -> None:
        """Raise `ModelFolderError` when the folder lacks a component."""
        if self.lacks(name):
            raise absent_component(self.folder / name)

    @cached_property
    def index(self) -> JsonObject:
        """`model_index.json`: component → [library, class]."""
        return read_json(self.folder / "model_index.json")

    @cached_property
    def transformer_config(self) -> JsonObject:
        """The transformer's configuration with the YAML's changes."""
        return self.config_of("transformer")

    def config_of(self, name: str) -> JsonObject:
        """The configuration of one of `transformers`, with the YAML's changes."""
        return {**self.component_config(name), **self._changes}

    def setting(self, component: str, name: str) -> Any:
        """A setting of a component, or of `model_index.json`; None where there is none."""
        if component == INDEX:
            value = self.index.get(name)
            if value == [None, None]:
                return None
            return value
        return (self.transformer_config if component == "transformer" else self.component_config(component)).get(name)

    def has_component(self, name: str) -> bool:
        """Whether the folder's pipeline has a component; optional ones may be null in `model_index.json`."""
        entry = self.index.get(name)
        return isinstance(entry, list) and len(entry) == 2 and entry[0] is not None


def absent_component(folder: Path) -> ModelFolderError:
    """The error about a component that `model_index.json` lists and that has no folder."""
    return ModelFolderError(
        f"'{folder.name}' is listed in model_index.json, but its folder does not exist",
        where=str(folder),
        way_out="Copy the model folder again.",
    )


def read_json(path: Path) -> JsonObject:
    """A JSON object out of a model folder. Raises `ModelFolderError` when it is none."""
    if not path.exists():
        raise ModelFolderError("does not exist", where=str(path), way_out="Copy the model folder again.")
    return read_json_object(path, ModelFolderError)


INDEX = "index"
"""Stands for `model_index.json` in the settings of `ReleaseUse.holds`."""
GIVEN: object = ...
"""A value of `ReleaseUse.holds`: anything but null."""


@dataclass(frozen=True)
class ReleaseUse:
    """One entry. None: no entry says otherwise, so the pipeline's default counts."""

    release: str = ""
    """Name of the release; empty: all folders of the family."""
    holds: JsonMapping = field(default_factory=dict)
    """What the folder of the release holds: `component.setting` → value, for instance `scheduler.shift`; `index.name`
    is of `model_index.json`."""
    steps: int | None = None
    """Denoising steps."""
    guidance: float | Mapping[str, float] | None = None
    """Guidance scale; or, where it is several numbers, these arguments of the pipeline (empty: its own defaults)."""
    text_tokens: int | None = None
    """Length that captions are padded to and cut at."""
    fps: float | None = None
    """Frames per second of the clips that the release makes."""
    frames: int | None = None
    """Frames of a clip."""
    size: tuple[int, int] | None = None
    """Height and width in pixels."""
    call: JsonMapping = field(default_factory=dict)
    """Further arguments of the pipeline."""


def usage_of(table: Iterable[ReleaseUse], setting: Callable[[str, str], object]) -> ReleaseUse:
    """The entries that fit a folder as one; of two that say something of the same, the later counts.

    Args:
        table: Of the family.
        setting: (component, setting) → its value in the folder, None where it has none.
    """
    found = ReleaseUse()
    for entry in table:
        if all(_is_held(setting(*name.split(".", 1)), value) for name, value in entry.holds.items()):
            said = {each.name: getattr(entry, each.name) for each in fields(entry)}
            found = replace(found, **{name: value for name, value in said.items() if value not in (None, "")})
    return found


def _is_held(found: object, value: object) -> bool:
    return found is not None and (value is GIVEN or bool(found == value))
