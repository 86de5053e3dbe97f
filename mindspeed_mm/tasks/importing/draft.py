"""A setup of another tool on its way into a configuration: what is given, what has been written so far, and what became
of each setting."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.core.json_file import JsonMapping, JsonObject, parse_json
from mindspeed_mm.fsdp.params.other_tools import Kind, PeerRow, PeerTool, words_of
from mindspeed_mm.tasks.importing.given import Given, Setting

Method = Literal["sft", "pretrain", "dpo", "grpo"]

MODEL = "model.model_name_or_path"
BASIC = "data.dataset_param.basic_parameters"
MEDIA = "data.dataset_param.preprocess_parameters"
DATASET = f"{BASIC}.dataset"
VAL_DATASET = f"{BASIC}.val_dataset"
LORA = "training.lora"
DIFFUSION = "training.diffusion"
_HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_SEES = re.compile(
    r"(?i)(?<![a-z])vl(?![a-z])|vision|omni|llava|internvl|pixtral|smolvlm|idefics|gemma-?[34](?!-1b|-270m)|glm-?4\.[15]v|"
    r"minicpm-?[vo]|qwen3\.[56]|qwen3_[56]|mllama|janus|deepseek-ocr|kimi-vl|mistral-small-3\.[12]|magistral"
)


_TOWERS = (
    (r"qwen[\d.]*-?(vl|5-vl)|qwen2\.5-vl|qwen3\.[56]|glm-4\.[15]v", "model.visual", "model.visual.merger"),
    (
        r"internvl.*hf|llava|gemma-?3|mistral-small|magistral|pixtral|gemma-?4",
        "model.vision_tower",
        "model.multi_modal_projector",
    ),
    (r"smolvlm|idefics3", "model.vision_model", "model.connector"),
)
"""Name of a model → its vision tower and the projector behind it."""


_OF_VERSION_1 = frozenset(
    {"model", "train_dataset", "model_class", "peft_config", "dist_config", "optim_config", "quant_config",
     "kernel_config", "lr_scheduler_config"}
)  # fmt: skip
"""Settings and sections of LLaMA-Factory's version 1 (v1/config/*_args.py)."""


@dataclass(frozen=True)
class Told:
    """A setting that becomes no key: without effect here, or not supported."""

    kind: Literal["idle", "unsupported"]
    note: str


def idle(note: str) -> Told:
    """The outcome of a setting that has no effect here, with the reason."""
    return Told("idle", note)


def no(note: str) -> Told:
    """The outcome of a value that is not supported, with what to do instead."""
    return Told("unsupported", note)


@dataclass(frozen=True)
class SettingResult:
    """What became of a setting, with its place."""

    word: str
    where: str
    kind: Kind
    ours: tuple[str, ...] = ()
    note: str = ""


@dataclass
class PeerSetup:
    """The configuration while it is made; keys are dotted."""

    tool: PeerTool
    given: Given
    method: Method = "sft"
    out: JsonObject = field(default_factory=dict)
    comments: dict[str, str] = field(default_factory=dict)
    """Key → what stands beside it."""
    findings: list[SettingResult] = field(default_factory=list)
    downloads: dict[str, None] = field(default_factory=dict)
    """Commands that fetch what the setup names by its name on a hub."""
    noted: set[str] = field(default_factory=set)
    """Keys with something to say beside them, which are written even where their value is our default."""
    settings: dict[str, Setting] = field(default_factory=dict)
    """Setting of the tool → the first of this name that is not empty."""

    def __post_init__(self) -> None:
        for each in self.given.settings:
            if each.value is not None:
                self.settings.setdefault(each.key, each)

    def has(self, word: str) -> bool:
        """Whether a setting is given, and not empty."""
        return word in self.settings

    def get(self, word: str, default: Any = None) -> Any:
        """The value of a setting as it is given."""
        if word in self.settings:
            return self.settings[word].value
        return default

    def row(self, word: str) -> PeerRow | None:
        """The row of a setting, or of the settings that hold it."""
        words = words_of(self.tool.name)
        while word:
            if word in words:
                return words[word]
            word = word.rpartition(".")[0].removesuffix("[]")
        return None

    def put(self, key: str, value: Any, comment: str = "") -> None:
        """Write a key; lists of trackers and frozen modules grow, any other key has its last value."""
        if key in ("training.report_to", "model.freeze") and key in self.out:
            value = list(dict.fromkeys([*self.out[key], *value]))
        self.out[key] = value
        if comment:
            self.comments[key] = comment

    def note(self, key: str, comment: str) -> None:
        """Write a comment beside a key that is there, or will be."""
        self.comments[key] = comment
        self.noted.add(key)

    def refuse(self, what: str, word: str, way_out: str) -> ConfigError:
        """An error about a setting, with its place."""
        setting = self.settings.get(word)
        where = setting.where if setting else self.given.source
        return ConfigError(what, where=where, key=word, way_out=way_out)

    @property
    def is_second_program(self) -> bool:
        """Whether it is for a program of the tool with defaults of its own: version 1 of LLaMA-Factory, known by the
        settings that it alone has, or `megatron` of ms-swift."""
        if self.tool.name == "llamafactory":
            is_new = any(each.key.partition(".")[0] in _OF_VERSION_1 for each in self.given.settings)
            return is_new and not self.has("model_name_or_path")
        is_megatron = self.given.program[:1] == ("megatron",) or self.has("global_batch_size")
        return self.tool.name == "ms-swift" and is_megatron

    def default_of(self, row: PeerRow) -> str:
        """The default of a row as the table has it: `first|second` where the tool's second program has another."""
        first, bar, second = row.default.partition("|")
        if bar and self.is_second_program:
            return second
        return first

    @property
    def model_name(self) -> str:
        """What the setup calls its model."""
        for word in (
            "model_name_or_path",
            "model",
            "base_model",
            "model.name_or_path",
            "pretrained_model_name_or_path",
        ):
            if isinstance(self.get(word), str):
                return str(self.get(word))
        return ""

    @property
    def sees(self) -> bool:
        """Whether the model takes pictures, by its folder, or by its name and template."""
        if self.model_name and (facts := self._facts()) is not None:
            return any(key.startswith(("vision", "audio", "thinker")) for key in facts)
        return bool(_SEES.search(f"{self.model_name} {self.get('template', '')}"))

    @property
    def model_type(self) -> str:
        """The kind of model that the folder's config.json names; empty where there is none."""
        if self.model_name:
            return str((self._facts() or {}).get("model_type", ""))
        return ""

    @property
    def parts(self) -> list[str] | None:
        """Vision tower and projector of the model, by its name or by the kind that its folder names."""
        name = f"{self.model_name} {self.model_type.replace('_', '-')}"
        return next((names for pattern, *names in _TOWERS if re.search(pattern, name, re.IGNORECASE)), None)

    def text_facts(self) -> JsonMapping:
        """What the folder's config.json says of the language model; empty where there is none."""
        facts = (self._facts() or {}) if self.model_name else {}
        inner = facts.get("text_config")
        if isinstance(inner, dict):
            return inner
        return facts

    def patch_side(self) -> int | None:
        """Side of the square of pixels behind a token of a picture, by the folder or by the name; None: not known."""
        vision = ((self._facts() or {}) if self.model_name else {}).get("vision_config")
        if isinstance(vision, dict) and "patch_size" in vision:
            return int(vision["patch_size"]) * int(vision.get("spatial_merge_size", 2))
        name = self.model_name.lower()
        if re.search(r"qwen3-?vl|qwen3\.[56]|qwen3-?omni", name):
            return 32
        if re.search(r"qwen2(\.5)?-?(vl|omni)", name):
            return 28
        return None

    def _facts(self) -> JsonMapping | None:
        """The model's config.json, where the folder is there."""
        try:
            facts = parse_json((Path(self.out.get(MODEL) or self.model_name) / "config.json").read_bytes())
        except (OSError, ValueError):
            return None
        if isinstance(facts, dict):
            return facts
        return None

    def file_of(self, name: str) -> Path | None:
        """A file that a setup names, from here, from where the setup is, or from a folder above; None: not here."""
        beside = self.given.folder.resolve()
        tried = (Path(), beside, *beside.parents) if not Path(name).is_absolute() else (Path(),)
        return next((folder / name for folder in tried if (folder / name).is_file()), None)

    def folder_of(self, name: str, room: str, fetch: Callable[[str, str], str]) -> str:
        """Where a model or data set is: as given, or, of a name on a hub that is not here, where it is downloaded to.

        Args:
            name: A path, or OWNER/NAME.
            room: The folder that downloads go to.
            fetch: The command that downloads the name into a folder.
        """
        if Path(name).exists() or (self.given.folder / name).exists() or not _HUB_NAME.fullmatch(name):
            return name
        if name.startswith(("saves/", "output/", "outputs/", "models/", "data/", "path/", "runs/")):
            return name
        folder = f"{room}/{name.rpartition('/')[2]}"
        self.downloads[fetch(name, folder)] = None
        return folder


Outcome = Mapping[str, Any] | Told
Conversion = Callable[[PeerSetup, PeerRow, Any], Outcome]
CONVERSIONS: dict[str, Conversion] = {}
"""Name in the table's column `how` → what it does with a value."""
DEFAULTS: dict[str, Callable[[PeerSetup], object]] = {}
"""Name in the table's column `default` → the tool's default for these settings; None where there is none."""


def conversion(name: str) -> Callable[[Conversion], Conversion]:
    """Register a conversion under its name in the table."""

    def register(function: Conversion) -> Conversion:
        CONVERSIONS[name] = function
        return function

    return register


def default_of(name: str) -> Callable[[Callable[[PeerSetup], object]], Callable[[PeerSetup], object]]:
    """Register a default that follows from other settings."""

    def register(function: Callable[[PeerSetup], object]) -> Callable[[PeerSetup], object]:
        DEFAULTS[name] = function
        return function

    return register


def model_fetch(name: str, folder: str) -> str:
    """The command that downloads a model."""
    return f"hf download {name} --local-dir {folder}"


def data_fetch(name: str, folder: str) -> str:
    """The command that downloads a data set."""
    return f"hf download {name} --repo-type dataset --local-dir {folder}"


def is_on(value: object) -> bool:
    """Whether a switch is on, however it is written."""
    if not isinstance(value, bool):
        return str(value).lower() in ("true", "yes", "on", "1", "1.0")
    return value


def texts(value: object) -> list[str]:
    """A list of words: a list, or a text with commas or blanks between them."""
    if isinstance(value, list | tuple):
        return [str(each) for each in value]
    return [each for each in re.split(r"[,\s]+", str(value).strip("[]")) if each]
