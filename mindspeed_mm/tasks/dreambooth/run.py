"""DreamBooth from the first picture to the exported model: pictures of the class, rows, training, export."""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from ruamel.yaml import YAML

from mindspeed_mm.core.artifacts import atomic_write_text
from mindspeed_mm.core.errors import DataError, UsageError
from mindspeed_mm.fsdp.data.data_utils.decoding.image_media import IMAGE_SUFFIXES
from mindspeed_mm.tasks.dreambooth.flags import configuration, read_flags


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
            way_out=f"Make them first: mm infer {options.pretrained_model_name_or_path} "
            f"--prompt '{options.class_prompt}' --num-samples {lacking} --out {options.class_data_dir}",
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
