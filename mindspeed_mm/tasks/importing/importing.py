"""`mm config --from`: recognises a setup of another trainer and translates it.

The order: read the file or command (`given`), find the tool (`recognise`), settle the method, translate each setting by
the tool's table, add the tool's defaults where they change the training, and leave out what our defaults say already.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mindspeed_mm.core.config_path import value_at
from mindspeed_mm.core.errors import ConfigError, MMError
from mindspeed_mm.core.redaction import is_secret_name, remember_secrets
from mindspeed_mm.core.suggest import did_you_mean
from mindspeed_mm.fsdp.params.argument import Arguments
from mindspeed_mm.fsdp.params.loader import load_config
from mindspeed_mm.fsdp.params.other_tools import Kind, PeerRow, rows_of, words_of
from mindspeed_mm.tasks.importing import generators, language
from mindspeed_mm.tasks.importing.common_values import fixed, mapped, plain_value
from mindspeed_mm.tasks.importing.draft import (
    BASIC,
    CONVERSIONS,
    DEFAULTS,
    DIFFUSION,
    LORA,
    MEDIA,
    MODEL,
    Method,
    Outcome,
    PeerSetup,
    SettingResult,
    Told,
    is_on,
    no,
)
from mindspeed_mm.tasks.importing.given import Given, Setting, read_given, shell_value, value_of
from mindspeed_mm.tasks.importing.recognise import recognise
from mindspeed_mm.tasks.importing.run_values import validates

_METHODS: dict[str, Method] = {
    "sft": "sft", "pt": "pretrain", "pretrain": "pretrain", "dpo": "dpo", "orpo": "dpo", "simpo": "dpo", "ipo": "dpo",
    "grpo": "grpo", "causal_lm": "sft",
}  # fmt: skip
_UNBUILT = {
    "kto": "Put good and bad answers to the same question into pairs, chosen and rejected, and train with DPO.",
    "rm": "Train on the pairs themselves with DPO, or name a judge in posttrain.rewards.",
    "reward": "Train on the pairs themselves with DPO, or name a judge in posttrain.rewards.",
    "ppo": "posttrain.method: grpo trains on the same rewards without a value model.",
    "gkd": "Let the teacher answer, with mm infer, and train on its answers.",
    "cpo": "posttrain.dpo.loss_type: simpo or orpo need no reference model, either.",
}
"""Method that is not built → what to do instead."""
_INSTEAD = "mm route lists what is built."
_SWIFT_ENVIRONMENT = (
    "MAX_PIXELS",
    "MIN_PIXELS",
    "VIDEO_MAX_PIXELS",
    "VIDEO_MIN_PIXELS",
    "FPS",
    "FPS_MAX_FRAMES",
    "FPS_MIN_FRAMES",
)
_WINDOWS = re.compile(r"[A-Za-z]:[\\/]|\\\\")
_NO_PATH = re.compile(r"prompt|template|system|caption|token|regex|target|modules|pattern", re.IGNORECASE)


@dataclass(frozen=True)
class Imported:
    """A setup in our words."""

    tool: str
    source: str
    values: Mapping[str, Any]
    """Dotted key → value, without what our defaults say."""
    comments: Mapping[str, str]
    findings: tuple[SettingResult, ...]
    downloads: tuple[str, ...]

    def counted(self) -> dict[Kind, int]:
        """How many settings were translated, have no effect, are not supported."""
        kinds: tuple[Kind, ...] = ("translated", "idle", "unsupported")
        return {kind: sum(each.kind == kind for each in self.findings) for kind in kinds}

    def sections(self) -> dict[str, Any]:
        """The configuration as nested sections."""
        root: dict[str, Any] = {}
        for key, value in self.values.items():
            *names, last = key.split(".")
            section = root
            for name in names:
                section = section.setdefault(name, {})
            section[last] = value
        return root


def run(words: Sequence[str]) -> Imported:
    """Translate a file or a command of another trainer.

    Args:
        words: A file, with options that win over it; a shell script; or a command.

    Raises:
        UsageError: Nothing that is known.
        ConfigError: The file cannot be read, or its method is not built.
    """
    given = read_given(words)
    remember_secrets({each.key.rpartition(".")[2]: each.value for each in given.settings})
    return translate(given)


def translate(given: Given) -> Imported:
    """Translate settings.

    Raises:
        UsageError: They are no trainer's that is known.
        ConfigError: Their method is not built.
    """
    tool = recognise(given)
    given = _with_plain_keys(given, tool.name)
    draft = PeerSetup(tool, given)
    generators.with_dataset_file(draft)
    draft.method = _method(draft)
    _settle_kind(draft)
    for setting in draft.given.settings:
        _translate(draft, setting)
    _add_defaults(draft)
    _finish(draft)
    values = {key: value for key, value in draft.out.items() if not _is_default(key, value)}
    return Imported(
        tool.title, given.source, _ordered(values), draft.comments, _once(draft.findings), tuple(draft.downloads)
    )


# --- settings ---------------------------------------------------------------------------------------------------------


def _with_plain_keys(given: Given, tool: str) -> Given:
    """Settings under the names of the table: without the section of a job, of a TOML, or of a variable."""
    settings = given.settings
    if tool == "ai-toolkit":
        settings = [replace(each, key=each.key.removeprefix("config.process[].")) for each in settings]
    elif tool in ("kohya", "musubi"):
        known = words_of(tool)
        settings = [
            each if each.key in known else replace(each, key=each.key.rpartition(".")[2].removeprefix("[]."))
            for each in settings
        ]
    elif tool == "ms-swift":
        given_already = {each.key for each in settings}
        settings = settings + [
            Setting(name.lower(), value_of(given.environment[name]), f"variable {name}")
            for name in _SWIFT_ENVIRONMENT
            if name in given.environment and name.lower() not in given_already
        ]
    return replace(given, settings=list(settings))


def _method(draft: PeerSetup) -> Method:
    """What is trained.

    Raises:
        ConfigError: It is not built.
    """
    verb = next((word for word in draft.given.program[1:2] if word in {*_METHODS, *_UNBUILT}), "")
    script = Path(draft.given.program[0]).stem if draft.given.program else ""
    if draft.tool.name == "trl" and script in {*_METHODS, *_UNBUILT}:
        verb = script
    word, setting = verb, ""
    for name in ("stage", "rlhf_type", "rl", "task_type"):
        if draft.has(name) and name in words_of(draft.tool.name):
            word, setting = str(draft.get(name)).lower(), name
    if draft.given.program[1:2] == ("rlhf",) and not word:
        word = "dpo"
    if draft.tool.name == "trl" and not word:
        word = (
            "grpo"
            if draft.has("num_generations") or draft.has("reward_funcs")
            else "dpo"
            if draft.has("beta")
            else "sft"
        )
    if draft.tool.name == "axolotl" and draft.has("pretraining_dataset[].path"):
        word = "pretrain"
    if draft.get("dist_config.name") and "dpo" in str(draft.get("train_dataset", "")):
        word = "dpo"
    word = word or "sft"
    if word not in _METHODS:
        raise draft.refuse(f"{word.upper()} is not built", setting or draft.tool.name, _UNBUILT.get(word, _INSTEAD))
    if word in ("orpo", "simpo"):
        draft.put("posttrain.dpo.loss_type", [word])
    return _METHODS[word]


def _settle_kind(draft: PeerSetup) -> None:
    """What follows from the tool and the method, before any setting."""
    if draft.tool.is_for_generators:
        draft.put("data.dataset_param.dataset_type", "generation")
        is_lora = draft.tool.name == "diffusers" and generators.is_adapter_script(draft)
        if is_lora:
            draft.put(f"{LORA}.enable", True)
        return
    keys = language.method_keys(draft)
    assert not isinstance(keys, Told)
    for key, value in keys.items():
        draft.put(key, value)
    if draft.method == "pretrain" and draft.tool.name == "llamafactory" and not draft.has("packing"):
        draft.put(f"{BASIC}.packing", True, "default of LLaMA-Factory for stage: pt")


_LATE = (":towers", ":warmup", ":interval", ":eval_steps", ":eval_strategy", ":save_strategy", ":per_epoch_save",
         ":per_epoch_eval", ":every_n_epochs", ":validation_epochs", ":val_size", ":prior_weight")  # fmt: skip
"""Conversions that ask what others have written: rows, batch, length, adapters."""


def _translate(draft: PeerSetup, setting: Setting) -> None:
    """Say what becomes of a setting; those that ask others wait."""
    word = setting.key.rpartition(".")[2]
    row = draft.row(setting.key)
    told: Outcome | None = None
    if setting.value is None:
        return
    if is_secret_name(word.removesuffix("[]")) and not isinstance(setting.value, bool):
        told = Told("idle", "a secret is not copied; set it as an environment variable")
    elif row is None:
        near = did_you_mean(setting.key, words_of(draft.tool.name)).strip()
        told = no(f"it is no setting of {draft.tool.title} that is known. {near}".rstrip(". "))
    elif (name := shell_value(setting.value)) is not None:
        told = no(f"only a shell knows the value of {name}: write it yourself")
    if told is None and row is not None:
        if row.how in _LATE:
            return
        told = _outcome(draft, row, setting.value)
    assert told is not None
    _take(draft, setting, row, told)


def _outcome(draft: PeerSetup, row: PeerRow, value: Any) -> Outcome:
    if row.how == "idle":
        return Told("idle", row.note)
    if row.how == "with":
        return {}
    if row.how == "no":
        is_off = value is False or value in (0, 0.0, "") or str(value).lower() in ("false", "none", "no")
        return Told("idle", "it is off") if is_off else Told("unsupported", row.note)
    try:
        if row.how == "":
            return plain_value(row, value)
        if row.how.startswith("map "):
            return mapped(row, value, row.how)
        if row.how.startswith("="):
            return fixed(row, value, row.how)
        return CONVERSIONS[row.how](draft, row, value)
    except (TypeError, ValueError, AttributeError, LookupError):
        return no(f"its value cannot be read; set {row.ours}")


def _take(draft: PeerSetup, setting: Setting, row: PeerRow | None, outcome: Outcome) -> None:
    """Note what became of a setting, and write what it says."""
    if isinstance(outcome, Told):
        draft.findings.append(SettingResult(setting.key, setting.where, outcome.kind, note=outcome.note))
        return
    for key, value in outcome.items():
        if isinstance(value, str) and _WINDOWS.match(value) and not _NO_PATH.search(key):
            draft.note(key, "a path of Windows: write it as this machine has it")
        draft.put(key, value)
    note = row.note if row is not None else ""
    ours = tuple(outcome) or ((row.ours,) if row is not None and row.ours else ())
    draft.findings.append(SettingResult(setting.key, setting.where, "translated", ours, note))
    for key, value in outcome.items():
        is_plain = key.endswith(f".{setting.key}") or value == setting.key
        draft.comments.setdefault(key, "" if is_plain else setting.key)


def _add_defaults(draft: PeerSetup) -> None:
    """Settings that wait for others, and defaults of the tool, in the table's order."""
    for is_late in (False, True):
        for row in rows_of(draft.tool.name):
            if (row.how in _LATE) != is_late:
                continue
            given = [each for each in draft.given.settings if each.key in row.words and each.value is not None]
            if is_late and given:
                for each in given:
                    told = shell_value(each.value)
                    _take(
                        draft,
                        each,
                        row,
                        _outcome(draft, row, each.value) if told is None else no(f"only a shell knows {told}"),
                    )
            elif not given and row.default:
                _add_default(draft, row)


def _add_default(draft: PeerSetup, row: PeerRow) -> None:
    value = DEFAULTS[row.default[1:]](draft) if row.default.startswith("@") else value_of(row.default)
    if value is None or (row.ours in draft.out and row.how not in (":towers",)):
        return
    if row.ours is not None and row.ours.startswith(f"{MEDIA}.") and not (draft.sees or draft.tool.is_for_generators):
        return
    outcome = _outcome(draft, row, value)
    if isinstance(outcome, Told):
        return
    for key, each in outcome.items():
        if key not in draft.out or key == "model.freeze":
            draft.put(key, each)
            draft.comments.setdefault(key, f"default of {draft.tool.title.partition(' and ')[0]}")


# --- the whole --------------------------------------------------------------------------------------------------------


def _finish(draft: PeerSetup) -> None:
    """Leave out what has no effect because of something else."""
    out = draft.out
    if not out.get(f"{LORA}.enable"):
        _drop(draft, f"{LORA}.", "all weights are trained")
    if draft.method in ("dpo", "grpo"):
        _drop(draft, f"{LORA}.dropout", "post-training compares probabilities, which dropout would change")
    micro = int(out.get("training.micro_batch_size", 1))
    if f"{DIFFUSION}.prior_loss_weight" in out and (micro % 2 or draft.tool.name == "diffusers"):
        draft.put("training.micro_batch_size", 2 * micro, "as many pictures of the class as of the subject")
    if "training.evaluate.patience" in out:
        draft.put("training.evaluate.best_metric", "val_loss")
    if "simpo" not in out.get("posttrain.dpo.loss_type", ()):
        _drop(draft, "posttrain.dpo.simpo_gamma", "it belongs to the loss simpo")
    if draft.method in ("dpo", "grpo"):
        _drop(draft, f"{BASIC}.packing", "answers are compared, each in a row of its own")
        _drop(draft, "features.loss_cfg.", "post-training has its own loss")
    if not out.get("training.ema.enable"):
        _drop(draft, "training.ema.", "no average is kept")
    if draft.method != "dpo":
        _drop(draft, "posttrain.dpo.", "it belongs to preference pairs")
    if draft.method != "grpo":
        for section in ("grpo", "rollout", "rewards"):
            _drop(draft, f"posttrain.{section}", "it belongs to GRPO")
    if draft.method not in ("dpo", "grpo"):
        _drop(draft, "posttrain.reference.", "it belongs to post-training")
    if not validates(draft):
        for key in (
            "training.val_interval",
            "training.val_micro_batch_size",
            "training.evaluate.patience",
            f"{BASIC}.val_max_samples",
        ):
            _drop(draft, key, "no rows are held out")
    elif "training.val_interval" not in out:
        draft.put("training.val_interval", 500, "rows are held out: steps between validations")
    if not out.get("training.train_iters"):
        out.pop("training.train_iters", None)
    elif "training.train_epochs" in out:
        is_kohya = draft.tool.name in ("kohya", "musubi") and draft.has("max_train_epochs")
        out.pop("training.train_iters" if is_kohya else "training.train_epochs")
    if not out.get("training.sampling.prompts") and not out.get("training.sampling.prompts_file"):
        _drop(draft, "training.sampling.", "no prompts are given")
    if is_on(out.get(f"{BASIC}.packing", False)):
        _drop(draft, "data.dataloader_param.sampler_type", "packed rows are filled by length")
    if f"{BASIC}.dataset" not in out:
        draft.put(f"{BASIC}.dataset", "data", "name the rows: the setup does not")
    if MODEL not in out:
        draft.put(MODEL, "models/model", "name the model's folder: the setup does not")


def _drop(draft: PeerSetup, prefix: str, why: str) -> None:
    """Take keys out again; the settings that they came from have no effect."""
    gone = {key for key in draft.out if key.startswith(prefix)}
    for key in gone:
        del draft.out[key]
    draft.findings = [
        replace(each, kind="idle", ours=(), note=why)
        if each.kind == "translated" and each.ours and all(key.startswith(prefix) for key in each.ours)
        else each
        for each in draft.findings
    ]


def _is_default(key: str, value: Any) -> bool:
    """Whether our default says the same."""
    try:
        ours = value_at(_DEFAULTS, key)
    except LookupError:  # a card's key
        return value is False or value is None
    if isinstance(ours, tuple):
        ours = list(ours)
    if key == "posttrain.dpo.beta":
        ours = 0.1
    return bool(ours == value) and not isinstance(ours, bool) ^ isinstance(value, bool)


_DEFAULTS = Arguments()
_SECTIONS = ("model", "data", "parallel", "features", "training", "posttrain")


def _ordered(values: Mapping[str, Any]) -> dict[str, Any]:
    """Keys in the order of the sections and of the schema, with what a card declares behind them."""
    order = {key: number for number, key in enumerate(_schema_keys())}

    def rank(key: str) -> tuple[Any, ...]:
        section = key.partition(".")[0]
        return _SECTIONS.index(section), order.get(key.rpartition(".")[0], 0), order.get(key, len(order))

    return {key: values[key] for key in sorted(values, key=rank)}


def _schema_keys() -> Iterator[str]:
    from mindspeed_mm.fsdp.params.schema_walk import walk_fields

    for key, _ in walk_fields():
        yield key


def _once(findings: Sequence[SettingResult]) -> tuple[SettingResult, ...]:
    """A finding of each setting; entries of a list share theirs."""
    return tuple({(each.word, each.kind): each for each in findings}.values())


def warnings_of(imported: Imported) -> list[str]:
    """What our own check of the result says that is not about files: a table that is wrong would show here."""
    try:
        return list(load_config(imported.sections()).warnings)
    except ConfigError as error:
        return [str(problem) for problem in error.problems] or [str(error)]
    except MMError as error:
        return [str(error)]
