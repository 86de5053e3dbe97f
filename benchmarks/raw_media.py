"""The workloads of extraction: pictures or clips on disk, a model folder with encoders of some weight, and, for the
bare loop, the same pixels and token ids in one file.

`python -m benchmarks.raw_media KIND FOLDER SAMPLES [media]` makes one, with `media` all but that file; it is a process
of its own, so that who measures stays small.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import processes

SEED = 42
TEXT_WIDTH = 256

CONFIG = """\
model:
  model_name_or_path: {folder}/model
data:
  dataset_param:
    dataset_type: generation
    basic_parameters: {{dataset: {folder}/rows.jsonl, dataset_dir: {folder}}}
    preprocess_parameters: {sizes}
training: {{seed: {seed}}}
"""


@dataclass(frozen=True)
class Kind:
    """Media and the encoders that they go through."""

    name: str
    family: str
    """flux: AutoencoderKL, CLIP, T5; wan: AutoencoderKLWan, UMT5."""
    batch_size: int
    samples: int
    stored: tuple[int, int, int]
    """Frames, height and width of the files."""
    sizes: dict[str, int]
    """`preprocess_parameters`: what is encoded."""


PICTURES = Kind("pictures", "flux", 8, 160, (1, 120, 160), {"height": 96, "width": 96})
CLIPS = Kind("clips", "wan", 4, 60, (12, 72, 96), {"height": 64, "width": 64, "num_frames": 9, "frame_interval": 1})
KINDS = {kind.name: kind for kind in (PICTURES, CLIPS)}

# Narrower than the released VAEs, and the text encoder is tiny beside T5-XXL: decoding files weighs more here than in a
# real extraction.
PICTURE_VAE: dict[str, Any] = {
    "block_out_channels": (64, 128),
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
    "latent_channels": 4,
    "norm_num_groups": 8,
    "scaling_factor": 0.3611,
    "shift_factor": 0.1159,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
    "mid_block_add_attention": False,
}
CLIP_VAE: dict[str, Any] = {"base_dim": 32, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1, "z_dim": 16}
TEXT: dict[str, Any] = {"d_model": TEXT_WIDTH, "d_ff": 512, "d_kv": 64, "num_layers": 4, "num_heads": 4}


@dataclass(frozen=True)
class Workload:
    """A folder with `model`, media, `rows.jsonl`, `run.yaml` and `inputs.safetensors`."""

    kind: Kind
    folder: Path
    samples: int

    @property
    def model(self) -> Path:
        """Folder in diffusers' layout, with weights."""
        return self.folder / "model"

    @property
    def config(self) -> Path:
        """What `mm extract` is given."""
        return self.folder / "run.yaml"

    @property
    def inputs(self) -> Path:
        """What the bare loop reads: `pixels`, and token ids by encoder."""
        return self.folder / "inputs.safetensors"


def prepare(kind: Kind, folder: Path, samples: int | None = None, *, with_inputs: bool = True) -> Workload:
    """Make the workload in a folder; what the bare loop reads only `with_inputs`."""
    workload = Workload(kind, folder, samples or kind.samples)
    print(f"  making {workload.samples} {kind.name}", flush=True)
    words = [kind.name, str(folder), str(workload.samples), *([] if with_inputs else ["media"])]
    timeout_s = 300 + 0.1 * workload.samples
    processes.run([sys.executable, "-m", "benchmarks.raw_media", *words], timeout_s=timeout_s)
    return workload


def main(kind: Kind, folder: Path, samples: int, with_inputs: bool = True) -> None:
    """Write all of it, or all but what the bare loop reads."""
    workload = Workload(kind, folder, samples)
    write_model(kind, workload.model)
    write_media(workload)
    config = CONFIG.format(folder=folder, sizes=json.dumps(kind.sizes), seed=SEED)
    workload.config.write_text(config, encoding="utf-8")
    if with_inputs:
        write_inputs(workload)


def write_model(kind: Kind, folder: Path) -> None:
    """A tiny folder of the tests, whose VAE and text encoder give way to larger ones with random weights."""
    from diffusers import AutoencoderKL, AutoencoderKLWan
    from transformers import T5Config, T5EncoderModel, UMT5Config, UMT5EncoderModel

    from tests.helpers.tiny_generators import make_tiny_flux, make_tiny_wan

    if kind.family == "flux":
        make_tiny_flux(folder, seed=SEED, joint_attention_dim=TEXT_WIDTH)
        replace(folder / "vae", lambda _: AutoencoderKL(**PICTURE_VAE))
        replace(folder / "text_encoder_2", lambda config: T5EncoderModel(T5Config(**config | TEXT)))
    else:
        make_tiny_wan(folder, seed=SEED, text_dim=TEXT_WIDTH)
        replace(folder / "vae", lambda _: AutoencoderKLWan(**CLIP_VAE))
        replace(folder / "text_encoder", lambda config: UMT5EncoderModel(UMT5Config(**config | TEXT)))


def replace(folder: Path, make: Callable[[dict[str, Any]], Any]) -> None:
    """Put another model in a component's place; it is made of the configuration there."""
    import torch

    torch.manual_seed(SEED)
    make(json.loads((folder / "config.json").read_text(encoding="utf-8"))).save_pretrained(folder)


def write_media(workload: Workload) -> None:
    """Smooth random pictures as PNG, clips as mp4; every caption is another."""
    import numpy as np
    from PIL import Image

    from mindspeed_mm.fsdp.utils.media_files import write_media as write

    draw = np.random.default_rng(SEED)
    frames, height, width = workload.kind.stored
    (workload.folder / "media").mkdir(parents=True, exist_ok=True)
    rows = []
    for number in range(workload.samples):
        coarse = draw.integers(0, 256, (frames, height // 8, width // 8, 3), dtype=np.uint8)
        pictures = [Image.fromarray(each).resize((width, height), Image.Resampling.BICUBIC) for each in coarse]
        stem = workload.folder / "media" / f"{number:04d}"
        path = write(stem, np.stack([np.asarray(each) for each in pictures]), fps=8)
        rows.append({"path": f"media/{path.name}", "cap": f"{workload.kind.name} {number}"})
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (workload.folder / "rows.jsonl").write_text(lines, encoding="utf-8")


def write_inputs(workload: Workload) -> None:
    """The pixels that our data set gives, and the ids of the folder's tokenizers, padded as its pipeline does."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoTokenizer

    from mindspeed_mm.fsdp.data import build_mm_dataset
    from mindspeed_mm.fsdp.params.loader import load_config

    arguments = load_config(workload.config, []).arguments
    dataset, _ = build_mm_dataset(arguments.data.dataset_param, seed=SEED)
    items = [dataset.item(index, 0) for index in range(len(dataset))]
    tensors = {"pixels": torch.stack([item["pixels"] for item in items])}
    for name in sorted(path.name for path in workload.model.glob("tokenizer*")):
        tokenizer = AutoTokenizer.from_pretrained(workload.model / name)
        captions = [item["caption"] for item in items]
        encoded = tokenizer(captions, padding="max_length", truncation=True, return_tensors="pt")
        tensors |= {f"{name}.ids": encoded["input_ids"], f"{name}.mask": encoded["attention_mask"]}
    save_file(tensors, workload.inputs)


if __name__ == "__main__":
    from mindspeed_mm.fsdp.utils.torchvision_guard import ensure_torchvision

    ensure_torchvision()  # transformers imports torchvision, whose compiled part a CPU build of torch may refuse
    main(KINDS[sys.argv[1]], Path(sys.argv[2]), int(sys.argv[3]), with_inputs="media" not in sys.argv[4:])
