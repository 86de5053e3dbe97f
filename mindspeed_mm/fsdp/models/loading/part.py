"""What of a released folder is trained: of Qwen-Omni's the thinker, which sees, hears and answers in text. The talker
and the speech decoder beside it are not loaded; an export has them as they were.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from mindspeed_mm.checkpoint.lazy_tensor import LazyTensor
from mindspeed_mm.checkpoint.safetensors_folder import open_weights
from mindspeed_mm.core.errors import ModelFolderError, Problem
from mindspeed_mm.fsdp.utils.model_parts import attribute_at, has_all

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig

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
