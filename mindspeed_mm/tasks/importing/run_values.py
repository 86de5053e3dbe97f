"""Conversions that several tools share: length, schedule, optimizer, intervals; and numbers of rows and steps."""

from __future__ import annotations

import math
import re
from typing import Any

from mindspeed_mm.core.json_file import JsonObject, parse_json
from mindspeed_mm.fsdp.params.other_tools import PeerRow
from mindspeed_mm.fsdp.params.training_args import OPTIMIZERS
from mindspeed_mm.tasks.importing.common_values import key_of
from mindspeed_mm.tasks.importing.draft import (
    BASIC,
    VAL_DATASET,
    Outcome,
    PeerSetup,
    conversion,
    default_of,
    idle,
    no,
    texts,
)
from mindspeed_mm.tasks.importing.row_counts import count_rows, steps_of_epoch, total_steps

_SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "cosine_with_min_lr": "cosine",
    "cosine_warmup_with_min_lr": "cosine",
    "warmup_stable_decay": "wsd",
    "wsd": "wsd",
    "schedulertype.cosine": "cosine",
    "schedulertype.linear": "linear",
}


@conversion(":steps")
def steps(draft: PeerSetup, row: PeerRow, value: Any) -> Outcome:
    """A number of steps, which goes before epochs; -1 is none."""
    if not isinstance(value, int | float) and not str(value).isdigit():
        return no("write the number of steps into training.train_iters")
    if int(value) <= 0:
        return {}
    if draft.tool.name in ("kohya", "musubi") and draft.has("max_train_epochs"):
        return idle("epochs go before steps")
    return {"training.train_iters": int(value)}


@conversion(":epochs")
def epochs(draft: PeerSetup, row: PeerRow, value: Any) -> Outcome:
    """Passes over the data, unless steps are given; a part of one is rounded up."""
    number_of_steps = draft.get("max_steps", draft.get("max_train_steps", draft.get("train_iters")))
    if draft.tool.name not in ("kohya", "musubi") and number_of_steps and int(number_of_steps) > 0:
        return idle("steps go before epochs")
    whole = float(value)
    if whole != int(whole):
        draft.note("training.train_epochs", f"{value} there: write training.train_iters for a part of an epoch")
    return {"training.train_epochs": max(1, math.ceil(whole))}


@conversion(":scheduler")
def scheduler(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """The shape of the learning-rate schedule, under our name."""
    word = str(value).lower()
    if word == "cosine_with_restarts" and _number(draft, "lr_num_cycles", "lr_scheduler_num_cycles") == 1:
        word = "cosine"
    if word == "polynomial" and _number(draft, "lr_power", "lr_scheduler_power") == 1:
        word = "linear"  # down to 1e-7 there
    if word not in _SCHEDULES:
        return no(f"{value} is not built; training.lr_decay_style takes constant, linear, cosine and wsd")
    return {key_of(row): _SCHEDULES[word]}


def _number(draft: PeerSetup, *words: str) -> float:
    """The value of the first of some settings that is given; 1 by default."""
    return next((float(draft.get(word)) for word in words if draft.has(word)), 1.0)


@conversion(":scheduler_kwargs")
def scheduler_kwargs(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """What shapes a schedule: the lowest rate."""
    if isinstance(value, str):
        try:
            value = parse_json(value.encode())
        except ValueError:
            value = {}
    rate = float(draft.out.get("training.lr", 5e-5))
    if isinstance(value, dict) and "min_lr" in value:
        return {"training.lr_min": float(value["min_lr"])}
    if isinstance(value, dict) and "min_lr_rate" in value:
        return {"training.lr_min": float(f"{rate * float(value['min_lr_rate']):.6g}")}
    return no("training.lr_min, lr_decay_ratio and lr_wsd_style shape the schedule")


@conversion(":warmup")
def warmup(draft: PeerSetup, row: PeerRow, value: Any) -> Outcome:
    """A share of the run; a number of steps is divided by the length of the run, where that is known."""
    key = "training.lr_warmup_ratio"
    count = float(value)
    style = str(draft.get("lr_scheduler_type", draft.get("lr_scheduler", ""))).lower()
    if style == "constant" or (not style and draft.tool.name in ("diffusers", "kohya", "musubi")):
        return {key: 0.0}  # their `constant` has no warm-up, whatever is asked for
    if count < 1:
        return {key: count}
    total = total_steps(draft)
    if total is not None:
        return {key: round(min(1.0, count / total), 6)}
    draft.note(key, f"{count:g} steps there: write {count:g} / number of steps")
    return {key: 0.03}


@conversion(":min_lr_ratio")
def min_lr_ratio(draft: PeerSetup, row: PeerRow, value: Any) -> Outcome:
    """The lowest rate as a share of the highest."""
    return {"training.lr_min": float(f"{float(draft.out.get('training.lr', 0)) * float(value):.6g}")}


@conversion(":constant_ratio")
def constant_ratio(draft: PeerSetup, row: PeerRow, value: Any) -> Outcome:
    """The share of the run at the lowest rate, behind the decay."""
    if float(value):
        return {"training.lr_decay_ratio": 1 - float(value)}
    return {}


@conversion(":optimizer")
def optimizer(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """AdamW in its kinds, and muon; others are named."""
    word = str(value).lower().replace("-", "_").removeprefix("optimizernames.")
    found: JsonObject = {}
    if "muon" in word:
        return {"training.optimizer": "muon"}
    if "lion" in word:
        return no("lion's decay rates differ from tool to tool; write optimizer: lion, lion_beta1 and lion_beta2")
    known = f"training.optimizer has {', '.join(OPTIMIZERS)}"
    if not re.search(r"adamw|^adam$|adam8bit|adam_|sgd|^none$|^$", word) or "schedule" in word or "mini" in word:
        return no(f"{value} is not built; {known}")
    if "sgd" in word:
        return no(f"sgd is not built; {known}")
    # int8 is the smallest type that our optimizer states have
    if re.search(r"8_?bit|4_?bit", word):
        found["training.optimizer_state_dtype"] = "int8"
    elif "paged" in word:
        found["training.optimizer"] = "adamw_swap"
    return found


@conversion(":report")
def report(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """The trackers that receive the logged numbers."""
    names = [name for name in texts(value) if name.lower() not in ("none", "all")]
    known = [name for name in names if name in ("tensorboard", "wandb", "swanlab", "mlflow", "trackio")]
    if names and not known:
        return no(f"{names[0]} is not built; training.report_to has tensorboard, wandb, swanlab, mlflow and trackio")
    return {"training.report_to": known}


# --- intervals --------------------------------------------------------------------------------------------------------


@conversion(":interval")
def interval(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """Steps between checkpoints; below 1 it is a share of the run."""
    if not isinstance(value, int | float):
        return no("write the number of steps into training.save_interval")
    if value >= 1:
        return {"training.save_interval": int(value)}
    total = total_steps(draft)
    if total is None:
        return no("a share of the run; write the number of steps into training.save_interval")
    return {"training.save_interval": max(1, round(total * value))}


def every(draft: PeerSetup, key: str, per_epoch: float, told: str) -> Outcome:
    """An interval that is counted in epochs, in steps where the rows can be counted."""
    steps_of_one = steps_of_epoch(draft)
    if steps_of_one is not None:
        return {key: max(1, round(steps_of_one / per_epoch))}
    draft.note(key, f"{told} there; the number of rows is not known here")
    if key == "training.save_interval":
        return {key: 500}
    return {key: 100}


@conversion(":per_epoch_save")
def per_epoch_save(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """Steps between checkpoints, from their number in an epoch."""
    if not isinstance(value, int | float) or value <= 0:
        return {"training.save_interval": 0}
    return every(draft, "training.save_interval", float(value), f"{value:g} an epoch")


@conversion(":every_n_epochs")
def every_n_epochs(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """An interval in steps, from a number of epochs."""
    count = 1.0
    if isinstance(value, int | float) and value:
        count = float(value)
    return every(draft, key_of(row), 1 / count, f"every {count:g} epochs")


@conversion(":save_strategy")
def save_strategy(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """Whether checkpoints are written by steps, by epochs or never."""
    word = str(value).lower()
    if word in ("no", "false"):
        return {"training.save_interval": 0}
    if word == "epoch":
        return every(draft, "training.save_interval", 1, "every epoch")
    if word == "best":
        return idle("the checkpoint with the lowest val_loss is kept anyway")
    return {}


@conversion(":save_limit")
def save_limit(draft: PeerSetup, row: PeerRow, value: Any) -> Outcome:
    """How many checkpoints are kept, at least two."""
    if isinstance(value, int) and value < 2:
        draft.note("training.save_total_limit", f"{value} there; a damaged checkpoint is never the only one")
    return {"training.save_total_limit": max(2, int(value))}


@conversion(":log_interval")
def log_interval(draft: PeerSetup, row: PeerRow, value: Any) -> Outcome:
    """Steps between log lines; a share of the run has no effect."""
    if float(value) < 1:
        return idle("a share of the run; training.log_interval counts steps")
    return {"training.log_interval": int(value)}


def validates(draft: PeerSetup) -> bool:
    """Whether the setup holds rows out."""
    return bool(draft.out.get(VAL_DATASET) or draft.out.get(f"{BASIC}.val_rate"))


@conversion(":eval_steps")
def eval_steps(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """Steps between validations; below 1 it is a share of the run."""
    if not isinstance(value, int | float):
        return no("write the number of steps into training.val_interval")
    if value >= 1:
        return {"training.val_interval": int(value)}
    total = total_steps(draft)
    if not value:
        return {}
    if total is None:
        return no("a share of the run; write the number of steps into training.val_interval")
    return {"training.val_interval": max(1, round(total * value))}


@conversion(":per_epoch_eval")
def per_epoch_eval(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """Steps between validations, from their number in an epoch."""
    if not isinstance(value, int | float) or value <= 0:
        return {}
    return every(draft, "training.val_interval", float(value), f"{value:g} an epoch")


@conversion(":eval_strategy")
def eval_strategy(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """Whether the run validates by steps, by epochs or never."""
    word = str(value).lower()
    if word in ("no", "false"):
        return {"training.val_interval": 0}
    if word == "epoch":
        return every(draft, "training.val_interval", 1, "every epoch")
    if draft.has("eval_steps"):
        return {}
    return {"training.val_interval": int(draft.get("save_steps", 0)) or 500}


@conversion(":val_size")
def val_size(draft: PeerSetup, row: PeerRow, value: Any) -> Outcome:
    """Rows that are held out: a share, or a number of them."""
    size = float(value)
    if size <= 0:
        return {}
    if size < 1:
        return {f"{BASIC}.val_rate": size}
    rows = count_rows(draft)
    if rows is not None:
        return {f"{BASIC}.val_rate": round(min(0.5, size / rows), 6)}
    draft.note(f"{BASIC}.val_rate", f"{size:g} rows there: write {size:g} / number of rows")
    return {f"{BASIC}.val_rate": 0.05, f"{BASIC}.val_max_samples": int(size)}


@default_of("drop_last")
def drop_last(draft: PeerSetup) -> bool | None:
    """transformers' Trainer trains on every row of an epoch, LLaMA-Factory's version 1 and Megatron do not; prompts of
    GRPO come in whole groups."""
    if draft.method == "grpo" or draft.is_second_program:
        return None
    return False


@default_of("warmup_of_axolotl")
def warmup_of_axolotl(draft: PeerSetup) -> float:
    """3 % of the steps, at most 100 of them (core/builders/base.py)."""
    total = total_steps(draft)
    if total is None:
        return 0.03
    return min(0.03, 100 / total)


@default_of("lr_of_trl")
def lr_of_trl(draft: PeerSetup) -> float:
    """SFTConfig 2e-5, DPOConfig and GRPOConfig 1e-6, TrainingArguments 5e-5."""
    if draft.method in ("dpo", "grpo"):
        return 1e-6
    if is_of_trl(draft):
        return 2e-5
    return 5e-5


def is_of_trl(draft: PeerSetup) -> bool:
    """Whether the setup is for a trainer of TRL, not for transformers' own."""
    words = ("dataset_name", "use_peft", "max_length", "packing", "datasets", "lora_r", "completion_only_loss")
    return draft.method != "sft" or bool(draft.given.program) or any(map(draft.has, words))


@default_of("bf16_of_trl")
def bf16_of_trl(draft: PeerSetup) -> bool | None:
    """TRL computes in bf16 unless it is told otherwise; transformers' Trainer does not."""
    if is_of_trl(draft) and not draft.has("fp16"):
        return True
    return None


@default_of("recompute_of_trl")
def recompute_of_trl(draft: PeerSetup) -> bool | None:
    """TRL switches recomputation on; transformers' Trainer does not."""
    if is_of_trl(draft):
        return True
    return None


@default_of("targets_of_peft")
def targets_of_peft(draft: PeerSetup) -> str:
    """PEFT's own choice for most architectures."""
    return "q_proj,v_proj"
