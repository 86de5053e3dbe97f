"""Text models in GGUF, the single-file format of llama.cpp: read by transformers, kept as a model folder.

Everything else in the package works on model folders, so a file is converted once, into a folder next to it
(`model.gguf` → `model.gguf.hf`), which later commands use again.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from mindspeed_mm.checkpoint.hf_folder import write_weights
from mindspeed_mm.checkpoint.lazy_tensor import HeldTensor
from mindspeed_mm.checkpoint.recognise import is_gguf
from mindspeed_mm.core.artifacts import atomic_write_text, one_at_a_time
from mindspeed_mm.core.errors import MachineError, ModelFolderError
from mindspeed_mm.core.folder_writing import atomic_folder
from mindspeed_mm.core.json_file import parse_json
from mindspeed_mm.core.terminal import say
from mindspeed_mm.fsdp.utils.finite import is_finite
from mindspeed_mm.fsdp.utils.quiet import quiet
from mindspeed_mm.fsdp.utils.torchvision_guard import prepare_for_transformers

_SUFFIX = ".hf"
_SOURCE = "gguf_source.json"
"""In the folder: size and time of change of the file that it was made from."""
_OTHER_FILE = "Text models of architectures that transformers reads can be used; of others name the original folder."
_WAY_OUT = "Convert it once to a folder of your choice: mm convert MODEL.gguf FOLDER."


def model_folder_of(path: Path, key: str = "") -> Path:
    """The model folder for a path: the path itself, or for a GGUF file the folder made from it.

    The folder is made when there is none, or when the file has changed since. Processes that ask at once wait for the
    first of them.

    Args:
        path: A folder, or a file that ends in `.gguf`.
        key: The option or configuration key that names it, for messages.

    Raises:
        ModelFolderError: transformers cannot read the file.
        MachineError: The package `gguf` is missing, or the folder next to the file cannot be written.
        UsageError: A folder of that name exists and was not made from a GGUF file.
    """
    if not is_gguf(path):
        return path
    folder = path.with_name(path.name + _SUFFIX)
    if not _is_current(folder, path):
        with one_at_a_time(path):
            if not _is_current(folder, path):
                say(f"{path}: converting it to a model folder, {folder}", err=True)
                write_model_folder(path, folder, key, overwrite=(folder / _SOURCE).is_file())
    return folder


def write_model_folder(path: Path, folder: Path, key: str = "", *, overwrite: bool = False) -> list[str]:
    """Write a GGUF file as a model folder: configuration, tokenizer with its chat template, weights.

    transformers reads the whole file into memory. Weights in few bits become fp32. Returns the names of written weights
    that hold NaN or infinity.

    Args:
        path: The file.
        folder: The folder to write.
        key: As of `model_folder_of`.
        overwrite: Replace what was written there before.

    Raises:
        ModelFolderError, MachineError, UsageError: As `model_folder_of`.
    """
    try:
        with atomic_folder(folder, overwrite=overwrite, sources=[path]) as draft:
            model, tokenizer = _read(path, key)
            not_finite = _save(model, tokenizer, draft)
            atomic_write_text(draft / _SOURCE, json.dumps(_file_stamp(path)))
    except MachineError as error:
        if not error.problems[0].way_out:
            error.change_problems(lambda problem: replace(problem, key=key, way_out=_WAY_OUT))
        raise
    return not_finite


def _read(path: Path, key: str) -> tuple[object, object]:
    """The model in fp32 and its tokenizer, by transformers."""
    prepare_for_transformers()
    from transformers import AutoModelForCausalLM, AutoTokenizer  # seconds to import

    place = {"pretrained_model_name_or_path": str(path.absolute().parent), "gguf_file": path.name}
    try:
        with quiet("transformers"):
            model = AutoModelForCausalLM.from_pretrained(**place, local_files_only=True, dtype=torch.float32)
            tokenizer = AutoTokenizer.from_pretrained(**place, local_files_only=True)
    except ImportError as error:
        way_out = "Install it: pip install gguf."
        raise MachineError("reading it needs the package gguf", where=str(path), key=key, way_out=way_out) from error
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ModelFolderError(
            f"transformers cannot read it: {reason:.200}",
            where=str(path),
            key=key,
            way_out=_OTHER_FILE,
        ) from error
    packed = [name for name, tensor in model.state_dict().items() if not tensor.is_floating_point()]
    if packed:
        raise ModelFolderError(
            f"transformers leaves weights packed, {packed[0]} first", where=str(path), key=key, way_out=_OTHER_FILE
        )
    return model, tokenizer


def _save(model: Any, tokenizer: Any, folder: Path) -> list[str]:
    """Write the folder. Returns the names of weights that hold NaN or infinity."""
    tensors: dict[str, HeldTensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() not in seen:  # the second name of a tied weight
            tensors[name] = HeldTensor(tensor)
        seen.add(tensor.data_ptr())
    write_weights(tensors, folder, lambda _, dtype: dtype)
    config = model.config
    for name in ("quantization_config", "_model_name_or_path"):  # of the file, not of the folder
        if hasattr(config, name):
            delattr(config, name)
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(folder)
    return [name for name, tensor in tensors.items() if not is_finite(tensor.read())]


def _is_current(folder: Path, path: Path) -> bool:
    try:
        return bool(parse_json((folder / _SOURCE).read_bytes()) == _file_stamp(path))
    except (OSError, ValueError):
        return False


def _file_stamp(path: Path) -> dict[str, int]:
    facts = path.stat()
    return {"size_bytes": facts.st_size, "mtime_ns": facts.st_mtime_ns}
