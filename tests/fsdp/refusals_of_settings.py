"""Refusals between keys, of run folders, tools, trackers, the loss scale and features."""

from __future__ import annotations

import json
from pathlib import Path

from tests.helpers.refusal import (
    ENVIRONMENT,
    Refusal,
)

PROFILE, MEMORY = "tools.profile", "tools.memory_profile"
RUN = "{folder}/out"
LOW_PRECISION = "training.quantization_plan"
EVALUATE = "training.evaluate"


def with_a_file_above(folder: Path) -> None:
    """A file where the run folder's parent should be."""
    (folder / "out").write_text("")


def with_foreign_files(folder: Path) -> None:
    """A folder in which somebody else keeps a file under a name that a run writes."""
    (folder / "out").mkdir()
    (folder / "out" / "metrics.jsonl").write_text("")


def with_old_style_checkpoint(folder: Path) -> None:
    """A checkpoint in Megatron's layout."""
    (folder / "old" / "mp_rank_00").mkdir(parents=True)


def with_foreign_adapters(folder: Path) -> None:
    """An adapter of another kind than LoRA."""
    (folder / "adapters").mkdir()
    (folder / "adapters" / "adapter_config.json").write_text(json.dumps({"peft_type": "IA3"}))
    (folder / "adapters" / "adapter_model.safetensors").write_bytes(b"")


TOOLS = (
    Refusal("a profile of nobody", (f"{PROFILE}.enable=true", f"{PROFILE}.ranks=[]"), "no ranks", f"{PROFILE}.ranks"),
    Refusal(
        "a profile of a rank that does not exist",
        (f"{PROFILE}.enable=true", f"{PROFILE}.ranks=[3]"),
        "rank 3 is not among the 2",
        f"{PROFILE}.ranks",
        ranks=2,
    ),
    Refusal(
        "a profile that ends before it starts",
        (f"{PROFILE}.enable=true", f"{PROFILE}.static_param.start_step=4", f"{PROFILE}.static_param.end_step=4"),
        "not after start_step",
        f"{PROFILE}.static_param.end_step",
    ),
    Refusal(
        "a profile of steps behind the last",
        (f"{PROFILE}.enable=true", f"{PROFILE}.static_param.start_step=40", f"{PROFILE}.static_param.end_step=41"),
        "the run ends after step",
        f"{PROFILE}.static_param.start_step",
    ),
    Refusal(
        "a profile without the host",
        (
            f"{PROFILE}.enable=true",
            f"{PROFILE}.static_param.with_cpu=false",
            *(f"{PROFILE}.static_param.{name}" for name in ("start_step=1", "end_step=2")),
        ),
        "false, but",
        f"{PROFILE}.static_param.with_cpu",
    ),
    Refusal(
        "a dynamic profile that nobody can ask for",
        (f"{PROFILE}.enable=true", f"{PROFILE}.profile_type=dynamic"),
        "is not given",
        f"{PROFILE}.dynamic_param.config_path",
    ),
    Refusal(
        "memory of a rank that does not exist",
        (f"{MEMORY}.enable=true", f"{MEMORY}.dump_ranks=[3]"),
        "rank 3 is not among the 2",
        f"{MEMORY}.dump_ranks",
        ranks=2,
    ),
    Refusal(
        "memory of steps that end before they start",
        (f"{MEMORY}.enable=true", f"{MEMORY}.start_step=3"),
        "not after start_step",
        f"{MEMORY}.end_step",
    ),
    Refusal(
        "memory of steps behind the last",
        (f"{MEMORY}.enable=true", f"{MEMORY}.start_step=30", f"{MEMORY}.end_step=31"),
        "the run ends after step",
        f"{MEMORY}.start_step",
    ),
    Refusal("a peak of nothing", ("tools.peak_tflops=0",), "0", "tools.peak_tflops"),
)

RUNS = (
    Refusal(
        "a tracker that is not installed",
        ("training.report_to=[swanlab]",),
        "not installed: swanlab",
        "training.report_to",
        ENVIRONMENT,
    ),
    Refusal(
        "a run folder that is a file",
        (f"training.save={RUN}/run",),
        "is a file",
        "training.save",
        spoil=with_a_file_above,
    ),
    Refusal(
        "evaluation without questions",
        (f"{EVALUATE}.interval=5",),
        "no questions to answer",
        f"{EVALUATE}.interval",
    ),
    Refusal(
        "evaluation of a model that is split into stages",
        (f"{EVALUATE}.interval=5", f"{EVALUATE}.data={{folder}}/rows.jsonl", "parallel.pipeline_parallel_size=2"),
        "no rank can gather the model",
        f"{EVALUATE}.interval",
        ranks=2,
    ),
    Refusal(
        "patience with no metric",
        (f"{EVALUATE}.patience=2",),
        "no metric that it is about",
        f"{EVALUATE}.patience",
    ),
    Refusal(
        "the best by a loss that is not measured",
        (f"{EVALUATE}.best_metric=val_loss", f"training.save={RUN}"),
        "measured by validation, and there is none",
        f"{EVALUATE}.best_metric",
    ),
    Refusal(
        "the best by a number that nobody measures",
        (f"{EVALUATE}.best_metric=bleu", f"training.save={RUN}"),
        "not a number that this run measures",
        f"{EVALUATE}.best_metric",
    ),
    Refusal(
        "the best by an evaluation that does not come",
        (f"{EVALUATE}.best_metric=eval_accuracy", f"training.save={RUN}"),
        "measured by evaluation, and there is none",
        f"{EVALUATE}.best_metric",
    ),
    Refusal(
        "the best of a run without a folder",
        (f"{EVALUATE}.best_metric=eval_accuracy",),
        "no run folder to keep the best checkpoint in",
        f"{EVALUATE}.best_metric",
    ),
)
