"""VideoAlign's released files as a Hugging Face folder: a whole state, adapters beside the weights (`model.pth`); or
adapters and what was trained without them (`adapter_model.safetensors`, `non_lora_state_dict.pth`).

Adapters are added to the weights. Names and files: KwaiVGI/VideoAlign, `utils.py` (`load_model_from_checkpoint`).
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from mindspeed_mm.checkpoint.conversion.ledger import SourceLedger
from mindspeed_mm.checkpoint.conversion.run import Conversion, Converted, Writing, convert
from mindspeed_mm.checkpoint.hf_folder import asset_files, model_config, safetensors_files
from mindspeed_mm.checkpoint.keymap import in_natural_order
from mindspeed_mm.checkpoint.lazy_tensor import Computed, Concatenated, HeldTensor, LazyTensor, MeanRows, Sliced
from mindspeed_mm.checkpoint.megatron.families.qwen2_vl import REWARD_HEAD, REWARD_MODEL
from mindspeed_mm.checkpoint.megatron.pt_reading import read_pt_files
from mindspeed_mm.checkpoint.safetensors_folder import MAPPED_BYTES, open_weights
from mindspeed_mm.core.errors import ModelFolderError
from mindspeed_mm.core.json_file import JsonObject, read_json_object

WHOLE, ADAPTERS, OTHERS = "model.pth", "adapter_model.safetensors", "non_lora_state_dict.pth"
_SETTINGS, _ADAPTER_SETTINGS = "model_config.json", "adapter_config.json"
_PREFIXES = ("base_model.model.", "module.")
_NEW_NAMES = {"model.language_model.": "model.", "model.visual.": "visual."}
_ADAPTER = re.compile(r"(?P<layer>.+)\.lora_(?P<side>[AB])(?:\.default)?\.weight")
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_PUBLISHED = {
    "fps": 2.0,
    "num_frames": None,
    "max_frame_pixels": 200704,
    "sample_type": "uniform",
    "prompt_template_type": "detailed_special",
    "eval_dim": ["VQ", "MQ", "TA"],
}
"""How the released model sees videos (`data_config` of model_config.json), and the only way that is built."""


@dataclass(frozen=True)
class ReleasedFiles:
    """What a folder is made of.

    Args:
        hf_dir: Qwen2-VL, which gives configuration, processor and tokenizer.
        pt_path: A state that torch.save wrote, or the folder with it or with adapters; None: Qwen2-VL's own weights.
        model_prefix: What names in these files begin with, beside PEFT's own.
        rows: Of the embedding; None: as many as there are.
    """

    hf_dir: Path
    pt_path: Path | None = None
    model_prefix: str = ""
    rows: int | None = None


def is_reward_model(hf_dir: Path) -> bool:
    """Whether a folder is of the reward model already. Raises `ModelFolderError` where it is none of a model."""
    return REWARD_MODEL in (model_config(hf_dir).get("architectures") or ())


def released_to_hf(files: ReleasedFiles, target: Path, writing: Writing) -> Converted:
    """Write a Hugging Face folder of the reward model; without `pt_path` one to train it from, with a new head.

    Raises:
        MMError: As `convert`; or files are missing, of another model, or say nothing of their adapters' scale.
    """
    with _opened(files) as ledgers:
        tensors: dict[str, LazyTensor] = {}
        left_out: dict[str, str] = {}
        for ledger in ledgers:
            for key, tensor in ledger.tensors.items():
                name = _named(key, files.model_prefix)
                if name == _HEAD:
                    left_out[key] = "the reward model has no head of words"
                    continue
                tensors[name] = tensor
        merged = _merged(tensors, files)
        if _EMBEDDING not in merged:
            raise ModelFolderError("is missing", where=str(files.pt_path or files.hf_dir), key=_EMBEDDING)
        if REWARD_HEAD not in merged:
            merged[REWARD_HEAD] = _new_head(files, merged)
        dropped = _resized(merged, files)
        config = model_config(files.hf_dir) | _changes(files, merged)
        texts = {"config.json": json.dumps(config, indent=2) + "\n"}
        weights, index = safetensors_files(in_natural_order(merged))
        conversion = Conversion(
            sources=[files.hf_dir, *filter(None, [files.pt_path])],
            ledgers=ledgers,
            files=weights,
            layout={"kind": "hf"},
            left_out=left_out,
            dropped=dropped,
            incomparable="the reward model scores videos",
            copies={name: path for name, path in asset_files(files.hf_dir).items() if name not in texts},
            texts=texts | index,
        )
        return convert(conversion, target, replace(writing, examine=None), stream=sys.stderr)


@contextmanager
def _opened(files: ReleasedFiles) -> Iterator[list[SourceLedger]]:
    """Ledgers of the weights; of the base's, where they are needed, those that were not trained without adapters."""
    path = files.pt_path
    if path is not None and path.is_dir():
        path = path / WHOLE if (path / WHOLE).is_file() else path
    if path is not None and not path.is_dir():
        yield [SourceLedger(_state(path), path)]
        return
    with open_weights(files.hf_dir, MAPPED_BYTES) as base:
        ledgers = [SourceLedger(base, files.hf_dir)]
        if path is None:
            yield ledgers
            return
        if not (path / ADAPTERS).is_file() or not (path / OTHERS).is_file():
            what = f"holds neither {WHOLE}, nor {ADAPTERS} and {OTHERS}"
            raise ModelFolderError(what, where=str(path), way_out="Name a checkpoint-* folder of VideoReward.")
        others = _state(path / OTHERS)
        # What was trained whole takes the place of the base's tensors of that name.
        replaced = {_named(key, files.model_prefix) for key in others}
        ledgers = [SourceLedger({k: t for k, t in base.items() if _named(k, "") not in replaced}, files.hf_dir)]
        with open_weights(path, MAPPED_BYTES) as adapters:
            yield [*ledgers, SourceLedger(others, path / OTHERS), SourceLedger(adapters, path)]


def _state(path: Path) -> dict[str, LazyTensor]:
    """The tensors of a file of torch.save, whole or under one key."""
    (content,) = read_pt_files([path])
    found: dict[str, LazyTensor] = {}
    for key, tensors in content.tensors.items():
        for name, tensor in tensors.items():
            found[name or key] = tensor  # those of a table in the file, or the file's own
    if not found:
        raise ModelFolderError("holds no tensors", where=str(path))
    return found


def _named(key: str, prefix: str) -> str:
    """The hub's older name of a tensor, with `.lora_A` in it where it is an adapter's."""
    for each in filter(None, (prefix, *_PREFIXES)):
        key = key.removeprefix(each)
    for new, old in _NEW_NAMES.items():
        if key.startswith(new):
            key = old + key.removeprefix(new)
    return key.replace(".base_layer.", ".")


def _merged(tensors: Mapping[str, LazyTensor], files: ReleasedFiles) -> dict[str, LazyTensor]:
    """The weights with what adapters add: W + scale · B · A."""
    sides: dict[str, dict[str, LazyTensor]] = {}
    weights: dict[str, LazyTensor] = {}
    for name, tensor in tensors.items():
        if found := _ADAPTER.fullmatch(name):
            sides.setdefault(f"{found['layer']}.weight", {})[found["side"]] = tensor
        else:
            weights[name] = tensor
    if not sides:
        return weights
    add = partial(_added, scale=_scale(files))
    for name, pair in sides.items():
        if name not in weights or pair.keys() != {"A", "B"}:
            what = "is adapted, and its weight or a half of its adapter is missing"
            raise ModelFolderError(what, where=str(files.pt_path), key=name)
        weight = weights[name]
        weights[name] = Computed([weight, pair["A"], pair["B"]], add, weight.shape, weight.dtype)
    return weights


def _new_head(files: ReleasedFiles, weights: Mapping[str, LazyTensor]) -> LazyTensor:
    """A head of one row, as transformers begins linear layers; always the same."""
    if files.pt_path is not None:
        raise ModelFolderError("is missing", where=str(files.pt_path), key=REWARD_HEAD)
    embedding = weights[_EMBEDDING]
    spread = float(model_config(files.hf_dir).get("initializer_range", 0.02))
    # Seeded: two conversions of the same folder give the same bytes.
    head = torch.randn(1, embedding.shape[1], generator=torch.Generator().manual_seed(0)) * spread
    return HeldTensor(head.to(embedding.dtype))


def _added(read: list[torch.Tensor], scale: float) -> torch.Tensor:
    # In fp32 at least: the sum is rounded once.
    weight, down, up = (tensor.to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in read)
    return weight + scale * (up @ down)


def _scale(files: ReleasedFiles) -> float:
    """What B · A is multiplied by, as the files say: alpha / rank."""
    assert files.pt_path is not None
    settings = _settings(files.pt_path).get("peft_lora_config") or {}
    rank, alpha = settings.get("lora_r"), settings.get("lora_alpha")
    own = _found(files.pt_path, _ADAPTER_SETTINGS)
    if own is not None:
        settings = read_json_object(own, ModelFolderError)
        rank, alpha = settings.get("r"), settings.get("lora_alpha")
    if not rank or not alpha:
        raise ModelFolderError(
            f"has adapters, and neither {_SETTINGS} nor {_ADAPTER_SETTINGS} beside it says their scale",
            where=str(files.pt_path),
            way_out=f"Copy {_SETTINGS} of the release to where it lies there.",
        )
    return float(alpha) / (math.sqrt(rank) if settings.get("use_rslora") else float(rank))


def _found(path: Path, name: str) -> Path | None:
    """A file beside the weights or one folder above."""
    folder = path if path.is_dir() else path.parent
    return next((each / name for each in (folder, folder.parent) if (each / name).is_file()), None)


def _settings(path: Path) -> JsonObject:
    """model_config.json of the release; empty without one.

    Raises:
        ModelFolderError: The model was trained to see videos in a way that is not built.
    """
    where = _found(path, _SETTINGS)
    if where is None:
        return {}
    settings = read_json_object(where, ModelFolderError)
    seen = settings.get("data_config") or {}
    for name, value in _PUBLISHED.items():
        if name in seen and seen[name] != value:
            raise ModelFolderError(
                f"{seen[name]!r}, and the reward model is built for {value!r}",
                where=str(where),
                key=f"data_config.{name}",
            )
    if (token := (settings.get("model_config") or {}).get("reward_token", "special")) != "special":
        what = f"'{token}', and the reward model is built for 'special'"
        raise ModelFolderError(what, where=str(where), key="model_config.reward_token")
    return settings


def _resized(weights: dict[str, LazyTensor], files: ReleasedFiles) -> list[LazyTensor]:
    """Give the embedding so many rows; returns what is cut off. New rows are the mean of the others."""
    embedding = weights[_EMBEDDING]
    before = embedding.shape[0]
    if files.rows is None or files.rows == before:
        return []
    if files.rows > before:
        new = MeanRows(embedding, before, files.rows - before)
        weights[_EMBEDDING] = Concatenated([embedding, new], 0)
        return []
    weights[_EMBEDDING] = Sliced(embedding, 0, 0, files.rows)
    return [Sliced(embedding, 0, files.rows, before - files.rows)]


def _changes(files: ReleasedFiles, weights: Mapping[str, LazyTensor]) -> JsonObject:
    """What config.json has other than Qwen2-VL's."""
    rows = weights[_EMBEDDING].shape[0]
    config = model_config(files.hf_dir)
    found: JsonObject = {"architectures": [REWARD_MODEL], "vocab_size": rows}
    if isinstance(config.get("text_config"), dict):
        # Newer folders keep the language model's numbers in a section.
        found = {"architectures": [REWARD_MODEL], "text_config": {**config["text_config"], "vocab_size": rows}}
    found["output_dim"] = weights[REWARD_HEAD].shape[0]
    if files.pt_path is not None and (norm := _settings(files.pt_path).get("inference_config")):
        found["reward_norm"] = norm
    return found
