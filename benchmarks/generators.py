"""The workloads of generators: model folders, media, features, and the prepared batches that `mm train` will see.

`python -m benchmarks.generators SHAPE FOLDER STEPS` makes one; it is a process of its own, so that who measures stays
small. What is measured is the step on features: FLUX- and Wan-style models train in pixel space, the others on latents
of tiny VAEs.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import processes

SEED = 42
LEARNING_RATE = 1e-3
TEXT_TOKENS = 8

CONFIG = """\
model:
  model_name_or_path: {folder}/model
data:
  dataset_param:
    dataset_type: generation
    basic_parameters: {{dataset: {folder}/rows.jsonl, dataset_dir: {folder}, features_dir: {folder}/features}}
    preprocess_parameters: {sizes}
  dataloader_param: {{num_workers: 2}}
training:
  lr: {lr}
  micro_batch_size: {batch}
  seed: {seed}
  diffusion: {{caption_dropout: 0.1}}
"""


@dataclass(frozen=True)
class Shape:
    """A generator to train, and on what."""

    name: str
    family: str
    """flux, wan, cogvideox or ltx2."""
    batch_size: int
    samples: int
    sizes: dict[str, int]
    """`preprocess_parameters`: height and width in pixels, frames."""
    transformer: dict[str, Any]
    """Settings of diffusers' class."""


FLUX = Shape(
    "FLUX-style",
    "flux",
    batch_size=64,
    samples=1344,
    sizes={"height": 8, "width": 8},
    transformer={
        "num_layers": 2,
        "num_single_layers": 3,
        "attention_head_dim": 32,
        "num_attention_heads": 4,
        "axes_dims_rope": (8, 12, 12),
    },
)
WAN = Shape(
    "Wan-style",
    "wan",
    batch_size=16,
    samples=336,
    sizes={"height": 16, "width": 16, "num_frames": 5, "frame_interval": 1},
    transformer={
        "num_layers": 4,
        "attention_head_dim": 32,
        "num_attention_heads": 4,
        "ffn_dim": 512,
        "freq_dim": 64,
        "patch_size": (1, 4, 4),
    },
)
COGVIDEOX = Shape(
    "CogVideoX-style",
    "cogvideox",
    batch_size=16,
    samples=336,
    sizes={"height": 64, "width": 64, "num_frames": 9, "frame_interval": 1},
    transformer={
        "num_layers": 4,
        "attention_head_dim": 32,
        "num_attention_heads": 4,
        "time_embed_dim": 64,
        "sample_height": 8,
        "sample_width": 8,
        "sample_frames": 9,
        "max_text_seq_length": TEXT_TOKENS,
    },
)
LTX2 = Shape(
    "LTX-2-style, with sound",
    "ltx2",
    batch_size=16,
    samples=336,
    sizes={"height": 128, "width": 128, "num_frames": 9, "frame_interval": 1},
    transformer={
        "num_layers": 4,
        "attention_head_dim": 32,
        "num_attention_heads": 4,
        "cross_attention_dim": 128,
        "audio_attention_head_dim": 16,
        "audio_num_attention_heads": 4,
        "audio_cross_attention_dim": 64,
    },
)
SHAPES = {shape.family: shape for shape in (FLUX, WAN, COGVIDEOX, LTX2)}
TOKENIZERS = {"flux": "tokenizer_2", "wan": "tokenizer", "cogvideox": "tokenizer"}
"""Family → the tokenizer that is made to read few tokens; that of LTX-2 reads few already."""
CLIP_FPS = 100 / 12
"""Of the clips that are made: of 125 ms a frame, GIF keeps 12 hundredths of a second."""
SOUND_RATE = 16_000


@dataclass(frozen=True)
class Workload:
    """A folder with `model`, `features`, `run.yaml` and `batches/NNNN.safetensors`."""

    shape: Shape
    folder: Path

    @property
    def model(self) -> Path:
        """Folder in diffusers' layout, with weights."""
        return self.folder / "model"

    @property
    def config(self) -> Path:
        """What `mm train` is given."""
        return self.folder / "run.yaml"

    @property
    def batches(self) -> Path:
        """One file a step, and `index.json`."""
        return self.folder / "batches"

    def index(self) -> list[dict[str, int]]:
        """What each step holds: samples and latent tokens."""
        return json.loads((self.batches / "index.json").read_text(encoding="utf-8"))


def prepare(shape: Shape, folder: Path, steps: int) -> Workload:
    """Make the workload in a folder."""
    print(f"  making the {shape.name} data and {steps} batches of {shape.batch_size}", flush=True)
    words = [shape.family, str(folder), str(steps)]
    processes.run([sys.executable, "-m", "benchmarks.generators", *words], timeout_s=300)
    return Workload(shape, folder)


def main(shape: Shape, folder: Path, steps: int) -> None:
    """Write all of it."""
    workload = Workload(shape, folder)
    write_model(shape, workload.model)
    write_media(shape, folder)
    config = CONFIG.format(
        folder=folder, sizes=json.dumps(shape.sizes), lr=LEARNING_RATE, batch=shape.batch_size, seed=SEED
    )
    workload.config.write_text(config, encoding="utf-8")
    processes.run([sys.executable, "-m", "mindspeed_mm", "extract", str(workload.config)], timeout_s=240)
    write_batches(workload, steps)


def write_model(shape: Shape, folder: Path) -> None:
    """Random weights, the same each time: every contender loads the same file."""
    # The makers of the tests' folders; they import diffusers, which takes seconds.
    from tests.helpers import tiny_generators, tiny_video_families

    if shape.family in ("flux", "wan"):
        make = tiny_generators.make_tiny_flux if shape.family == "flux" else tiny_generators.make_tiny_wan
        make(folder, identity_vae=True, seed=SEED, **shape.transformer)
    elif shape.family == "cogvideox":
        tiny_video_families.make_tiny_cogvideox(folder, **shape.transformer)
    else:
        tiny_video_families.make_tiny_ltx2(folder, **shape.transformer)
    if shape.family not in TOKENIZERS:
        return
    tokenizer = folder / TOKENIZERS[shape.family] / "tokenizer_config.json"
    settings = json.loads(tokenizer.read_text(encoding="utf-8"))
    tokenizer.write_text(json.dumps(settings | {"model_max_length": TEXT_TOKENS}), encoding="utf-8")


def write_media(shape: Shape, folder: Path) -> None:
    """Pictures or clips of noise, with captions."""
    from tests.helpers.tiny_generator_run import make_clips, make_pictures

    if shape.family == "flux":
        make_pictures(folder, shape.samples, ((shape.sizes["height"], shape.sizes["width"]),), SEED)
    else:
        make_clips(folder, shape.samples, shape.sizes["num_frames"], shape.sizes["height"], SEED)
    if shape.family == "ltx2":
        add_sounds(folder / "rows.jsonl", shape.sizes["num_frames"] / CLIP_FPS + 1)


def add_sounds(rows: Path, seconds: float) -> None:
    """Let each row name a file of noise."""
    import numpy as np

    from tests.helpers.tiny_sounds import sound_bytes

    draw, lines = np.random.default_rng(SEED), []
    for number, line in enumerate(rows.read_text(encoding="utf-8").splitlines()):
        wave = 0.3 * draw.uniform(-1, 1, (int(seconds * SOUND_RATE), 2))
        (rows.parent / f"{number}.wav").write_bytes(sound_bytes(wave, SOUND_RATE))
        lines.append(json.dumps({**json.loads(line), "audio": f"{number}.wav"}) + "\n")
    rows.write_text("".join(lines), encoding="utf-8")


def write_batches(workload: Workload, steps: int) -> None:
    """Write the first batches as our objective prepared them: latents, text, noise and σ, in the order of a run."""
    import torch
    from safetensors.torch import save_file

    from mindspeed_mm.fsdp.data import build_mm_dataloader, build_mm_dataset
    from mindspeed_mm.fsdp.models.diffusion.find import find_adapter
    from mindspeed_mm.fsdp.params.loader import load_config
    from mindspeed_mm.fsdp.train.generator_family import GeneratorFamily

    arguments = load_config(workload.config, ["data.dataloader_param.num_workers=0"]).arguments
    training = arguments.training
    dataset, _ = build_mm_dataset(arguments.data.dataset_param, seed=training.seed)
    adapter = find_adapter(workload.model)
    objective = GeneratorFamily(arguments, adapter, torch.device("cpu")).denoising(dataset)
    loader = build_mm_dataloader(
        dataset,
        arguments.data.dataloader_param,
        micro_batch_size=training.micro_batch_size,
        gradient_accumulation_steps=1,
        dp_rank=0,
        dp_size=1,
        seed=training.seed,
    )
    workload.batches.mkdir(exist_ok=True)
    index = []
    for step, [batch] in zip(range(1, steps + 1), loader, strict=False):
        prepared = objective.prepare(batch)
        index.append({"samples": len(batch["sample_ids"]), "tokens": objective.tokens(prepared).real})
        tensors = {name.lstrip("_"): value for name, value in prepared.items() if isinstance(value, torch.Tensor)}
        save_file(tensors, workload.batches / f"{step:04d}.safetensors")
    (workload.batches / "index.json").write_text(json.dumps(index), encoding="utf-8")


if __name__ == "__main__":
    main(SHAPES[sys.argv[1]], Path(sys.argv[2]), int(sys.argv[3]))
