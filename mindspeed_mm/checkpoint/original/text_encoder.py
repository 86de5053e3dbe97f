"""The language model of a LLaVA folder alone, as HunyuanVideo's first text encoder is (`llava-llama-3-8b`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TextIO

import torch

from mindspeed_mm.checkpoint.conversion.ledger import SourceLedger
from mindspeed_mm.checkpoint.conversion.run import Conversion, Converted, Writing, convert
from mindspeed_mm.checkpoint.hf_folder import DtypeRule, asset_files, model_config, safetensors_files
from mindspeed_mm.checkpoint.lazy_tensor import LazyTensor
from mindspeed_mm.checkpoint.safetensors_folder import MAPPED_BYTES, open_weights
from mindspeed_mm.core.errors import ModelFolderError

_PREFIXES = {"language_model.": "", "model.language_model.": "model.", "lm_head.": "lm_head."}
"""What the language model's keys begin with, of older and newer transformers → what stands there in a model alone."""
_TOKENIZER = ("tokenizer", "special_tokens_map", "added_tokens", "chat_template", "vocab", "merges")


def convert_text_encoder(source: Path, target: Path, *, stream: TextIO | None = None) -> Converted:
    """Write the language model in half precision, with its tokenizer; the rest of the folder is left out.

    Args:
        source: A LLaVA folder of transformers.
        target: The folder to write.
        stream: Where progress is shown.

    Raises:
        ModelFolderError: It is the folder of another model, or has no weights.
        UsageError: The target may not be written.
        CheckpointError: What was written does not read back.
    """
    config = model_config(source)
    text = config.get("text_config")
    if config.get("model_type") != "llava" or not isinstance(text, dict):
        raise ModelFolderError(
            f"has the model type {config.get('model_type')!r}, and a LLaVA model with a text_config is expected",
            where=str(source / "config.json"),
            way_out="Name the folder of llava-llama-3-8b in transformers' layout.",
        )
    with open_weights(source, MAPPED_BYTES) as stored:
        ledger = SourceLedger(stored, source)
        tensors: dict[str, LazyTensor] = {}
        left_out: dict[str, str] = {}
        rule = DtypeRule({}, torch.float16)
        for key, tensor in ledger.tensors.items():
            start = next((prefix for prefix in _PREFIXES if key.startswith(prefix)), None)
            if start is None:
                left_out[key] = "is no part of the language model"
                continue
            tensors[_PREFIXES[start] + key.removeprefix(start)] = rule.cast(key, tensor)
        if not tensors:
            raise ModelFolderError("holds no language model", where=str(source))
        files, texts = safetensors_files(tensors)
        written = {"model_type": "llama", **text, "architectures": ["LlamaForCausalLM"], "torch_dtype": "float16"}
        texts["config.json"] = json.dumps(written, indent=2) + "\n"
        copies = {name: path for name, path in asset_files(source).items() if name.startswith(_TOKENIZER)}
        conversion = Conversion(
            [source], [ledger], files, {"kind": "hf"}, left_out=left_out, copies=copies, texts=texts
        )
        return convert(conversion, target, Writing(), stream=stream)
