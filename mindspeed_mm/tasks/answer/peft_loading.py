"""Adapters beside the weights of a language model, by PEFT."""

from __future__ import annotations

import warnings
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any

from torch import nn

from mindspeed_mm.core.errors import ModelFolderError
from mindspeed_mm.fsdp.models.added_tokens import grow_live
from mindspeed_mm.fsdp.models.lora.files import PEFT_CONFIG, AdapterFile
from mindspeed_mm.fsdp.utils.quiet import quiet

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_WAY_OUT = "Name the model that they were trained on."


def check_peft_folder(folder: Path, key: str) -> None:
    """Raise `ModelFolderError` unless a folder has adapters as PEFT writes them; `key` is the option that names it."""
    AdapterFile.find(folder, key)
    if not (folder / PEFT_CONFIG).is_file():
        raise ModelFolderError(f"holds no {PEFT_CONFIG}", where=str(folder), key=key, way_out="Name PEFT's folder.")


def grow_for_adapters(model: nn.Module, folder: Path, key: str = "--lora") -> None:
    """Append rows for the tokens that adapters were trained with to a model without adapters; the adapters hold their
    values. A model that has the rows stays as it is."""
    grow_live(model, tokens_of_adapters(folder, key))


def tokens_of_adapters(folder: Path, key: str = "--lora") -> list[int]:
    """Numbers of the tokens that adapters were trained with, in rising order; none for most adapters."""
    tokens = AdapterFile.find(folder, key).adapter().tokens
    return sorted({row for each in tokens.values() for row in each.rows})


def check_tokens(folder: Path, tokenizer: PreTrainedTokenizerBase, key: str) -> None:
    """Raise `ModelFolderError` where adapters were trained with tokens that the tokenizer does not have: it would split
    their text into others."""
    tokens = tokens_of_adapters(folder, key)
    if tokens and tokens[-1] >= len(tokenizer):
        raise ModelFolderError(
            f"the adapters have a row for token {tokens[-1]}, and the tokenizer has {len(tokenizer)} tokens",
            where=str(folder),
            key=key,
            way_out="Merge them into the model (mm merge), or write them anew with mm export.",
        )


def load_peft(model: nn.Module, folder: Path, name: str = "default", key: str = "--lora") -> Any:
    """Put adapters into a model of transformers, or beside those that are in it.

    Args:
        model: Loaded.
        folder: As PEFT writes it.
        name: Of these adapters.
        key: The option that names the folder, for messages.

    Raises:
        ModelFolderError: There are none, or they do not belong to this model.
    """
    check_peft_folder(folder, key)
    from peft import PeftModel  # half a second

    try:
        with quiet("transformers"), warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            if isinstance(model, PeftModel):
                model.load_adapter(str(folder), name, local_files_only=True)
                adapted = model
            else:
                grow_for_adapters(model, folder, key)
                adapted = PeftModel.from_pretrained(model, str(folder), name, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        raise ModelFolderError(
            f"the adapters do not belong to this model: {first_line}", where=str(folder), key=key, way_out=_WAY_OUT
        ) from error
    # PEFT leaves what it does not find as it was drawn, and says so in a warning.
    if lacking := [str(each.message) for each in said if "missing adapter keys" in str(each.message)]:
        first_line = shorten(lacking[0].splitlines()[0], 200, placeholder=" …")
        what = f"the adapters do not belong to this model: {first_line}"
        raise ModelFolderError(what, where=str(folder), key=key, way_out=_WAY_OUT)
    return adapted.eval()
