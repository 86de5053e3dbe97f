"""What a step of a released size takes on one device, by the forecast that `mm check` and `mm init` use: the model is
built on meta from the record of its configuration, by the smallest YAML of its family, with blocks recomputed."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch

from mindspeed_mm.core.batch import NO_CODE, Batch
from mindspeed_mm.fsdp.params.argument import Arguments
from mindspeed_mm.fsdp.params.cards import ModelCard
from mindspeed_mm.fsdp.params.loader import load_config
from mindspeed_mm.fsdp.train.memory.forecast import forecast
from mindspeed_mm.tasks.models.first_yaml import ROOM, merged, smallest
from mindspeed_mm.tasks.models.start import DEVICES_GIB
from mindspeed_mm.tasks.requests.init import Method
from tests.helpers.released_examples import RELEASED, as_trained, generators, releases, write_vae
from tests.helpers.released_rows import ROWS, Row

METHODS: tuple[Method, ...] = ("full", "lora", "qlora")
_LEAST_BYTES: dict[Method, float] = {"full": 16, "lora": 2, "qlora": 0.5}
"""Bytes that a parameter takes at least: its weight, and where it is trained the gradient and the optimizer's state."""
_EXPERTS = re.compile(r'"(num_experts|num_local_experts|n_routed_experts)": [1-9]')
_TOKENS = 2048
"""Tokens of a row of text."""
_FPS, _SAMPLES_PER_S = 24.0, 16_000
_SIDE = 1024
"""Pixels of a picture along a side, where the smallest YAML bounds their area."""


def needs_gib(card: ModelCard, hub: str, folder: Path) -> dict[Method, float | None]:
    """Method → GiB of a step; None: more than the largest device of the table has. What takes less than a method that
    fits the smallest device is left out.

    Args:
        card: The family.
        hub: A release that `with_record` names.
        folder: Empty; configurations are written to it.
    """
    found: dict[Method, float | None] = {}
    for method in METHODS:
        found[method] = needed_gib(card, hub, method, folder / method)
        if (found[method] or math.inf) <= ROOM * DEVICES_GIB[0]:
            break
    return found


def needed_gib(card: ModelCard, hub: str, method: Method, folder: Path) -> float | None:
    """As `needs_gib`, of one method."""
    arguments, batch = asked_of(card, hub, method, folder)
    least = _LEAST_BYTES[method]
    if not card.generates and _EXPERTS.search((folder / "config.json").read_text()):
        least = max(least, 2)  # experts keep their type where other layers are in four bits
    if (card.released[hub] or 0.0) * 1e9 * least > DEVICES_GIB[-1] * 2**30:
        return None
    needed = forecast(arguments, batch, device_type="cuda").peak / 2**30
    return round(needed, 1) if needed <= DEVICES_GIB[-1] else None


def asked_of(card: ModelCard, hub: str, method: Method, folder: Path) -> tuple[Arguments, Batch]:
    """The configuration and the micro-batch of a forecast; the model's configuration is written to the folder."""
    write_configuration(card, hub, folder)
    changes: dict[str, Any] = {
        "model": {"model_name_or_path": str(folder)}, "features": {"recompute": True}, "training": {"save": None},
    }  # fmt: skip
    arguments = load_config(merged(smallest(card, method), changes)).arguments
    batch = _sample(card) if card.generates else _row(card, json.loads((folder / "config.json").read_text()))
    return arguments, batch


def with_record(card: ModelCard) -> Iterator[str]:
    """Releases of a family whose configuration is recorded."""
    for hub in card.released:
        if hub in _names_ofgenerators() if card.generates else _record_name(hub) in _records():
            yield hub


def write_configuration(card: ModelCard, hub: str, folder: Path) -> None:
    """A folder with the configuration of a release, without weights."""
    if not card.generates:
        config = dict(_records()[_record_name(hub)]["config"])
        config.pop("quantization_config", None)
        row = ROWS.get(card.name)
        if config["model_type"] in ("internvl_chat", "chameleon"):
            config = as_trained(config)  # the same modules, without the tokenizer's files
        if isinstance(row, Row):
            config = merged(row.base(config), row.both)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        write_vae(card.name, folder)
        return
    record = generators()[hub]
    scheduler: dict[str, Any] = {"_class_name": "FlowMatchEulerDiscreteScheduler", "use_dynamic_shifting": True}
    if record["pipeline"].startswith("CogVideoX"):
        scheduler = {"_class_name": "CogVideoXDDIMScheduler", "prediction_type": "v_prediction"}
    parts = {"transformer/config": record["transformer"], "vae/config": record["vae"]}
    parts["scheduler/scheduler_config"] = scheduler
    index: dict[str, Any] = {
        "_class_name": record["pipeline"],
        "transformer": ["diffusers", record["transformer"]["_class_name"]],
        "vae": ["diffusers", record["vae"].get("_class_name", "AutoencoderKL")],
        "scheduler": ["diffusers", scheduler["_class_name"]],
    }
    if "boundary_ratio" in record:  # two transformers, which share the noise levels
        parts["transformer_2/config"] = record["transformer"]
        index |= {"transformer_2": index["transformer"], "boundary_ratio": record["boundary_ratio"]}
    parts["model_index"] = index
    for path, content in parts.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / f"{path}.json").write_text(json.dumps(content), encoding="utf-8")


def _record_name(hub: str) -> str:
    name = hub.rpartition("/")[2]
    return name if name in _records() else name.removesuffix("-hf")


@cache
def _records() -> dict[str, dict[str, Any]]:
    return releases()


@cache
def _names_ofgenerators() -> set[str]:
    """Tests are collected by these names; parsing all that is recorded takes half a second in every worker."""
    return set(re.findall(r"(?m)^- release: (\S+)$", (RELEASED / "generators.yaml").read_text(encoding="utf-8")))


def _row(card: ModelCard, config: dict[str, Any]) -> Batch:
    """A row of text, of a recogniser of speech the sound of half a minute, and of a speaker frames behind a text."""
    if config["model_type"] == "whisper":
        ids = torch.zeros(1, config["max_target_positions"], dtype=torch.long)
        sound = torch.zeros(1, config["num_mel_bins"], 2 * config["max_source_positions"])
        return {"input_features": sound, "decoder_input_ids": ids, "labels": ids, "shift_labels": ids}
    ids = torch.zeros(1, _TOKENS, dtype=torch.long)
    labels = {"labels": ids.clone(), "shift_labels": ids.clone()}
    speaks = card.task == "speak" and "talker_config" in config
    if speaks:
        codes = torch.zeros(1, _TOKENS, config["talker_config"]["num_code_groups"], dtype=torch.long)
        codes[:, 0] = NO_CODE  # no row begins with a frame
        labels |= {"codec_ids": codes, "frame_places": torch.arange(1, _TOKENS)}
    if config["model_type"] == "moss_tts_delay":
        codes = torch.zeros(1, _TOKENS, config["n_vq"], dtype=torch.long)
        labels |= {"codec_ids": codes, "code_places": torch.arange(_TOKENS - 1), "code_targets": codes[0, 1:]}
    if speaks and config["model_type"] == "qwen3_omni_moe":  # its thinker reads media, here none
        read, none = ids[:, :1].clone(), torch.zeros(0, dtype=torch.long)
        labels |= {"thinker_input_ids": read, "thinker_attention_mask": torch.ones_like(read)}
        labels |= {"media_places": none, "media_sources": none}
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **labels}


def _sample(card: ModelCard) -> Batch:
    """One medium of the size that the smallest YAML names, as it comes from the data set."""
    size = card.smallest["data"]["dataset_param"]["preprocess_parameters"]
    sides = [size.get("num_frames", 1), size.get("height", _SIDE), size.get("width", _SIDE)]
    pixels = torch.empty(1, 3, *sides, device="meta")
    batch: Batch = {"sample_ids": ["a"], "epochs": [0], "fps": [_FPS], "captions": ["a"], "pixels": pixels}
    if "audio" in card.modalities:
        batch["sound"] = torch.empty(1, 2, round(sides[0] / _FPS * _SAMPLES_PER_S), device="meta")
    return batch
