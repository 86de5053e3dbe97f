"""Reads a model folder's config.json with suspicion, and finds the class that it describes and what of it is trained.

A folder is data: its own Python files run only when `model.trust_remote_code` says so and transformers has no class of
its own for the model. Of Qwen-Omni the thinker is trained, which sees, hears and answers in text. The talker and the
speech decoder beside it are not loaded; an export has them as they were.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from huggingface_hub.errors import StrictDataclassError

from mindspeed_mm.checkpoint.dequantized import read_quantization
from mindspeed_mm.checkpoint.lazy_tensor import LazyTensor
from mindspeed_mm.checkpoint.safetensors_folder import open_weights
from mindspeed_mm.checkpoint.transformers_map import inherit_rules
from mindspeed_mm.core.errors import ConfigError, ModelFolderError, Problem
from mindspeed_mm.core.folder_links import check_links
from mindspeed_mm.core.json_file import JsonObject, read_json_object
from mindspeed_mm.core.suggest import did_you_mean
from mindspeed_mm.fsdp.utils.model_parts import attribute_at, has_all
from mindspeed_mm.fsdp.utils.own_families import know_family_of
from mindspeed_mm.fsdp.utils.plugins import hash_of_files
from mindspeed_mm.fsdp.utils.quiet import quiet

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig


_KEY = "model.model_name_or_path"
STATE = re.compile(
    r"__.*|_(attn|experts)_implementation(_internal)?"
    r"|_(auto_class|post_init_done|output_attentions|heterogeneity_spec|rope_type_labels|legacy_field_names)"
    r"|_(check|decode|dict|encode|get|getattr|hasattr|iter|remove_keys|resolve|update|upload|validate)_.*"
)
"""Keys that would set what transformers' configuration class keeps for itself: its state, methods, and kernels to load
from a hub. Of other names with an underscore, those that no class reads have no effect."""
_OWN_ATTENTION = "_attn_implementation"
_ATTENTION_NAMES = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")
"""Of the library itself: a file that was released with one of them (Kimi-K2.5's) says what its authors computed with,
and here nothing. Any other name would be a kernel to load."""
_COUNTS = ("num_hidden_layers", "num_layers", "depth")
_MEASURES = (
    *("hidden_size", "intermediate_size", "out_hidden_size", "embed_dim", "d_model", "vocab_size", "head_dim"),
    *("num_attention_heads", "num_key_value_heads", "num_heads", "max_position_embeddings", "num_position_embeddings"),
    *("patch_size", "temporal_patch_size", "spatial_merge_size", "image_size", "in_channels", "num_channels"),
)
_SIZES = dict.fromkeys(_COUNTS, (0, 100_000)) | dict.fromkeys(_MEASURES, (1, 2**31 - 1))
"""Least and most of what counts or measures, wherever it stands in a configuration."""
_AUTO_CLASSES = (
    "AutoModelForImageTextToText",
    "AutoModelForMultimodalLM",
    "AutoModelForCausalLM",
    "AutoModelForSpeechSeq2Seq",
    "AutoModelForSeq2SeqLM",
)


def read_config(folder: Path) -> JsonObject:
    """config.json as it stands.

    Raises:
        ModelFolderError: No folder, no file, no valid JSON, keys that reach for private state, weights in a format that
            is not read, or a file that is a link out of the folder.
    """
    if not folder.is_dir():
        raise ModelFolderError(
            f"'{folder}' is not a folder",
            key=_KEY,
            way_out="Use a local folder with the model's files; nothing is downloaded.",
        )
    check_links(folder)
    path = folder / "config.json"
    if not path.is_file():
        raise ModelFolderError(
            "no config.json here", where=str(folder), key=_KEY, way_out="Use a folder with a model's config.json."
        )
    config = read_json_object(path, ModelFolderError)
    model_type = config.get("model_type")
    if not isinstance(model_type, str | None):
        raise ModelFolderError(
            f"{model_type!r:.80} is not a model type", where=str(path), key="model_type", way_out="Copy the file again."
        )
    _check_keys(config, path)
    return config


def load_model_config(folder: Path, *, trust_remote_code: bool = False, plugin_class: type | None = None) -> Any:
    """The folder's configuration as transformers' object.

    Args:
        folder: The model folder.
        trust_remote_code: Let the folder's own Python define a configuration that transformers does not know.
        plugin_class: The registered class that will be built. Of a model type that transformers does not know it takes
            its own `config_class`, or the settings as a plain object with attributes.

    Raises:
        ModelFolderError: As `read_config`, or the model type is unknown, or a setting has a wrong type.
    """
    from transformers import AutoConfig  # seconds to import
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = read_config(folder)
    know_family_of(folder)
    model_type = config.get("model_type")
    is_native = model_type in CONFIG_MAPPING
    own_config_class = attribute_at(plugin_class, "config_class")
    if not is_native and plugin_class is not None and own_config_class is None:
        return SimpleNamespace(**config)
    if not is_native and own_config_class is None and not (trust_remote_code and "auto_map" in config):
        raise _unknown_type(folder, config, list(CONFIG_MAPPING))
    try:
        if not is_native and own_config_class is not None:
            return own_config_class.from_dict(config)
        trusted = trust_remote_code and not is_native
        loaded = AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=trusted)
        return _as_trained(loaded)
    except (StrictDataclassError, ValueError, TypeError, KeyError, AttributeError, OSError) as error:
        reason = " ".join(str(error).split())
        raise ModelFolderError(
            f"transformers cannot read it: {reason}",
            where=str(folder / "config.json"),
            way_out="Compare it with the original model's config.json.",
        ) from error


def _as_trained(config: PreTrainedConfig) -> PreTrainedConfig:
    """The configuration of the model that is trained: its weights are numbers, however the folder keeps them, and what
    computes attention is chosen here."""
    config.__dict__.pop("quantization_config", None)
    config._attn_implementation = None
    for name in attribute_at(config, "sub_configs", {}):
        section = attribute_at(config, name)
        if section is not None:
            _as_trained(section)
    return config


def native_class(config: PreTrainedConfig, folder: Path, *, trust_remote_code: bool = False) -> type:
    """transformers' class for a configuration: the one that `architectures` names, else the one of the model type.

    Raises:
        ModelFolderError: There is none, and the folder's own code may not run or defines none.
    """
    import transformers  # seconds to import

    for name in config.architectures or []:
        if name.startswith("_"):
            continue
        found = getattr(transformers, name, None)
        if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
            return found
    for name in _AUTO_CLASSES:
        known: Mapping[type, type] = attribute_at(transformers, f"{name}._model_mapping", {})
        if type(config) in known:
            inherit_rules(known[type(config)])  # `from_pretrained` looks for them
            return known[type(config)]
    of_folder = _class_of_folder(config, folder) if trust_remote_code else None
    if of_folder is not None:
        return of_folder
    raise ModelFolderError(
        f"transformers has no class for architectures {config.architectures} (model type '{config.model_type}')",
        where=str(folder / "config.json"),
        way_out="To train, register a plugin's class and name it in model.model_id. To answer, the class derives from "
        "PreTrainedModel and GenerationMixin and is registered with an Auto class of transformers: docs/plugins.md, "
        "step 3.",
    )


def folder_warnings(folder: Path, *, trust_remote_code: bool = False) -> list[str]:
    """What deserves a word but stops nothing: code that is not run, names that differ in case only."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # seconds to import

    found = []
    path = folder / "config.json"
    is_native = path.is_file() and read_json_object(path, ModelFolderError).get("model_type") in CONFIG_MAPPING
    code = [path.name for path in _code_files(folder)]
    if code and (is_native or not trust_remote_code):
        found.append(f"{folder}: {', '.join(code)}: not run, the class of transformers is used")
    by_name = defaultdict(list)
    for path in sorted(folder.iterdir()):
        by_name[path.name.casefold()].append(path.name)
    for names in by_name.values():
        if len(names) > 1:
            found.append(f"{folder}: {' and '.join(names)} differ only in case")
    return found


def code_hash(folder: Path) -> str:
    """SHA-256 over the folder's Python files, to be noted in a run that executed them; empty when there are none."""
    files = _code_files(folder)
    if files:
        return hash_of_files(files)
    return ""


def _code_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.py"))


def _class_of_folder(config: PreTrainedConfig, folder: Path) -> type | None:
    from transformers.dynamic_module_utils import get_class_from_dynamic_module  # seconds to import

    references: Mapping[str, str] = attribute_at(config, "auto_map", {})
    for name in (*_AUTO_CLASSES, "AutoModel"):
        if name in references:
            return get_class_from_dynamic_module(references[name], str(folder), local_files_only=True)
    return None


def _check_keys(config: Mapping[str, object], path: Path, section: str = "") -> None:
    """Refuse private keys, and weights that are quantised in a way that is not read, at any depth."""
    for key, value in config.items():
        if STATE.fullmatch(key) and not (key == _OWN_ATTENTION and value in _ATTENTION_NAMES):
            raise ModelFolderError(
                f"'{key}' is internal state of a configuration, which no library writes into its file",
                where=str(path),
                key=section + key,
                way_out="Remove it.",
            )
        if key == "quantization_config" and value:
            read_quantization(value, str(path), section + key)
        if key in _SIZES:
            _check_size(value, path, section + key)
        if isinstance(value, dict):
            _check_keys(value, path, f"{section}{key}.")
    _check_shares(config, path, section)


def _check_shares(config: Mapping[str, object], path: Path, section: str) -> None:
    """Refuse sizes that are sound alone and impossible together."""
    heads, key_heads = config.get("num_attention_heads"), config.get("num_key_value_heads")
    what = key = ""
    # `type`, not `isinstance`: true and false are ints, too.
    if type(heads) is int and type(key_heads) is int and heads % key_heads:
        key = "num_key_value_heads"
        what = f"{heads} attention heads cannot be shared among {key_heads} key-value heads"
    chosen = config.get("num_experts_per_tok")
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        if type(experts := config.get(name)) is int and type(chosen) is int and 0 < experts < chosen:
            key, what = "num_experts_per_tok", f"a token cannot choose {chosen} of {experts} experts"
    if key:
        way_out = "Compare it with the original model's config.json."
        raise ModelFolderError(what, where=str(path), key=section + key, way_out=way_out)


def _check_size(value: object, path: Path, key: str) -> None:
    """A size of nothing, or of more than there can be, ends in a division by it or in a loop over it somewhere else."""
    least, most = _SIZES[key.rpartition(".")[2]]
    for number in value if isinstance(value, list) else [value]:
        if isinstance(number, int) and not least <= number <= most:
            raise ModelFolderError(
                f"{str(number)[:20]} is out of range. It must be from {least} to {most:,}",
                where=str(path),
                key=key,
                way_out="Compare it with the original model's config.json.",
            )


def _unknown_type(folder: Path, config: Mapping[str, object], known: list[str]) -> ModelFolderError:
    model_type = config.get("model_type")
    where = str(folder / "config.json")
    if "auto_map" in config:
        return ModelFolderError(
            f"model type '{model_type}' is defined by the folder's own Python code, which is not run",
            where=where,
            key="auto_map",
            way_out="Read the code, then set model.trust_remote_code: true; or register a plugin's class.",
        )
    if model_type is None:
        return ModelFolderError(
            "names no model_type", where=where, key="model_type", way_out="Copy the original model's config.json."
        )
    return ModelFolderError(
        f"'{model_type}' is not a model type of transformers",
        where=where,
        key="model_type",
        way_out=f"{did_you_mean(str(model_type), known)}A class of your own is registered by a plugin, with AutoConfig "
        "too: name it in training.plugin, or on the command line in --plugin.",
    )


def require_folder(model_name_or_path: str | None) -> Path:
    """The folder that the configuration names.

    Raises:
        ConfigError: It names none.
    """
    if not model_name_or_path:
        raise ConfigError(
            "is not set", key=_KEY, way_out="Name the local folder of the model, the one with config.json."
        )
    return Path(model_name_or_path)


def check_all_loaded(report: Mapping[str, Iterable[object]], folder: Path) -> None:
    """Raise `ModelFolderError` when a library's `from_pretrained(output_loading_info=True)` left weights out."""
    listed = []
    for kind in ("missing", "unexpected", "mismatched"):
        keys = sorted(map(str, report.get(f"{kind}_keys") or ()))
        if keys:
            listed.append(f"{len(keys)} {kind} ({', '.join(keys[:3])} …)")
    if listed:
        raise ModelFolderError(
            f"weight keys do not match: {', '.join(listed)}",
            where=str(folder),
            way_out="The weights do not belong to this config.json.",
        )


_TRAINED = "thinker_config"
OTHERS = r"^(talker|token2wav|code2wav)\."
"""Keys of the models beside a thinker, which transformers before 5.23 does not list among those that it passes over."""


def trained_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The configuration of the model that is trained: a section of one that describes several models, else itself."""
    trained: PreTrainedConfig = attribute_at(config, _TRAINED, config)
    return trained


def check_parts(config: PreTrainedConfig, folder: Path) -> None:
    """Raise `ModelFolderError` when a model that a folder's configuration describes has no weights there.

    Args:
        config: transformers' object of the whole folder. With `enable_audio_output: false` it describes the thinker
            alone, whatever sections it has.
        folder: With config.json; one without any weights is no concern of this check.
    """
    if not has_all(config, _TRAINED) or not any(folder.glob("*.safetensors")):
        return
    sections = [_TRAINED]
    if attribute_at(config, "enable_audio_output", True):
        sections = list(type(config).sub_configs)
    with open_weights(folder) as stored:
        there = {key.partition(".")[0] for key in stored}
    problems = []
    for section in sections:
        name = section.removesuffix("_config")
        if name not in there:
            problems.append(Problem("no key begins so", key=f"{name}."))
    if problems:
        raise ModelFolderError(
            f"{folder}: config.json describes models whose weights are not stored. Copy every file of the released "
            "folder; one without speech says enable_audio_output: false.",
            problems=problems,
        )


def pass_over_others(model: nn.Module) -> None:
    """Let the loading of a thinker pass over what lies beside it in a released folder."""
    if attribute_at(model, "config.model_type", "").endswith("_thinker"):
        known = attribute_at(model, "_keys_to_ignore_on_load_unexpected", ())
        model._keys_to_ignore_on_load_unexpected = [*known, OTHERS]  # type: ignore[assignment]


def kept_beside(model: nn.Module, stored: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """What a folder holds that the model's class is made to pass over: further models, heads for further tokens."""
    patterns = [re.compile(regex) for regex in attribute_at(model, "_keys_to_ignore_on_load_unexpected", ())]
    kept = {}
    for key, tensor in stored.items():
        if any(pattern.search(key) for pattern in patterns):
            kept[key] = tensor
    return kept


def load_pretrained(model_class: Any, folder: Path, config: Any) -> Any:
    """The model of a folder in evaluation mode, on the CPU, in the type that its weights are stored in.

    Args:
        model_class: Of transformers, or made like one.
        folder: With the weights.
        config: The folder's, as `load_model_config` reads it.

    Raises:
        ModelFolderError: Weights are missing, left over or broken.
    """
    try:
        with quiet("transformers"):
            model, report = model_class.from_pretrained(
                folder, config=config, dtype="auto", local_files_only=True, output_loading_info=True
            )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        what, way_out = f"the model cannot be loaded: {first_line}", "Take the folder as it was published or exported."
        raise ModelFolderError(what, where=str(folder), way_out=way_out) from error
    check_all_loaded(report, folder)
    return model.eval()
