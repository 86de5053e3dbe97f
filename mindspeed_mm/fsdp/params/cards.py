"""What is known of models and datasets without importing them: their ids and their own configuration keys.

A built-in one has a `card.yaml` in its folder (`ids`, and `keys`: key → default), and is found through it. An outside
plugin declares its keys with its registration; they are handed in as `PluginKeys`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import yaml

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.core.json_file import JsonMapping, JsonObject
from mindspeed_mm.fsdp.params.yaml.config_text import read_config_text
from mindspeed_mm.fsdp.params.yaml.parser import parse_yaml
from mindspeed_mm.fsdp.params.yaml.tree import plain

_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml's, which wheels of PyYAML bring."""
_ENGINE = Path(__file__).resolve().parents[1]
_MODELS, _DATASETS = "mindspeed_mm.fsdp.models", "mindspeed_mm.fsdp.data.datasets"
_DATASETS_ELSEWHERE = {
    "wan2_2": f"{_DATASETS}.generation.generation_dataset",
    "cosyvoice3": f"{_DATASETS}.cosyvoice.cosyvoice_dataset",
}
"""Folder of a data set in MindSpeed-MM → the module here that reads its rows, where the names differ."""

KNOWN_MODEL_IDS = frozenset(
    [
        "qwen3",
        "qwen3_moe",
        "gpt_oss",
        "qwen3_vl",
        "qwen3_vl_moe",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen3_omni_moe",
        "qwen3_tts",
        "qwen3_asr",
        "kimi_k25",
        "kimi_k3",
        "mimo_v25",
        "minimax_m3_vl",
        "step3_vl",
        "ltx2",
        "ltx2_3",
        "wan2_2_container",
        "funasr",
        "cosyvoice3_lm",
        "moss_tts_delay",
    ]
)
"""Ids that files name; the card of one says that it is built in."""
KNOWN_DATASET_TYPES = frozenset(
    [
        "huggingface",
        "qwen3_asr",
        "ltx2_precomputed",
        "ltx2_3_precomputed",
        "wan2_2",
        "qwen3tts",
        "funasr",
        "cosyvoice",
        "mosstts_delay",
    ]
)
"""Dataset types that files name."""


def plugin_module(plugin: str) -> str:
    """The dotted name of what `training.plugin` names: `a.b`, `a/b`, `./a/b` and `a/b.py` are the same, and an absolute
    path is named by its end. A folder that files of MindSpeed-MM name, and that is called otherwise here, is the one
    that has what it is named after; so is the package of its code inside (`models/ltx2/ltx2_fsdp2`)."""
    if Path(plugin.strip()).is_absolute():
        return Path(plugin.strip()).stem
    name = plugin.strip().removesuffix(".py").strip("./").replace("/", ".")
    for room, modules in ((_MODELS, model_modules()), (_DATASETS, dataset_modules() | _DATASETS_ELSEWHERE)):
        folder, _, inside = name.removeprefix(f"{room}.").partition(".")
        if name.startswith(f"{room}.") and inside in ("", f"{folder}_fsdp2") and not _is_here(name):
            own = modules.get(folder) or modules.get(f"{folder}_precomputed")
            if own:
                return own.rpartition(".")[0]
            return name
    return name


def is_of_suite(module: str) -> bool:
    """Whether a dotted name is that of a folder in which the suite keeps its models or its data sets."""
    return module.rpartition(".")[0] in (_MODELS, _DATASETS)


def _is_here(name: str) -> bool:
    """Whether a module or a package of the suite has this dotted name."""
    path = _ENGINE.parents[1] / name.replace(".", "/")
    return path.is_dir() or path.with_name(f"{path.name}.py").is_file()


def is_outside_plugin(plugin: str) -> bool:
    """Whether it may register what no card lists; a package may lie where the built-in ones lie."""
    built_in = {*model_modules().values(), *dataset_modules().values()}
    name = plugin_module(plugin)
    return not any(module == name or module.rpartition(".")[0] == name for module in built_in)


@dataclass(frozen=True)
class PluginKeys:
    """Keys that outside plugins declared with their registration: key → default (None takes any value).

    A dataset's key may name a sub-section: `basic_parameters.frames`.
    """

    model: JsonMapping = field(default_factory=dict)
    dataset: JsonMapping = field(default_factory=dict)


@dataclass(frozen=True)
class ModelCard:
    """What is known of a family of models without importing it."""

    name: str
    """Its folder in `mindspeed_mm/fsdp/models`."""
    title: str
    called: tuple[str, ...]
    """Further names, as other suites' tables and folders have them."""
    ids: tuple[str, ...]
    """Values of `model.model_id` that build it; none where the class in config.json is all that is needed."""
    model_class: str
    """Library and class: transformers.Qwen3VLForConditionalGeneration."""
    modalities: tuple[str, ...]
    """Of text, image, video, audio: what it takes and makes."""
    task: str
    """What it is for: a key of `tasks.models.topics.TASKS`."""
    does: tuple[str, ...]
    """What it does that others of its task do not: keys of `tasks.models.topics.ASPECTS`."""
    released: Mapping[str, float | None]
    """Name on the hub → billions of parameters, where they are known."""
    proven: Mapping[str, str]
    """What is proven, a key of `tasks.models.catalogue.PROOFS` → the case of its test that proves it, or several
    with commas between them, or a test of the family alone: file::function."""
    tasks: Mapping[str, str]
    """Of a generator: what it may be trained for, values of `model.task` → what proves it, told likewise, or as
    file::function [case] of a test that has others, too."""
    epochs: int | None = None
    """Of a generator: the passes over the data that diffusers' own command trains for, where it counts passes."""
    smallest: JsonMapping = field(default_factory=dict)
    """What its smallest YAML has beside the model, the rows and the training: sections of a configuration."""
    freeze: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Part of the model → its modules, as `model.freeze` takes them."""
    lora_targets: tuple[str, ...] = ()
    """Linear layers that adapters wrap where `training.lora.target_modules` is not set: the last parts of their names,
    or of a generator its patterns."""
    needs_gib: Mapping[str, Mapping[str, float | None]] = field(default_factory=dict)
    """Name on the hub → `full`, `lora` and `qlora` → GiB that a step takes on one device, by the memory forecast; None:
    more than the largest device has."""
    further_classes: tuple[str, ...] = ()
    """Of a generator that is written here: classes of its denoising transformers beside that of `model_class`."""
    not_trained: tuple[str, ...] = ()
    """What a released folder holds beside the model: it is not loaded, and exports have it as it was."""

    @property
    def generates(self) -> bool:
        """Whether it is a generator of pictures or videos, in diffusers' layout."""
        return bool(self.tasks)


@cache
def families() -> tuple[ModelCard, ...]:
    """The card of every family, by name."""
    found = []
    for card, folder in _cards("models"):
        _check_whole(card, folder)
        found.append(
            ModelCard(
                folder,
                card["title"],
                tuple(card.get("called") or ()),
                tuple(card["ids"]),
                card["class"],
                tuple(card["modalities"]),
                card["task"],
                tuple(card.get("does") or ()),
                card["released"],
                card["proven"],
                card.get("tasks") or {},
                card.get("epochs"),
                card.get("smallest") or {},
                {part: tuple(names) for part, names in (card.get("freeze") or {}).items()},
                tuple(card.get("lora_targets") or ()),
                card.get("needs_gib") or {},
                tuple(card.get("further_classes") or ()),
                tuple(card.get("not_trained") or ()),
            )
        )
    return tuple(found)


_NEEDED = ("title", "class", "modalities", "task", "released", "proven")
"""Keys of a model's card beside `ids`; all others may be left out."""


def _check_whole(card: JsonObject, folder: str) -> None:
    """Raise `ConfigError` for the first key that a model's card lacks."""
    for key in _NEEDED:
        if key not in card:
            where = str(_ENGINE / "models" / folder / "card.yaml")
            way_out = f"A model's card holds {', '.join(('ids', *_NEEDED))}; `ModelCard` in params/cards.py says more."
            raise ConfigError("the card lacks it", where=where, key=key, way_out=way_out)


def _by_id(folder: str) -> Iterator[tuple[str, JsonObject, str]]:
    """(id, its card, the card's folder) of everything that is registered below a folder."""
    for card, name in _cards(folder):
        for identity in card["ids"]:
            yield identity, card, name


@cache
def model_cards() -> dict[str, JsonMapping]:
    """Built-in model id → its own keys with their defaults."""
    return {name: card.get("keys") or {} for name, card, _ in _by_id("models")}


@cache
def module_names() -> dict[str, Mapping[str, str]]:
    """Built-in model id → module name in files written for another implementation of it → the name here."""
    return {name: card["modules"] for name, card, _ in _by_id("models") if card.get("modules")}


@cache
def dataset_cards() -> dict[str, JsonMapping]:
    """Built-in dataset type → its own keys with their defaults."""
    return {name: card.get("keys") or {} for name, card, _ in _by_id("data/datasets")}


@cache
def models_of_datasets() -> dict[str, str]:
    """Built-in dataset type → the only model id that is trained on its rows, where there is one."""
    return {name: card["model_id"] for name, card, _ in _by_id("data/datasets") if card.get("model_id")}


@cache
def model_modules() -> dict[str, str]:
    """Built-in model id → the module that registers it: `models/<name>/modeling_<name>.py`."""
    return {name: f"{_MODELS}.{folder}.modeling_{folder}" for name, _, folder in _by_id("models")}


@cache
def own_model_types() -> dict[str, tuple[str, ...]]:
    """Model type in config.json that transformers does not know → the modules of the families that are written here;
    several share one, and differ in `architectures`."""
    found: dict[str, tuple[str, ...]] = {}
    for card, folder in _cards("models"):
        module = f"{_MODELS}.{folder}.modeling_{folder}"
        for name in card.get("model_types") or ():
            found[name] = (*found.get(name, ()), module)
    return found


@cache
def types_of_processors_in_code() -> frozenset[str]:
    """Model types in config.json of families that are written here and whose released code has the settings of the
    processor in it: a folder needs no file of them."""
    return frozenset(
        name for card, _ in _cards("models") if card.get("processor_in_code") for name in card["model_types"]
    )


def id_in_folder(model_id: str, model_type: str | None) -> str:
    """The id of the family that is built where files name `model_id`, which several families may be called by: that of
    the folder's model type, else the id itself."""
    for name, card, _ in _by_id("models"):
        if model_id in (card.get("shared_ids") or ()) and model_type in card["model_types"]:
            return name
    return model_id


@cache
def voices() -> dict[str, str]:
    """Model type in config.json → the class that speaks for it: a module of `fsdp/sampling/speech` and its class."""
    found: dict[str, str] = {}
    for card, _ in _cards("models"):
        found |= card.get("voices") or {}
    return found


@cache
def dataset_modules() -> dict[str, str]:
    """Built-in dataset type → the module that registers it, which its card names."""
    return {name: f"{_DATASETS}.{folder}.{card['module']}" for name, card, folder in _by_id("data/datasets")}


@cache
def transformer_ids() -> dict[str, str]:
    """Class of a denoising transformer, in diffusers or here → id of the generator that is trained with it."""
    found = {}
    for card, _ in _cards("models"):
        if card.get("tasks"):
            for name in (card["class"].partition(".")[2], *(card.get("further_classes") or ())):
                found[name] = card["ids"][0]
    return found


def has_own_class(transformer: str) -> bool:
    """Whether a class of denoising transformers, that of a family, is written here, so that diffusers knows nothing of
    the family."""
    return any(
        card.model_class == f"mindspeed_mm.{transformer}" or transformer in card.further_classes for card in families()
    )


@cache
def _cards(folder: str) -> list[tuple[JsonObject, str]]:
    """The cards of a room, each with the name of its folder."""
    found = []
    for path in sorted((_ENGINE / folder).glob("*/card.yaml")):
        card = _plain_card(read_config_text(path), str(path))
        if not isinstance(card, dict) or not isinstance(card.get("ids"), list):
            raise ConfigError("a card holds 'ids', a list", where=str(path))
        found.append((card, path.parent.name))
    return found


def _plain_card(text: str, source: str) -> object:
    """The values of a card: read in C, as each start reads all cards, unless there is something to say of the text."""
    try:
        return yaml.load(text, _Loader)  # noqa: S506 (a loader of plain values)
    except yaml.YAMLError:
        return plain(parse_yaml(text, source).root)
