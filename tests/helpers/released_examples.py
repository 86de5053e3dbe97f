"""The training examples of released sizes: what their first lines promise, their models on meta, a full micro-batch."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from ruamel.yaml import YAML

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.fsdp.params.argument import Arguments
from mindspeed_mm.fsdp.params.loader import load_config
from mindspeed_mm.fsdp.train.configuration import load_with_plugins

ROOT = Path(__file__).resolve().parents[2]
RELEASED = ROOT / "tests" / "released"
PROMISE = re.compile(r"# (?P<model>.+), (?P<task>.+): (?P<devices>\d+) devices of (?P<gigabytes>\d+) GB\.")
VAE_OF = {"bagel": "black-forest-labs/FLUX.1-dev", "internvlu": "Qwen/Qwen-Image"}
"""Of families that answer and draw: the release whose VAE theirs is."""
PICTURE_SHARE = 0.5
"""Of the tokens of a micro-batch, those that stand for pictures."""


class Promise(NamedTuple):
    """The first line of a file."""

    model: str
    task: str
    devices: int
    gigabytes: int


class Example:
    """A shipped configuration.

    Args:
        path: Of the YAML.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def name(self) -> str:
        """Folder and file."""
        return str(self.path.relative_to(ROOT / "examples"))

    @cached_property
    def promise(self) -> Promise:
        """What the first line says."""
        line = first_comment(self.path)
        found = PROMISE.fullmatch(line)
        assert found is not None, f"{self.name}: {line}"
        return Promise(found["model"], found["task"], int(found["devices"]), int(found["gigabytes"]))

    @property
    def script(self) -> Path:
        """The launch file beside it."""
        text = f"examples/{self.name}"
        found = [path for path in self.path.parent.glob("finetune_*.sh") if text in path.read_text(encoding="utf-8")]
        assert len(found) == 1, (self.name, found)
        return found[0]

    @property
    def hub_name(self) -> str:
        """Name of the released folder."""
        found = re.search(r"model_name_or_path: models/(\S+)", self.path.read_text(encoding="utf-8"))
        assert found is not None, self.name
        return found[1]

    @cached_property
    def family(self) -> str:
        """What the YAML names as `model.model_id`, else empty."""
        return load_config(self.path).arguments.model.model_id or ""

    def released(self) -> dict[str, Any]:
        """What is recorded of the released size."""
        found, name = releases(), self.hub_name
        return found[name] if name in found else found[re.sub("-(bf16|hf|HF|one)$", "", name)]

    def arguments(self, folder: Path, *overrides: str) -> Arguments:
        """The configuration with the released one's `config.json` in place of its folder.

        Args:
            folder: Empty; `config.json` is written to it.
            overrides: `section.key=value`.
        """
        folder.mkdir(parents=True, exist_ok=True)
        config = as_trained(self.released()["config"])
        (folder / "config.json").write_text(json.dumps(config))
        write_vae(self.family, folder)
        own = [f"model.model_name_or_path={folder}", "model.train_from_scratch=true", "training.save=null"]
        return load_with_plugins(self.path, [*own, *overrides]).arguments


def examples() -> list[Example]:
    """All shipped configurations whose first line names devices."""
    paths = sorted((ROOT / "examples").glob("*/*.yaml"))
    return [Example(path) for path in paths if (path.parent / "README.md").is_file() and _has_promise(path)]


def _has_promise(path: Path) -> bool:
    return "devices of" in first_comment(path)


def first_comment(path: Path) -> str:
    """The first line of a file behind the one that names the schema for editors."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return next(line for line in lines if not line.startswith("# yaml-language-server:"))


def releases() -> dict[str, dict[str, Any]]:
    """Last part of a hub name → what is recorded of the size."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in RELEASED.glob("*.json")]
    return {record["hub"].rpartition("/")[2]: record for record in found}


@cache
def generators() -> dict[str, dict[str, Any]]:
    """Hub name → what is recorded of a generator."""
    records = YAML(typ="safe").load((RELEASED / "generators.yaml").read_text(encoding="utf-8"))
    return {record["release"]: record for record in records}


def write_vae(family: str, folder: Path) -> None:
    """The configuration of the VAE of a family that answers and draws; nothing for other families."""
    if family in VAE_OF:
        (folder / "vae").mkdir(exist_ok=True)
        vae = generators()[VAE_OF[family]]["vae"]
        (folder / "vae" / "config.json").write_text(json.dumps(vae), encoding="utf-8")


def as_trained(config: dict[str, Any]) -> dict[str, Any]:
    """A released configuration as the folder has it that an example names: in bf16, in transformers' layout."""
    config = {key: value for key, value in config.items() if key != "quantization_config"}
    if config["model_type"] == "chameleon":
        return {"vocabulary_map": {"<image>": 8711}, **config}  # of which the records leave out the 65,536 words
    if config["model_type"] != "internvl_chat":
        return config
    vision = config["vision_config"]
    kept = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "image_size", "patch_size",
            "hidden_act", "norm_type", "layer_norm_eps")  # fmt: skip
    tower = {"model_type": "internvl_vision"} | {key: vision[key] for key in kept}
    tower |= {"attention_bias": vision["qkv_bias"], "use_qk_norm": vision["qk_normalization"]}
    return {
        "architectures": ["InternVLForConditionalGeneration"],
        "model_type": "internvl",
        "vision_config": tower,
        "text_config": config["llm_config"],
        "downsample_ratio": config["downsample_ratio"],
        "tie_word_embeddings": False,
    }


# --- recipes ---------------------------------------------------------------------------------------------------------


class Parts(NamedTuple):
    """What docs/recipes.md calls the modules of a family, each a list with commas."""

    tower: str
    projector: str
    language: str

    def fill(self, word: str) -> str:
        """A recipe's word with the family's own names in it."""
        named = {"TOWER": self.tower, "PROJECTOR": self.projector, "LANGUAGE": self.language}
        return re.sub("|".join(named), lambda found: named[found[0]], word)


def recipes() -> dict[str, list[list[str]]]:
    """Title → the words of each of the section's blocks."""
    sections = re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", _recipes_page(), flags=re.MULTILINE | re.DOTALL)
    blocks = {title: re.findall(r"```\n(.*?)```", text, flags=re.DOTALL) for title, text in sections}
    return {title: [block.splitlines() for block in found] for title, found in blocks.items() if found}


def names_of_parts() -> dict[str, Parts]:
    """Folder of examples → the names of its parts, by the page's table."""
    rows = re.findall(r"^\| (`.+?`) \| `(.+?)` \| `(.+?)` \| `(.+?)` \|$", _recipes_page(), flags=re.MULTILINE)
    return {name: Parts(*parts) for folders, *parts in rows for name in re.findall(r"`(.+?)`", folders)}


def _recipes_page() -> str:
    return (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")


# --- a full micro-batch ----------------------------------------------------------------------------------------------


def full_batch(model: Any, arguments: Arguments) -> Batch:
    """A micro-batch as long as the configuration lets it become, half of its tokens pictures or sounds where the model
    takes any, in shapes; values do not matter."""
    basic = arguments.data.dataset_param.basic_parameters
    rows, length = arguments.training.micro_batch_size, basic.cutoff_len
    if basic.packing:
        rows, length = 1, rows * length
    ids = torch.zeros(rows, length, dtype=torch.long)
    positions = torch.arange(length).expand(rows, -1)
    batch: Batch = {"input_ids": ids, "labels": ids.clone(), "shift_labels": ids.clone()}
    batch |= {"attention_mask": torch.ones_like(ids), "position_ids": positions.clone()}
    media = _MEDIA.get(model.config.model_type)
    return batch | media(model.config, ids) if media is not None else batch


def _patches(config: Any, ids: torch.Tensor) -> Batch:
    """Pictures of 64 × 64 patches, as Qwen-VL and GLM-V take them."""
    vision, side = config.vision_config, 64
    tokens = (side // vision.spatial_merge_size) ** 2
    count = max(1, int(ids.numel() * PICTURE_SHARE) // tokens)
    ids.view(-1)[: tokens * count] = config.image_token_id
    channels = getattr(vision, "in_channels", None) or vision.in_chans
    width = channels * vision.temporal_patch_size * vision.patch_size**2
    return {
        "pixel_values": torch.zeros(count * side**2, width),
        "image_grid_thw": torch.tensor([[1, side, side]] * count),
        "mm_token_type_ids": (ids == config.image_token_id).int(),
    }


def _squares(tokens_of: Callable[[Any, int], int], **more: Callable[[Any, int, int], Any]) -> Any:
    """Pictures of the size that the tower was made for."""

    def build(config: Any, ids: torch.Tensor) -> Batch:
        vision = config.vision_config
        side = vision.image_size if isinstance(vision.image_size, int) else vision.image_size[0]
        tokens = tokens_of(config, side)
        count = max(1, int(ids.numel() * PICTURE_SHARE) // tokens)
        ids.view(-1)[: tokens * count] = config.image_token_id
        batch: Batch = {"pixel_values": torch.zeros(count, 3, side, side)}
        return batch | {key: make(config, count, side) for key, make in more.items()}

    return build


def _gemma(config: Any, ids: torch.Tensor) -> Batch:
    batch = _squares(lambda config, _: config.mm_tokens_per_image)(config, ids)
    return batch | {"token_type_ids": (ids == config.image_token_id).int()}


def _merged(config: Any, side: int) -> int:
    return int((side // config.vision_config.patch_size // config.spatial_merge_size) ** 2)


def _whisper(config: Any, ids: torch.Tensor) -> Batch:
    return {"input_features": torch.zeros(len(ids), config.num_mel_bins, 3000), "decoder_input_ids": ids}


def _speech(config: Any, ids: torch.Tensor) -> Batch:
    """Sounds of 30 seconds, 100 frames and 13 tokens a second."""
    frames, tokens = 3000, 390
    count = max(1, int(ids.numel() * PICTURE_SHARE) // tokens)
    ids.view(-1)[: tokens * count] = config.audio_token_id
    shape = (count, config.audio_config.num_mel_bins, frames)
    return {"input_features": torch.zeros(shape), "input_features_mask": torch.ones(count, frames, dtype=torch.long)}


_MEDIA: dict[str, Callable[[Any, torch.Tensor], Batch]] = {
    **dict.fromkeys(
        ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "glm4v", "glm4v_moe",
         "qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"),
        _patches,
    ),
    "mimo_v2": lambda config, ids: {k: v for k, v in _patches(config, ids).items() if k != "mm_token_type_ids"},
    "internvl": _squares(lambda config, _: config.image_seq_length),
    "llava": _squares(lambda config, side: (side // config.vision_config.patch_size) ** 2),
    "mistral3": _squares(_merged, image_sizes=lambda _, count, side: torch.tensor([[side, side]] * count)),
    "gemma3": _gemma,
    "step_robotics": _squares(lambda config, side: (side // config.vision_config.patch_size // 4) ** 2),
    "whisper": _whisper,
    "qwen3_asr": _speech,
}  # fmt: skip
