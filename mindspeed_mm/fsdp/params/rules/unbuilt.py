"""Keys that are part of the schema but whose feature this version does not have: what they may be set to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from mindspeed_mm.core.config_path import value_at
from mindspeed_mm.core.errors import Problem
from mindspeed_mm.fsdp.params.argument import Arguments, DataArguments, TrainingArguments
from mindspeed_mm.fsdp.params.cards import dataset_cards
from mindspeed_mm.fsdp.params.inference_args import InferenceArguments
from mindspeed_mm.fsdp.params.posttrain_args import BUILT_METHODS
from mindspeed_mm.fsdp.params.value_types import show

_DATASET: dict[str, tuple[object, ...]] = {
    "basic_parameters.streaming": (False,),
    "basic_parameters.async_preprocess": (False,),
    "basic_parameters.mix": (None,),
}
"""Keys of the built-in datasets; a plugin's dataset may act on more of them."""

_ACTING = {
    "async_preprocess": ("huggingface",),
    "mix": ("huggingface", "generation", "bagel"),
    "streaming": ("huggingface",),
}
"""Key → the `dataset_type` of the built-in data sets that act on it."""

_INFERENCE: dict[str, str] = {
    "load": "mm infer and mm evaluate take the model as their first argument.",
    "load_format": "mm infer and mm evaluate recognise the layout.",
    "seed": "Give mm infer --seed; generators: inference.sampling.seed.",
    "use_deter_comp": "Kernels are chosen by the libraries.",
    "plugin": "mm infer imports the run's own training.plugin.",
    "processor_path": "The processor is taken from the model's folder.",
    "enable_thinking": "The chat template's own default applies.",
    "data_path": "Give mm infer and mm evaluate --data.",
    "generation.max_new_tokens": "Give mm infer and mm evaluate --max-new-tokens.",
    "generation.do_sample": "mm infer samples as generation_config.json says, or by --temperature.",
    "generation.temperature": "Give mm infer --temperature.",
    "generation.top_p": "Give mm infer --top-p.",
    "generation.top_k": "Give mm infer --top-k.",
    "generation.repetition_penalty": "Set it in the generation_config.json of the model's folder.",
    "generation.use_cache": "Keys and values are always kept.",
}
"""Keys of `inference` that nothing reads yet → what counts instead. Their defaults are accepted."""

Value = TypeVar("Value")


def _below(section: str, entries: Mapping[str, Value]) -> dict[str, Value]:
    """Keys of a section, dotted."""
    return {f"{section}.{key}": value for key, value in entries.items()}


def acting_datasets(key: str) -> tuple[str, ...]:
    """The `dataset_type` of the built-in data sets that act on a key of `BUILT_VALUES`; empty where that is not the
    question. A plugin's data set may act on any."""
    if not key.startswith("data."):
        return ()
    return _ACTING.get(key.rpartition(".")[2], ())


_DEFAULTS = InferenceArguments()
_ABSENT = object()
"""What a key has whose section is not given."""

INSTEAD: dict[str, str] = {
    **_below("inference", _INFERENCE),
}
"""Key → what to do instead, where that is more than to leave it out."""

BUILT_VALUES: dict[str, tuple[object, ...]] = {
    "model.checkpoint_path": (None,),
    "model.text_encoder_path": (None,),
    **_below("data.dataset_param", _DATASET),
    **_below("data.val_dataset_param", _DATASET),
    "data.dataloader_param.dataloader_mode": ("sampler", "base", "variable"),
    **_below("inference", {key: (value_at(_DEFAULTS, key),) for key in _INFERENCE}),
    "posttrain.rollout.weight_sync": ("disk",),
    "posttrain.dmd.independent_first_frame": (False,),
    "posttrain.dmd.gan_loss_weight": (0.0,),
    "posttrain.dmd.regression_loss_weight": (0.0,),
    "posttrain.method": (None, *sorted({method for methods in BUILT_METHODS.values() for method in methods})),
}
"""Key → values that this version can act on. Keys that are not listed are built."""


def unbuilt_features(arguments: Arguments) -> list[Problem]:
    """One problem for each key that asks for a feature this version does not have."""
    problems = []
    for key, built in BUILT_VALUES.items():
        value = value_at(arguments, key, _ABSENT)
        # By type, too: 0 and false are equal in Python, and not in a configuration.
        is_built = any(value == known and type(value) is type(known) for known in built)
        if value is not _ABSENT and not is_built and not _is_idle(arguments.data, arguments.training, key):
            way_out = f"This version takes {' or '.join(map(show, built))}."
            if key in INSTEAD:
                way_out += f" {INSTEAD[key]}"
            what = f"{show(value)} asks for a feature that this version does not have"
            problems.append(Problem(what, key=key, way_out=way_out))
    return problems


def _is_idle(data: DataArguments, training: TrainingArguments, key: str) -> bool:
    """Whether nothing of ours acts on the key."""
    is_of_lora = key.startswith("training.lora.")
    return (is_of_lora and not training.lora.enable) or _is_of_a_plugin(data, key)


def _is_of_a_plugin(data: DataArguments, key: str) -> bool:
    """Whether the key is for a dataset that is not built in, or for one that acts on it."""
    section, name = key.split(".")[:2]
    acting = acting_datasets(key)
    if acting and getattr(data, name).dataset_type in acting:
        return True
    is_described = section == "data" and name != "dataloader_param"
    return is_described and data[name].dataset_type not in dataset_cards()
