"""The flags of diffusers' `train_dreambooth_flux.py` and `train_dreambooth_lora_flux.py`, and what they mean here."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from mindspeed_mm.core.errors import UsageError

WITHOUT_EFFECT = (
    "--logging_dir", "--report_to", "--dataloader_num_workers", "--allow_tf32", "--cache_latents", "--use_8bit_adam",
    "--upcast_before_saving", "--variant", "--revision", "--prior_generation_precision", "--local_rank", "--scale_lr",
    "--lr_num_cycles", "--lr_power", "--cache_dir",
)  # fmt: skip
"""They say how diffusers' script works, not what it computes; each may have a value."""
REFUSED = {
    "--train_text_encoder": "text encoders are not trained here",
    "--push_to_hub": "nothing is uploaded; export the run, then upload the folder",
    "--dataset_name": "nothing is downloaded; name a folder by --instance_data_dir",
    "--optimizer": "AdamW trains",
}
"""Flag → why it is refused; of `--optimizer` every value but AdamW."""
WEIGHTINGS: Mapping[str, dict[str, str]] = {
    "none": {"timestep_density": "uniform"},
    "sigma_sqrt": {"timestep_density": "uniform", "loss_weighting": "sigma_sqrt"},
    "cosmap": {"timestep_density": "uniform", "loss_weighting": "cosmap"},
    "logit_normal": {"timestep_density": "logit_normal"},
    "mode": {"timestep_density": "mode"},
}
"""`--weighting_scheme` → keys of `training.diffusion`."""
SCHEDULES = {"constant": "constant", "constant_with_warmup": "constant", "linear": "linear", "cosine": "cosine"}
DTYPES = {"no": "fp32", "fp16": "fp16", "bf16": "bf16"}


class _ScriptParser(argparse.ArgumentParser):
    """Says what is wrong as every command here does."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, way_out="See --help.")


def build_parser() -> argparse.ArgumentParser:
    """The flags with diffusers' defaults."""
    parser = _ScriptParser(
        "train_dreambooth_flux.py",
        description="Train FLUX.1 on a few pictures of one thing, with or without pictures of its class.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--pretrained_model_name_or_path", required=True, metavar="FOLDER", help="FLUX.1 in diffusers' layout.")
    add("--instance_data_dir", type=Path, required=True, metavar="FOLDER", help="Pictures of the thing.")
    add("--instance_prompt", required=True, help="Caption of each, e.g. 'a photo of sks dog'.")
    add("--class_data_dir", type=Path, metavar="FOLDER", help="Pictures of its class; what lacks is generated.")
    add("--class_prompt", help="Caption of each of these, e.g. 'a photo of a dog'.")
    add("--with_prior_preservation", action="store_true", help="Train on pictures of the class, too.")
    add("--prior_loss_weight", type=float, default=1.0, help="Weight of their mean loss (%(default)s).")
    add("--num_class_images", type=int, default=100, help="How many of its pictures are used (%(default)s).")
    add("--sample_batch_size", type=int, default=4, help="How many are generated at a time (%(default)s).")
    add("--output_dir", type=Path, default=Path("flux-dreambooth"), help="Where the run and the result go.")
    add("--seed", type=int, default=42, help="Seed (%(default)s).")
    add("--resolution", type=int, default=512, help="Side of the squares that are trained (%(default)s).")
    add("--center_crop", action="store_true", help="Cut the middle instead of anywhere.")
    add("--random_flip", action="store_true", help="Mirror every second view.")
    add("--repeats", type=int, default=1, help="How often an epoch reads each picture of the thing (%(default)s).")
    add("--train_batch_size", type=int, default=4, help="Pictures of the thing in a micro-batch (%(default)s).")
    add("--num_train_epochs", type=int, default=1, help="Epochs, where no number of steps is given (%(default)s).")
    add("--max_train_steps", type=int, help="Steps.")
    add("--gradient_accumulation_steps", type=int, default=1, help="Micro-batches of a step (%(default)s).")
    add("--gradient_checkpointing", action="store_true", help="Compute activations again, to save memory.")
    add("--learning_rate", type=float, default=1e-4, help="Learning rate (%(default)s).")
    add("--lr_scheduler", choices=sorted(SCHEDULES), default="constant", help="Its course (%(default)s).")
    add("--lr_warmup_steps", type=int, default=500, help="Steps until it is reached, but for `constant` (%(default)s).")
    add("--weighting_scheme", choices=sorted(WEIGHTINGS), default="none", help="Noise levels, and their weights.")
    add("--logit_mean", type=float, default=0.0, help="As diffusers counts: above 0 is less noise.")
    add("--logit_std", type=float, default=1.0, help="Deviation of the logit-normal density (%(default)s).")
    add("--mode_scale", type=float, default=1.29, help="Scale of the mode density (%(default)s).")
    add("--guidance_scale", type=float, default=3.5, help="Input of FLUX.1 dev in training (%(default)s).")
    add("--max_sequence_length", type=int, help="Has no effect: captions are padded as the tokenizer says.")
    add("--adam_beta1", type=float, default=0.9, help="AdamW (%(default)s).")
    add("--adam_beta2", type=float, default=0.999, help="AdamW (%(default)s).")
    add("--adam_weight_decay", type=float, default=1e-4, help="AdamW (%(default)s).")
    add("--adam_epsilon", type=float, default=1e-8, help="AdamW (%(default)s).")
    add("--max_grad_norm", type=float, default=1.0, help="Largest norm of gradients (%(default)s).")
    add("--mixed_precision", choices=["no", "fp16", "bf16"], default="no", help="What is computed in (%(default)s).")
    add("--rank", type=int, help="Train adapters of this rank instead of all weights.")
    add("--lora_alpha", type=float, default=4.0, help="Alpha of the adapters (%(default)g).")
    add("--lora_layers", help="Layers with adapters, separated by commas: ends of names.")
    add("--checkpointing_steps", type=int, default=500, help="Steps between two checkpoints (%(default)s).")
    add("--checkpoints_total_limit", type=int, help="Most checkpoints that are kept.")
    add("--resume_from_checkpoint", help="Has no effect: a run goes on from its newest checkpoint.")
    add("--validation_prompt", help="Drawn while training, into the run folder.")
    add("--num_validation_images", type=int, default=4, help="How many (%(default)s).")
    add("--validation_epochs", type=int, default=50, help="Epochs between two rounds (%(default)s).")
    add(
        "--num_inference_steps",
        type=int,
        help="Denoising steps of generated pictures; default: those that the model was released with.",
    )
    return parser


def read_flags(words: Sequence[str]) -> argparse.Namespace:
    """The flags of a command line.

    Raises:
        UsageError: One is unknown, refused, or lacks another.
    """
    options, others = build_parser().parse_known_args(list(words))
    _check_others(others)
    if options.with_prior_preservation:
        for name in ("class_data_dir", "class_prompt"):
            if getattr(options, name) is None:
                raise UsageError("--with_prior_preservation needs it", key=f"--{name}", way_out="Give it.")
    if not options.instance_data_dir.is_dir():
        raise UsageError("there is no such folder", where=str(options.instance_data_dir), key="--instance_data_dir")
    return options


def _check_others(words: Sequence[str]) -> None:
    for place, word in enumerate(words):
        flag, _, value = word.partition("=")
        if not flag.startswith("--"):
            continue
        given = (value or "".join(words[place + 1 : place + 2])).lower()
        if flag in REFUSED and not (flag == "--optimizer" and given == "adamw"):
            raise UsageError(REFUSED[flag], key=flag, way_out="Leave it out.")
        if flag not in WITHOUT_EFFECT and flag != "--optimizer":
            raise UsageError("no such flag", key=flag, way_out="See --help.")


def configuration(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The YAML's content.

    Args:
        options: The flags.
        folder: Where `instance.jsonl` and `class.jsonl` stand.
    """
    entries: list[dict[str, Any]] = [{"path": str(folder / "instance.jsonl"), "repeats": options.repeats}]
    diffusion: dict[str, Any] = {"shift": 1.0, "guidance": options.guidance_scale}
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


def _training(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    pictures = 2 if options.with_prior_preservation else 1
    training: dict[str, Any] = {
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
