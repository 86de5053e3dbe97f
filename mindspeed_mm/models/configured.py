"""The model that flags and model.json name, as `mm train` builds it."""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from collections.abc import Mapping, MutableMapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mindspeed_mm.core.artifacts import atomic_write_text
from mindspeed_mm.core.batch import IGNORED_LABEL
from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.models.modelhub import ModelHub
from mindspeed_mm.fsdp.params.cards import model_modules
from mindspeed_mm.fsdp.params.loader import ResolvedConfig
from mindspeed_mm.fsdp.train.provider.json_section import JsonSection
from mindspeed_mm.fsdp.train.provider.live import ModelFront, live_trainer
from mindspeed_mm.fsdp.utils.dtypes import torch_dtype
from mindspeed_mm.provider.sized_folder import files_of_sizes

SIZED = "model_of_sizes"
"""Folder inside the run's that describes a model which no folder was named for."""


class ConfiguredModel(ModelFront):
    """A front over the model of the run's configuration, which is built without values: they come from its folder, or
    from `--load`, straight into the shards; from scratch where there is no folder, and the sizes of `config` are all
    that is known.

    Args:
        config: The model's section, kept as `config`. What is built is decided by the configuration that it was
            translated to: sizes that differ from the folder's are refused there.
    """

    def __init__(self, config: Any = None, **_kwargs: object) -> None:
        super().__init__(build_configured(config))
        self.config = config

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module inside returns; where labels are given, with `loss_mask`, (B, L - 1): 1 for each label that
        the loss is the mean over, by which scripts count tokens."""
        output = super().forward(*args, **kwargs)
        labels = kwargs.get("labels")
        if isinstance(output, MutableMapping) and isinstance(labels, torch.Tensor):
            output["loss_mask"] = (labels[..., 1:] != IGNORED_LABEL).to(torch.float32)
        return output


def build_configured(config: Any = None) -> nn.Module:
    """The model of the run's configuration, parameters on meta.

    Args:
        config: The model's section, for its sizes.

    Raises:
        ConfigError: No run is under way, or the model cannot be had as the configuration says.
    """
    trainer = live_trainer("model_provider")
    section = trainer.arguments.model
    if section.model_name_or_path is None and section.model_id in (None, *model_modules()):
        sizes = config.to_dict() if isinstance(config, JsonSection) else dict(config or {})
        trainer.config = with_sized_folder(trainer.config, sizes, getattr(trainer.args, "mm_model", None))
        trainer.arguments = trainer.config.arguments
    arguments = trainer.arguments
    param_dtype = torch_dtype(arguments.parallel.fsdp_plan.param_dtype)
    return ModelHub.build(arguments.model, param_dtype=param_dtype, feature_args=arguments.features)


def with_sized_folder(config: ResolvedConfig, sizes: Mapping[str, object], where: str | None) -> ResolvedConfig:
    """The configuration with a folder of a model of these sizes, which is trained from scratch.

    Args:
        config: Names no folder.
        sizes: The content of model.json.
        where: Its path, for messages.

    Raises:
        ConfigError: The sizes are not enough, or are not those that the run began with.
    """
    arguments = config.arguments
    folder = str(_sized_folder(sizes, where or "--mm-model", arguments.training.save))
    model = arguments.model.model_copy(update={"model_name_or_path": folder, "train_from_scratch": True})
    dataset = arguments.data.dataset_param
    preprocess = dataset.preprocess_parameters
    if preprocess.model_name_or_path is None:
        preprocess = preprocess.model_copy(update={"model_name_or_path": folder})
    data = arguments.data.model_copy(
        update={"dataset_param": dataset.model_copy(update={"preprocess_parameters": preprocess})}
    )
    return replace(config, arguments=arguments.model_copy(update={"model": model, "data": data}))


def _sized_folder(sizes: Mapping[str, object], where: str, save: str | None) -> Path:
    """In the run's folder, from which the model is exported and resumed; a temporary one where nothing is saved."""
    files = files_of_sizes(sizes, where)
    if save is None:
        folder = Path(tempfile.mkdtemp(prefix="mindspeed-mm-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    else:
        folder = Path(save) / SIZED
    for name, values in files.items():
        path, text = folder / name, json.dumps(values, indent=2) + "\n"
        if path.is_file() and path.read_text(encoding="utf-8") != text:
            raise ConfigError(
                "the sizes are not those that the run began with",
                where=where,
                way_out=f"Compare them with {path}, or name another folder with --save.",
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write_text(path, text)
    return folder
