"""The tensors of a model, under the hub's names, out of any folder that stores them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from mindspeed_mm.checkpoint.dequantized import dequantized
from mindspeed_mm.checkpoint.lazy_tensor import LazyTensor
from mindspeed_mm.checkpoint.megatron.families import family_of
from mindspeed_mm.checkpoint.megatron.folder import hub_tensors
from mindspeed_mm.checkpoint.recognise import is_megatron_folder
from mindspeed_mm.checkpoint.safetensors_folder import open_weights
from mindspeed_mm.core.errors import ModelFolderError, Problem, told_as
from mindspeed_mm.core.json_file import read_json_object


@contextmanager
def open_stored(folder: Path, config: Mapping[str, Any] | None) -> Iterator[Mapping[str, LazyTensor]]:
    """A folder's tensors by the hub's names, open for the length of the `with` block. Those that are kept in few bits
    are numbers here.

    Args:
        folder: With safetensors, or in Megatron's style.
        config: The model's config.json: a folder in Megatron's style does not say what model it holds.

    Raises:
        MMError: As `open_weights`, `dequantized`, `hub_tensors` and `family_of`.
    """
    if is_megatron_folder(folder):
        with told_as(partial(_in_folder, folder)):
            joined = hub_tensors(folder, family_of(config or {}), config or {})
        yield joined
    else:
        with open_weights(folder) as stored:
            yield dequantized(stored, _config_of(folder), str(folder))


def _config_of(folder: Path) -> dict[str, Any]:
    """What config.json beside the weights says, where there is one: the model does not know how they are kept."""
    path = folder / "config.json"
    return read_json_object(path, ModelFolderError) if path.is_file() else {}


def _in_folder(folder: Path, problem: Problem) -> Problem:
    """With the folder in front of a place that is told within it."""
    inside = problem.where
    return problem if str(folder) in inside else replace(problem, where=": ".join(filter(None, [str(folder), inside])))
