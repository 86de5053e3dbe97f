"""Scores videos by VideoAlign's model: `torchrun … inference_videoalign.py --mm-data data.json --load MODEL`."""

from __future__ import annotations

from pathlib import Path

from mindspeed_mm.arguments import parse_args
from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.core.terminal import say
from mindspeed_mm.fsdp.posttrain_rewards.videoalign import VideoScorer
from mindspeed_mm.fsdp.train.provider.entry import run_entry
from mindspeed_mm.fsdp.train.provider.json_section import JsonSection
from mindspeed_mm.fsdp.utils.device import current_device
from mindspeed_mm.provider.translate import translate
from mindspeed_mm.tasks.evaluate.videos import score_table

_WAY_OUT = "See inference_param of examples/videoalign/data.json."


def score_videos() -> None:
    """Write the scores of the videos that `inference_param` of data.json names, and print how often they say what
    people say.

    Raises:
        ConfigError: There is no model, or `inference_param` is not complete.
    """
    args = parse_args()
    if args.rank:
        return  # one rank scores
    translated = translate(args, for_training=False)
    arguments = translated.arguments
    section = JsonSection(translated.data_json).get("inference_param", JsonSection())
    where = str(args.mm_data or "--mm-data")
    task = section.get("task")
    if task not in ("inference", "evaluate"):
        raise ConfigError(
            f"{task!r} is not one of inference, evaluate", where=where, key="inference_param.task", way_out=_WAY_OUT
        )
    for name in ("data_path", "data_folder", "save_path"):
        if not section.get(name):
            raise ConfigError("is not given", where=where, key=f"inference_param.{name}", way_out=_WAY_OUT)
    model = arguments.training.load or arguments.model.model_name_or_path
    if model is None:
        raise ConfigError("no model is named", key="--load", way_out="Name the folder of the reward model.")
    param = arguments.data.dataset_param
    scorer = VideoScorer(
        str(model),
        norm=bool(section.get("use_norm", False)),
        norm_param=section.get("norm_param", JsonSection()).to_dict() or None,
        batch_size=arguments.training.micro_batch_size or 1,
        dtype={"bf16": "bfloat16", "fp16": "float16"}.get(str(arguments.parallel.fsdp_plan.param_dtype), "float32"),
        device=str(current_device()),
        preprocess=param.preprocess_parameters,
        root=section.data_folder,
    )
    out = Path(section.save_path)
    out.mkdir(parents=True, exist_ok=True)
    attributes = section.get("reward_attributes", ["VQ", "MQ", "TA", "Overall"]) if task == "evaluate" else ()
    found = score_table(scorer, Path(section.data_path), out, attributes)
    say(f"{out}: scores of {section.data_path}")
    for name, each in found.items():
        say(f"{name}: accuracy with ties {_share(each.with_ties)}, without ties {_share(each.without_ties)}")


def _share(value: float | None) -> str:
    if value is None:
        return "unknown"
    return f"{value:.3f}"


def main() -> None:
    """Run `score_videos` as a script: an error becomes a message and an exit code."""
    run_entry(score_videos)


if __name__ == "__main__":
    main()
