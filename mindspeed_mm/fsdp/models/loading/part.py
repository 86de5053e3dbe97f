"""What of a released folder is trained: of Qwen-Omni's the thinker, which sees, hears and answers in text. The talker
and the speech decoder beside it are not loaded; an export has them as they were.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mindspeed_mm.checkpoint.lazy_tensor import LazyTensor
from mindspeed_mm.checkpoint.safetensors_folder import open_weights
from mindspeed_mm.core.errors import ModelFolderError, Problem

_TRAINED = "thinker_config"
OTHERS = r"^(talker|token2wav|code2wav)\."
"""Keys of the models beside a thinker, which transformers before 5.23 does not list among those that it passes over."""


def trained_config(config: Any) -> Any:
    """The configuration of the model that is trained: a section of one that describes several models, else itself."""
    return getattr(config, _TRAINED, config)


def check_parts(config: Any, folder: Path) -> None:
    """Raise `ModelFolderError` when a model that a folder's configuration describes has no weights there.

    Args:
        config: transformers' object of the whole folder. With `enable_audio_output: false` it describes the thinker
            alone, whatever sections it has.
        folder: With config.json; one without any weights is no concern of this check.
    """
    if not hasattr(config, _TRAINED) or not any(folder.glob("*.safetensors")):
        return
    speaks = getattr(config, "enable_audio_output", True)
    sections = [name for name in type(config).sub_configs if name == _TRAINED or speaks]
    with open_weights(folder) as stored:
        there = {key.partition(".")[0] for key in stored}
    missing = [f"{name}." for name in (section.removesuffix("_config") for section in sections) if name not in there]
    if missing:
        raise ModelFolderError(
            f"{folder}: config.json describes models whose weights are not stored. Copy every file of the released "
            "folder; one without speech says enable_audio_output: false.",
            problems=[Problem("no key begins so", key=prefix) for prefix in missing],
        )


def pass_over_others(model: Any) -> None:
    """Let the loading of a thinker pass over what lies beside it in a released folder."""
    if str(getattr(model.config, "model_type", "")).endswith("_thinker"):
        known = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
        model._keys_to_ignore_on_load_unexpected = [*known, OTHERS]


def kept_beside(model: Any, stored: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """What a folder holds that the model's class is made to pass over: further models, heads for further tokens."""
    patterns = [re.compile(regex) for regex in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()]
    return {key: tensor for key, tensor in stored.items() if any(pattern.search(key) for pattern in patterns)}
