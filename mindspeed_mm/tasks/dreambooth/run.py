"""DreamBooth from the first picture to the exported model: pictures of the class, rows, training, export."""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from ruamel.yaml import YAML

from mindspeed_mm.core.artifacts import atomic_write_text
from mindspeed_mm.core.errors import DataError, UsageError
from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.core.terminal import quoted
from mindspeed_mm.fsdp.data.data_utils.decoding.image_media import IMAGE_SUFFIXES
from mindspeed_mm.provider.entry_flags import EntryFlags, entry_flags


def run(words: Sequence[str]) -> Path:
    """Train as the flags say; one process also exports what was trained into `exported/` of the output folder.

    Args:
        words: The command line's.

    Returns:
        The exported folder, of several ranks the run's.

    Raises:
        MMError: Anything that a person can act on.
    """
    options = read_flags(words)
    folder = options.output_dir.absolute()
    is_alone = int(os.environ.get("WORLD_SIZE", "1")) == 1
    if options.with_prior_preservation:
        make_class_pictures(options, folder, is_alone)
    yaml = write_run(options, folder)  # every rank the same
    from mindspeed_mm.tasks import train  # torch: not for --help

    train.run(yaml)
    if not is_alone:
        return folder / "run"
    from mindspeed_mm.tasks.export import export
    from mindspeed_mm.tasks.requests.export import ExportRequest

    return export.run(ExportRequest(folder / "run", folder / "exported", overwrite=True)).folder


def make_class_pictures(options: argparse.Namespace, folder: Path, is_alone: bool = True) -> int:
    """Generate the pictures of the class that its folder lacks, by the model as it is before training.

    Returns:
        How many were made.

    Raises:
        UsageError: Some lack, and this is one of several ranks.
    """
    lacking = options.num_class_images - len(pictures_in(options.class_data_dir))
    if lacking <= 0:
        return 0
    if not is_alone:
        raise UsageError(
            f"holds {lacking} pictures less than --num_class_images, and several ranks do not generate them",
            where=str(options.class_data_dir),
            way_out=f"Make them first: mm infer {quoted(options.pretrained_model_name_or_path)} "
            f"--prompt {quoted(options.class_prompt)} --num-samples {lacking} --out {quoted(options.class_data_dir)}",
        )
    from mindspeed_mm.tasks.draw import generate  # seconds to import

    settings = {
        "num_samples": lacking,
        "batch_size": options.sample_batch_size,
        "height": options.resolution,
        "width": options.resolution,
        "num_inference_steps": options.num_inference_steps,
        "seed": options.seed,
    }
    made = folder / "class_pictures"
    request = generate.GenerateRequest(prompts=(options.class_prompt,), settings=settings)
    generate.run(Path(options.pretrained_model_name_or_path), made, request)
    options.class_data_dir.mkdir(parents=True, exist_ok=True)
    for picture in pictures_in(made):
        shutil.move(picture, options.class_data_dir / picture.name)
    shutil.rmtree(made)
    return lacking


def write_run(options: argparse.Namespace, folder: Path) -> Path:
    """Write the rows and the configuration, whose path is returned.

    Raises:
        DataError: A folder holds no picture.
    """
    folder.mkdir(parents=True, exist_ok=True)
    instances = write_rows(options.instance_data_dir, options.instance_prompt, folder / "instance.jsonl")
    pairs = instances * options.repeats  # of a picture of the thing with one of its class, as diffusers counts them
    if options.with_prior_preservation:
        rows = options.class_data_dir, options.class_prompt, folder / "class.jsonl"
        pairs = max(pairs, write_rows(*rows, most=options.num_class_images))
    micro_batches = math.ceil(pairs / options.train_batch_size)
    steps_of_epoch = math.ceil(micro_batches / options.gradient_accumulation_steps)
    if options.max_train_steps is None:
        options.max_train_steps = options.num_train_epochs * steps_of_epoch
    content = configuration(options, folder)
    if options.validation_prompt:
        content["training"]["sampling"] = {
            "prompts": [options.validation_prompt],
            "num_samples": options.num_validation_images,
            "interval": options.validation_epochs * steps_of_epoch,
            "height": options.resolution,
            "width": options.resolution,
            "num_inference_steps": options.num_inference_steps,
        }
    text = io.StringIO()
    YAML().dump(content, text)
    atomic_write_text(folder / "dreambooth.yaml", text.getvalue())
    return folder / "dreambooth.yaml"


def write_rows(pictures: Path, caption: str, path: Path, most: int | None = None) -> int:
    """A row for each picture of a folder, or for the first so many, all with one caption; returns their number."""
    found = pictures_in(pictures)[:most]
    if not found:
        known = ", ".join(sorted(IMAGE_SUFFIXES))
        raise DataError("holds no picture", where=str(pictures), way_out=f"Put pictures there: {known}.")
    rows = [json.dumps({"path": str(picture.absolute()), "cap": caption}, ensure_ascii=False) for picture in found]
    atomic_write_text(path, "".join(f"{row}\n" for row in rows))
    return len(found)


def pictures_in(folder: Path) -> list[Path]:
    """By name; none where there is no folder."""
    return sorted(path for path in folder.glob("*") if path.suffix.lower() in IMAGE_SUFFIXES)


# --- flags ------------------------------------------------------------------------------------------------------------
# The flags of diffusers' `train_dreambooth_flux.py` and `train_dreambooth_lora_flux.py`, and what they mean here.

WEIGHTINGS: Mapping[str, dict[str, str]] = {
    "cosmap": {"timestep_density": "uniform", "loss_weighting": "cosmap"},
    "logit_normal": {"timestep_density": "logit_normal"},
    "mode": {"timestep_density": "mode"},
    "none": {"timestep_density": "uniform"},
    "sigma_sqrt": {"timestep_density": "uniform", "loss_weighting": "sigma_sqrt"},
}
"""`--weighting_scheme` → keys of `training.diffusion`."""
SCHEDULES = {"constant": "constant", "constant_with_warmup": "constant", "cosine": "cosine", "linear": "linear"}
DTYPES = {"no": "fp32", "fp16": "fp16", "bf16": "bf16"}


def read_flags(words: Sequence[str]) -> argparse.Namespace:
    """The flags of a command line.

    Raises:
        UsageError: One is unknown, refused, or lacks another.
    """
    known = entry_flags(
        "train_dreambooth_flux", weighting_scheme=WEIGHTINGS, lr_scheduler=SCHEDULES, mixed_precision=DTYPES
    )
    options, others = known.parser.parse_known_args(list(words))
    _check_others(others, known)
    if options.with_prior_preservation:
        for name in ("class_data_dir", "class_prompt"):
            if getattr(options, name) is None:
                raise UsageError("--with_prior_preservation needs it", key=f"--{name}", way_out="Give it.")
    if not options.instance_data_dir.is_dir():
        raise UsageError("there is no such folder", where=str(options.instance_data_dir), key="--instance_data_dir")
    return options


def _check_others(words: Sequence[str], known: EntryFlags) -> None:
    for place, word in enumerate(words):
        flag, _, value = word.partition("=")
        if not flag.startswith("--"):
            continue
        given = (value or "".join(words[place + 1 : place + 2])).lower()
        if flag in known.refused and not (flag == "--optimizer" and given == "adamw"):
            raise UsageError(known.refused[flag], key=flag, way_out="Leave it out.")
        if flag not in known.idle and flag != "--optimizer":
            raise UsageError("no such flag", key=flag, way_out="See --help.")


def configuration(options: argparse.Namespace, folder: Path) -> JsonObject:
    """The YAML's content.

    Args:
        options: The flags.
        folder: Where `instance.jsonl` and `class.jsonl` stand.
    """
    entries: list[JsonObject] = [{"path": str(folder / "instance.jsonl"), "repeats": options.repeats}]
    diffusion: JsonObject = {"shift": 1.0, "guidance": options.guidance_scale}
    diffusion |= WEIGHTINGS[options.weighting_scheme]
    # diffusers' scripts index times that run down: less noise where the paper has more.
    diffusion |= {"logit_mean": -options.logit_mean, "logit_std": options.logit_std, "mode_scale": options.mode_scale}
    if options.with_prior_preservation:
        entries.append({"path": str(folder / "class.jsonl"), "prior": True})
        diffusion["prior_loss_weight"] = options.prior_loss_weight
    roots = [options.instance_data_dir, *([options.class_data_dir] if options.with_prior_preservation else [])]
    sizes = {"height": options.resolution, "width": options.resolution, "flip": options.random_flip}
    sizes |= {} if options.center_crop else {"crop": "random"}
    return {
        "model": {"model_name_or_path": options.pretrained_model_name_or_path, "model_id": "flux"},
        "data": {
            "dataset_param": {
                "dataset_type": "generation",
                "basic_parameters": {"dataset": entries, "media_roots": [str(root.absolute()) for root in roots]},
                "preprocess_parameters": sizes,
            }
        },
        "parallel": {"fsdp_plan": {"param_dtype": DTYPES[options.mixed_precision]}},
        "features": {"recompute": options.gradient_checkpointing},
        "training": _training(options, folder) | {"diffusion": diffusion},
    }


def _training(options: argparse.Namespace, folder: Path) -> JsonObject:
    pictures = 2 if options.with_prior_preservation else 1
    training: JsonObject = {
        "lr": options.learning_rate,
        "lr_decay_style": SCHEDULES[options.lr_scheduler],
        "weight_decay": options.adam_weight_decay,
        "adam_beta1": options.adam_beta1,
        "adam_beta2": options.adam_beta2,
        "adam_eps": options.adam_epsilon,
        "clip_grad": options.max_grad_norm,
        "micro_batch_size": options.train_batch_size * pictures,
        "gradient_accumulation_steps": options.gradient_accumulation_steps,
        "seed": options.seed,
        "save": str(folder / "run"),
        "save_interval": options.checkpointing_steps,
        "save_total_limit": options.checkpoints_total_limit,
    }
    if options.max_train_steps is not None:
        warmup_steps = 0 if options.lr_scheduler == "constant" else options.lr_warmup_steps
        training["train_iters"] = options.max_train_steps
        training["lr_warmup_ratio"] = min(1.0, warmup_steps / options.max_train_steps)
    if options.rank is not None:
        training["lora"] = {"enable": True, "rank": options.rank, "alpha": options.lora_alpha}
        if options.lora_layers:
            training["lora"]["target_modules"] = [f"*{end}" for end in options.lora_layers.split(",")]
    return training
