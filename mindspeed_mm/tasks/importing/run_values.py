"""Conversions that several tools share: length, schedule, optimizer, intervals; and numbers of rows and steps."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from mindspeed_mm.core.json_file import JsonObject, parse_json
from mindspeed_mm.fsdp.params.other_tools import PeerRow
from mindspeed_mm.fsdp.params.training_args import OPTIMIZERS
from mindspeed_mm.tasks.importing.common_values import key_of
from mindspeed_mm.tasks.importing.draft import (
    BASIC,
    DATASET,
    VAL_DATASET,
    Outcome,
    PeerSetup,
    conversion,
    default_of,
    idle,
    no,
    texts,
)

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
_LENGTH = ("training.train_iters", "training.train_epochs")
_MEDIA = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".avif", ".jxl", ".gif", ".mp4", ".mov", ".avi", ".mkv", ".webm")
_MOST_ROWS_BYTES = 200_000_000
"""Of a file whose rows are counted, to turn shares of an epoch into steps."""


def count_rows(draft: PeerSetup) -> int | None:
    """How many rows the setup trains on, where its files are here and small enough to be counted."""
    entries = draft.out.get(DATASET)
    names = entries.split(",") if isinstance(entries, str) else entries or []
    total = 0
    for entry in names:
        if draft.tool.is_for_generators and (media := media_in(entry)):
            total += media
            continue
        file = _file_of(draft, entry)
        if file is None or file.stat().st_size > _MOST_ROWS_BYTES or file.suffix not in (".jsonl", ".json"):
            return None
        most = entry.get("max_samples") if isinstance(entry, dict) else draft.out.get(f"{BASIC}.max_samples")
        rows = _rows_in(file)
        if rows is None:
            return None
        total += min(rows, most) if most else rows
    return total or None


def media_in(entry: object) -> int:
    """How many media an epoch takes from a folder; kohya's `10_dog` inside it takes each ten times."""
    folder = Path(str(entry["path"] if isinstance(entry, dict) else entry))
    if not folder.is_dir():
        return 0
    repeats = int(entry.get("repeats", 1)) if isinstance(entry, dict) else 1
    total = 0
    for path in (each for each in folder.rglob("*") if each.suffix.lower() in _MEDIA):
        of_folder = re.match(r"(\d+)_", path.parent.name) if path.parent != folder else None
        total += int(of_folder[1]) if of_folder else repeats
    return total


def first_row(draft: PeerSetup) -> JsonObject:
    """The first row that the setup trains on; empty where its file is not here, or no JSON."""
    entries = draft.out.get(DATASET)
    first = entries[0] if isinstance(entries, list) and entries else entries
    file = _file_of(draft, first)
    if file is None and (folder := Path(str(first["path"] if isinstance(first, dict) else first))).is_dir():
        file = next(iter(sorted(folder.rglob("*.json*"))), None)
    if file is None or file.suffix not in (".jsonl", ".json") or file.stat().st_size > _MOST_ROWS_BYTES:
        return {}
    with file.open("rb") as stream:
        content = stream.readline() if file.suffix == ".jsonl" else stream.read()
    try:
        row = parse_json(content)
    except ValueError:
        return {}
    row = row[0] if isinstance(row, list) and row else row
    if isinstance(row, dict):
        return row
    return {}


def _file_of(draft: PeerSetup, entry: object) -> Path | None:
    """The file of rows that an entry of `dataset` names, where it is here."""
    name = str(entry["path"] if isinstance(entry, dict) else entry)
    found = [Path(name), Path(str(draft.out.get(f"{BASIC}.dataset_dir", "data"))) / name]
    return next((each for each in found if each.is_file()), None)


def _rows_in(file: Path) -> int | None:
    content = file.read_bytes()
    if file.suffix == ".jsonl":
        return sum(bool(line.strip()) for line in content.splitlines())
    try:
        rows = parse_json(content)
    except ValueError:
        return None
    if isinstance(rows, list):
        return len(rows)
    return None


def processes(draft: PeerSetup) -> int:
    """How many processes the setup starts, by its launcher's words; 1 where they do not say."""
    for word in (
        draft.given.environment.get("NPROC_PER_NODE"),
        draft.get("num_processes"),
        draft.get("nproc_per_node"),
    ):
        if word is not None and str(word).isdigit():
            return int(word)
    return 1


def steps_of_epoch(draft: PeerSetup) -> float | None:
    """Optimizer steps of an epoch, where the rows can be counted."""
    rows = count_rows(draft)
    if rows is None:
        return None
    held_out = float(draft.out.get(f"{BASIC}.val_rate", 0) or 0)
    each = int(draft.out.get("training.micro_batch_size", 1)) * int(
        draft.out.get("training.gradient_accumulation_steps", 1)
    )
    return max(1.0, rows * (1 - held_out) / (each * processes(draft)))


def total_steps(draft: PeerSetup) -> float | None:
    """Optimizer steps of the run, where they are known."""
    if draft.out.get("training.train_iters"):
        return float(draft.out["training.train_iters"])
    epoch = steps_of_epoch(draft)
    if epoch is None:
        return None
    return epoch * float(draft.out.get("training.train_epochs", 1))


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
    return {key: 500 if key == "training.save_interval" else 100}


@conversion(":per_epoch_save")
def per_epoch_save(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """Steps between checkpoints, from their number in an epoch."""
    if not isinstance(value, int | float) or value <= 0:
        return {"training.save_interval": 0}
    return every(draft, "training.save_interval", float(value), f"{value:g} an epoch")


@conversion(":every_n_epochs")
def every_n_epochs(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """An interval in steps, from a number of epochs."""
    count = float(value) if isinstance(value, int | float) and value else 1.0
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
    if not value or total is None:
        if not value:
            return {}
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
