"""MindSpeed-MM's `finetune_t2i.py`: the YAML that its flags make, the folder that trains, and the run."""

from __future__ import annotations

import argparse
import io
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ruamel.yaml import YAML

from mindspeed_mm.core.artifacts import atomic_write_text
from mindspeed_mm.core.errors import MachineError
from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.core.model_kinds import GENERATOR_INDEX
from mindspeed_mm.core.terminal import say
from mindspeed_mm.provider.entry_flags import entry_flags
from mindspeed_mm.tasks.dreambooth.run import SCHEDULES, WEIGHTINGS

_LONGEST_WAIT_S = 7200.0
"""For the folder that the first rank writes, on a file system of all ranks."""
_SIZES = (
    *((256, 1024), (256, 992), (256, 960), (256, 928), (288, 896), (288, 864), (288, 832), (320, 800), (320, 768)),
    *((352, 736), (352, 704), (352, 672), (384, 672), (384, 640), (416, 608), (416, 576), (448, 576), (448, 544)),
    *((480, 544), (480, 512), (512, 512)),
)
"""Heights and widths that pictures are brought to, the flat ones; the tall ones are these turned round
(`bailingmm_utils.py` of inclusionAI/Ming)."""


@dataclass(frozen=True)
class T2IFlags:
    """What a command line asks for."""

    options: argparse.Namespace
    overrides: tuple[str, ...]
    """`section.key=value`, for the YAML."""
    notes: tuple[str, ...]
    """What differs from the script, and which flags do nothing."""


def run(words: Sequence[str]) -> Path:
    """Train as the flags say; `t2i.yaml` beside the run's folder trains the same by `mm train`.

    Args:
        words: The command line's.

    Returns:
        The run's folder.

    Raises:
        MMError: Anything that a person can act on.
    """
    flags = read_flags(words)
    save: Path = flags.options.output_dir
    is_first = os.environ.get("RANK", "0") == "0"
    if is_first:
        for note in flags.notes:
            say(f"note: {note}", err=True)
    save.absolute().parent.mkdir(parents=True, exist_ok=True)
    make_model(flags.options, is_first=is_first)
    text = io.StringIO()
    YAML().dump(configuration(flags.options), text)
    path = save.with_name(f"{save.name}.t2i.yaml")
    atomic_write_text(path, text.getvalue())  # every rank the same
    from mindspeed_mm.tasks import train  # torch: not for --help

    train.run(path, flags.overrides)
    return save


def model_folder(options: argparse.Namespace) -> Path:
    """The folder that trains: the given one, or beside the run the one that is made of a released folder."""
    given, save = Path(options.pretrained_model_name_or_path), options.output_dir
    if (given / GENERATOR_INDEX).is_file():
        return given
    return save.with_name(f"{save.name}.model")


def make_model(options: argparse.Namespace, *, is_first: bool, now: Callable[[], float] = time.monotonic) -> None:
    """Write the folder that trains where there is none; ranks but the first wait for it.

    Args:
        options: Of the launch.
        is_first: Whether this is the rank that writes.
        now: A clock, in seconds.

    Raises:
        ModelFolderError: The released folder lacks a part.
        MachineError: The first rank writes where this one does not see it.
    """
    folder = model_folder(options)
    if (folder / GENERATOR_INDEX).is_file():
        return
    if is_first:
        from mindspeed_mm.checkpoint.original.ming import draws_of_release  # torch

        draws_of_release(Path(options.pretrained_model_name_or_path), folder)
        return
    begin = now()
    while not (folder / GENERATOR_INDEX).is_file():  # it appears when it is complete
        if now() - begin > _LONGEST_WAIT_S:
            raise MachineError(
                "is not there: the first rank writes it, and all ranks read it",
                where=str(folder),
                way_out="Name an --output_dir on a file system of all hosts, or write the folder beforehand: "
                "mm-convert MingConverter source_to_hf --cfg.source_path RELEASED --cfg.target_path FOLDER.",
            )
        time.sleep(1)


def read_flags(words: Sequence[str]) -> T2IFlags:
    """The flags of a command line.

    Raises:
        UsageError: One is unknown, missing, or of a value that cannot be.
    """
    known = entry_flags("finetune_t2i", weighting_scheme=WEIGHTINGS, lr_scheduler=SCHEDULES)
    options, others = known.parser.parse_known_args(list(words))
    overrides, notes = known.rest(others)
    if "--output_dir" not in {word.partition("=")[0] for word in words}:
        notes.append(f"--output_dir is not given: the run goes to {options.output_dir}")
    given, model = Path(options.pretrained_model_name_or_path), model_folder(options)
    if model != given:
        notes.append(f"{given} is a released folder: what trains is {model}, which is made of it")
    if options.gradient_accumulation_steps > 1:
        notes.append("the gradients of all micro-batches of a step count; the script takes the last one's alone")
    notes.append("pictures are scaled and cut to the size; the script stretches them to it")
    return T2IFlags(options, tuple(overrides), tuple(notes))


def size_of(height: int, width: int) -> tuple[int, int]:
    """Height and width of the pictures that are drawn, by the ratio of those that are asked for."""
    sizes = (*_SIZES, *((high, wide) for wide, high in reversed(_SIZES[:-1])))
    return min(sizes, key=lambda size: abs(round(size[0] / size[1], 2) - height / width))


def configuration(options: argparse.Namespace) -> JsonObject:
    """The YAML's content: what the flags say, and what the script does without being told."""
    height, width = size_of(*options.resolution)
    sizes = {"height": height, "width": width, "flip": options.random_flip}
    sizes |= {} if options.center_crop else {"crop": "random"}
    # diffusers' functions index times that run down: less noise where the paper has more.
    diffusion: JsonObject = {"logit_mean": -options.logit_mean, "logit_std": options.logit_std}
    diffusion |= {"mode_scale": options.mode_scale, **WEIGHTINGS[options.weighting_scheme]}
    warmup = 0 if options.lr_scheduler == "constant" else options.lr_warmup_steps
    seed = {} if options.seed is None else {"seed": options.seed}
    return {
        "model": {"model_name_or_path": str(model_folder(options)), "model_id": "ming_draw", "task": "t2i"},
        "data": {
            "dataset_param": {
                "dataset_type": "generation",
                "basic_parameters": {
                    "dataset": str(options.json_path),
                    "dataset_dir": str(options.image_folder),
                    "media_column": "image_name",
                    "caption_column": "text",
                },
                "preprocess_parameters": sizes,
            },
            "dataloader_param": {"num_workers": options.dataloader_num_workers},
        },
        "parallel": {"fsdp_plan": {"param_dtype": "bf16", "reduce_dtype": "fp32"}},
        "features": {"recompute": True},  # the script's model does so by itself
        "training": {
            "lr": options.learning_rate,
            "lr_decay_style": SCHEDULES[options.lr_scheduler],
            "lr_warmup_ratio": min(1.0, warmup / options.max_train_steps),
            "weight_decay": options.weight_decay,
            "adam_beta1": options.beta1,
            "adam_beta2": options.beta2,
            "adam_eps": options.eps,
            "clip_grad": options.clip_grad,
            "train_iters": options.max_train_steps,
            "micro_batch_size": options.micro_batch_size,
            "gradient_accumulation_steps": options.gradient_accumulation_steps,
            "save": str(options.output_dir),
            "save_interval": options.checkpointing_steps,
            "diffusion": diffusion,
            **seed,
        },
    }
