"""The weights that a run starts from, and its adapters stand on: where they are, what they hold, and a quick mark of
them. No checkpoint holds those under adapters, so nothing else would notice that others are in their folder now."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from mindspeed_mm.checkpoint.hf_folder import DtypeRule, config_dtype
from mindspeed_mm.checkpoint.lazy_tensor import LazyTensor
from mindspeed_mm.checkpoint.recognise import recognise
from mindspeed_mm.checkpoint.safetensors_folder import holds_safetensors
from mindspeed_mm.checkpoint.stored_weights import holds_weights, open_stored, step_of_weights, stored_files
from mindspeed_mm.core.errors import Problem, told_as
from mindspeed_mm.fsdp.models.diffusion.transformer import transformer_weights
from mindspeed_mm.fsdp.utils.model_parts import setting_of

_SAMPLES = 16
_SAMPLE_BYTES = 1 << 16


def weights_folder_of_load(load: str | None) -> Path | None:
    """The folder that `training.load` names when it holds a model's weights; None when those of the model folder count.
    A run that trains adapters needs them again whenever it goes on."""
    folder = Path(load) if load else None
    if folder is None or not folder.is_dir():
        return None
    is_model = recognise(folder) in {"hf", "megatron"}
    if is_model or step_of_weights(folder) is not None:
        return folder
    return None


@contextmanager
def told_by_load(load: str | None) -> Iterator[None]:
    """What is wrong with the weights that `training.load` names is told under that key, unless it has another."""

    def with_key(problem: Problem) -> Problem:
        if load and not problem.key:
            return replace(problem, key="training.load")
        return problem

    with told_as(with_key):
        yield


def base_weights_mark(folder: Path) -> str:
    """Sixteen hexadecimal digits that tell a model folder's weights: names and sizes of the files, and stretches of
    their content from beginning to end. Where the folder lies does not matter, nor does reading take long.

    Raises:
        ModelFolderError: There are no weights.
    """
    digest = hashlib.sha256()
    for file in stored_files(transformer_weights(folder)):
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        with file.open("rb") as stream:
            for sample in range(_SAMPLES):
                stream.seek(max(0, size - _SAMPLE_BYTES) * sample // (_SAMPLES - 1))
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:16]


def has_weights(folder: Path) -> bool:
    """Whether a model folder holds any, and not its configuration alone."""
    return holds_weights(folder)


@contextmanager
def open_base(model: nn.Module, folder: Path) -> Iterator[Mapping[str, LazyTensor]]:
    """A folder's tensors by the hub's names, as `open_stored` has them; `model` says which model they are of."""
    config = setting_of(model, object, "config")
    with open_stored(folder, config.to_dict() if hasattr(config, "to_dict") else None) as stored:
        yield stored


def dtypes_of_base(model: nn.Module, folder: Path, dtype: torch.dtype | None) -> DtypeRule:
    """In which dtype a whole model is written: each tensor as the folder has it, or all in `dtype`."""
    if dtype is not None or holds_safetensors(folder) or not holds_weights(folder):
        return DtypeRule.of_source(folder, dtype)
    with open_base(model, folder) as stored:
        return DtypeRule({key: tensor.dtype for key, tensor in stored.items()}, config_dtype(folder))
