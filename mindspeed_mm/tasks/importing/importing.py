"""`mm config --from`: recognises a setup of another trainer and translates it.

The order: read the file or command (`given`), find the tool (`recognise`), settle the method, translate each setting by
the tool's table, add the tool's defaults where they change the training, and leave out what our defaults say already.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mindspeed_mm.core.config_path import value_at
from mindspeed_mm.core.errors import ConfigError, MMError
from mindspeed_mm.core.json_file import JsonMapping, JsonObject
from mindspeed_mm.core.redaction import is_secret_name, remember_secrets
from mindspeed_mm.core.suggest import did_you_mean
from mindspeed_mm.fsdp.params.argument import Arguments
from mindspeed_mm.fsdp.params.cards import dataset_cards
from mindspeed_mm.fsdp.params.loader import load_config
from mindspeed_mm.fsdp.params.other_tools import TOOLS, Kind, PeerRow, rows_of, words_of
from mindspeed_mm.fsdp.params.rules.idle import unread_of_training

# a module registers its conversions when it is imported
from mindspeed_mm.tasks.importing import axolotl_rows, generator_adapters, generators, language, preferences, rows  # noqa: F401
from mindspeed_mm.tasks.importing.common_values import fixed, mapped, plain_value
from mindspeed_mm.tasks.importing.dataset_file import plain_key, with_dataset_file
from mindspeed_mm.tasks.importing.draft import (
    BASIC,
    CONVERSIONS,
    DEFAULTS,
    DIFFUSION,
    LORA,
    MEDIA,
    MODEL,
    Outcome,
    PeerSetup,
    SettingResult,
    Told,
    is_on,
    no,
)
from mindspeed_mm.tasks.importing.given import Given, Setting, read_given, shell_value, value_of
from mindspeed_mm.tasks.importing.methods import method_of
from mindspeed_mm.tasks.importing.recognise import recognise
from mindspeed_mm.tasks.importing.run_values import validates

_SWIFT_ENVIRONMENT = (
    "MAX_PIXELS", "MIN_PIXELS", "VIDEO_MAX_PIXELS", "VIDEO_MIN_PIXELS", "FPS", "FPS_MAX_FRAMES", "FPS_MIN_FRAMES",
    "IMAGE_MAX_TOKEN_NUM", "IMAGE_MIN_TOKEN_NUM", "VIDEO_MAX_TOKEN_NUM", "VIDEO_MIN_TOKEN_NUM",
)  # fmt: skip
_WINDOWS = re.compile(r"[A-Za-z]:[\\/]|\\\\")
_NO_PATH = re.compile(r"prompt|template|system|caption|token|regex|target|modules|pattern", re.IGNORECASE)


@dataclass(frozen=True)
class Imported:
    """A setup in our words."""

    tool: str
    source: str
    values: JsonMapping
    """Dotted key → value, without what our defaults say."""
    comments: Mapping[str, str]
    findings: tuple[SettingResult, ...]
    downloads: tuple[str, ...]

    def counted(self) -> dict[Kind, int]:
        """How many settings were translated, have no effect, are not supported."""
        kinds: tuple[Kind, ...] = ("translated", "idle", "unsupported")
        return {kind: sum(each.kind == kind for each in self.findings) for kind in kinds}

    def sections(self) -> JsonObject:
        """The configuration as nested sections."""
        root: JsonObject = {}
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
    remember_secrets({each.key.rpartition(".")[2]: each.value for each in given.settings if _is_secret(each)})
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
    with_dataset_file(draft)
    # before any setting: many conversions ask for the method
    draft.method = method_of(draft)
    _settle_kind(draft)
    for setting in draft.given.settings:
        _translate(draft, setting)
    _add_defaults(draft)
    # last: it drops what has no effect beside something that another setting wrote
    _finish(draft)
    values = {key: value for key, value in draft.out.items() if key in draft.noted or not _is_default(key, value)}
    # Entries of a list share the finding of their setting.
    return Imported(
        tool.title,
        given.source,
        _ordered(values),
        draft.comments,
        tuple({(each.word, each.kind): each for each in draft.findings}.values()),
        tuple(draft.downloads),
    )


# --- settings ---------------------------------------------------------------------------------------------------------


def _with_plain_keys(given: Given, tool: str) -> Given:
    """Settings under the names of the table: without the section of a job, of a TOML, or of a variable."""
    settings = given.settings
    if tool == "ai-toolkit":
        settings = [replace(each, key=each.key.removeprefix("config.process[].")) for each in settings]
    elif tool in ("kohya", "musubi"):
        settings = [replace(each, key=plain_key(tool, each.key)) for each in settings]
    elif tool == "ms-swift":
        # ms-swift reads sizes of pictures from the environment, which a file holds in its section ENV
        of_file = {each.key.removeprefix("ENV."): str(each.value) for each in settings if each.key.startswith("ENV.")}
        environment = {**of_file, **given.environment}
        settings = [each for each in settings if not each.key.startswith("ENV.")]
        given_already = {each.key for each in settings}
        settings += [
            Setting(name.lower(), value_of(environment[name]), f"variable {name}")
            for name in _SWIFT_ENVIRONMENT
            if name in environment and name.lower() not in given_already
        ]
    return replace(given, settings=list(settings))


def _settle_kind(draft: PeerSetup) -> None:
    """What follows from the tool and the method, before any setting."""
    if draft.tool.is_for_generators:
        draft.put("data.dataset_param.dataset_type", "generation")
        is_lora = draft.tool.name == "diffusers" and generator_adapters.is_adapter_script(draft)
        if is_lora:
            draft.put(f"{LORA}.enable", True)
        return
    keys = language.method_keys(draft)
    assert not isinstance(keys, Told)
    for key, value in keys.items():
        draft.put(key, value)
    if draft.method == "pretrain" and draft.tool.name == "llamafactory" and not draft.has("packing"):
        draft.put(f"{BASIC}.packing", True, "default of LLaMA-Factory for stage: pt")


_LATE = (
    ":towers", ":media_dir", ":trl_answers", ":steps_per_generation", ":warmup", ":interval", ":eval_steps",
    ":eval_strategy", ":save_strategy", ":per_epoch_save", ":per_epoch_eval", ":every_n_epochs", ":validation_epochs",
    ":val_size", ":prior_weight", ":scheduler_kwargs", ":min_lr_ratio", ":ko_timesteps", ":clips_root",
)  # fmt: skip
"""Conversions that ask what others have written: rows, batch, length, adapters."""


def _is_secret(setting: Setting) -> bool:
    """Whether a setting holds a secret by its name, and no tool has a setting of this name that says something else."""
    word = setting.key.rpartition(".")[2].removesuffix("[]")
    if isinstance(setting.value, bool) or not is_secret_name(word):
        return False
    return not any(word in words_of(tool) and words_of(tool)[word].kind == "translated" for tool in TOOLS)


def _translate(draft: PeerSetup, setting: Setting) -> None:
    """Say what becomes of a setting; those that ask others wait."""
    row = draft.row(setting.key)
    told: Outcome
    if setting.value is None:
        return
    if _is_secret(setting):
        told = Told("idle", "a secret is not copied; set it as an environment variable")
    elif row is None:
        near = did_you_mean(setting.key, words_of(draft.tool.name)).strip()
        told = no(f"it is no setting of {draft.tool.title} that is known. {near}".rstrip(". "))
    elif row.how in _LATE and shell_value(setting.value) is None:
        return
    else:
        told = _outcome_of_given(draft, row, setting)
    _note_setting(draft, setting, row, told)


def _outcome_of_given(draft: PeerSetup, row: PeerRow, setting: Setting) -> Outcome:
    if (name := shell_value(setting.value)) is not None:
        return no(f"write it yourself, for only a shell knows the value of {name}")
    return _outcome(draft, row, setting.value)


def _outcome(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    if row.how == "idle":
        return Told("idle", row.note)
    if row.how == "with":
        return {}
    if row.how == "no":
        is_off = value is False or value in (0, 0.0, "") or str(value).lower() in ("false", "none", "no")
        if is_off:
            return Told("idle", "it is off")
        return Told("unsupported", row.note)
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


def _note_setting(draft: PeerSetup, setting: Setting, row: PeerRow | None, outcome: Outcome) -> None:
    """Note what became of a setting, and write what it says."""
    if isinstance(outcome, Told):
        draft.findings.append(SettingResult(setting.key, setting.where, outcome.kind, note=outcome.note))
        return
    for key, value in outcome.items():
        if isinstance(value, str) and _WINDOWS.match(value) and not _NO_PATH.search(key):
            draft.note(key, "a path of Windows: write it as this machine has it")
        if ".toml:" in setting.where and draft.out.get(key, value) != value and isinstance(value, int | float | str):
            draft.note(key, f"{draft.out[key]} and {value} there, by data set: one for all here")
        draft.put(key, value)
    note, ours = "", tuple(outcome)
    if row is not None:
        note = row.note
        if row.ours:
            ours = ours or (row.ours,)
    draft.findings.append(SettingResult(setting.key, setting.where, "translated", ours, note))
    for key, value in outcome.items():
        comment = setting.key
        if key.endswith(f".{setting.key}") or value == setting.key:
            comment = ""  # the line says it already
        draft.comments.setdefault(key, comment)


def _add_defaults(draft: PeerSetup) -> None:
    """Settings that wait for others, and defaults of the tool, in the table's order."""
    for is_late in (False, True):
        for row in rows_of(draft.tool.name):
            if (row.how in _LATE) != is_late:
                continue
            given = [each for each in draft.given.settings if each.key in row.words and each.value is not None]
            if is_late and given:
                for each in given:
                    _note_setting(draft, each, row, _outcome_of_given(draft, row, each))
            elif not given and draft.default_of(row):
                _add_default(draft, row)


def _add_default(draft: PeerSetup, row: PeerRow) -> None:
    text = draft.default_of(row)
    if text.startswith("@"):
        value = DEFAULTS[text[1:]](draft)
    else:
        value = value_of(text)
    # `towers` adds what is frozen to patterns that another setting has written
    if value is None or (row.ours in draft.out and row.how not in (":towers",)):
        return
    if row.ours is not None and row.ours.startswith(f"{MEDIA}.") and not (draft.sees or draft.tool.is_for_generators):
        return
    outcome = _outcome(draft, row, value)
    if isinstance(outcome, Told):
        if outcome.kind == "unsupported":
            where = f"default of {draft.tool.title.partition(' and ')[0]}"
            draft.findings.append(SettingResult(row.words[0], where, "unsupported", note=outcome.note))
        return
    for key, each in outcome.items():
        if key not in draft.out or row.how == ":towers":
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
        # diffusers' --train_batch_size counts pictures of the subject only; a batch here holds both
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
    rows.name_apart(draft)
    if draft.method == "grpo":
        preferences.fit_groups(draft)
    rows.settle_long_documents(draft)
    preferences.note_orpo(draft)
    if out.get(f"{LORA}.enable"):
        _drop(draft, "model.mtp_", "heads of further tokens are trained whole, not beside adapters")
        if out.get("training.optimizer") == "muon" and not out.get(f"{LORA}.modules_to_save"):
            _drop(draft, "training.optimizer", "AdamW trains the factors of adapters", exact=True)
    if out.get("training.lr_warmup_ratio"):
        draft.put("training.lr_warmup_from_start", True, "their first step has the rate 0")
    for key, why in unread_of_training(out.get):
        _drop(draft, key, why, exact=True)
    _settle_rate(draft)
    _settle_validation(draft)
    _settle_length(draft)
    if not out.get("training.sampling.prompts") and not out.get("training.sampling.prompts_file"):
        _drop(draft, "training.sampling.", "no prompts are given")
    if is_on(out.get(f"{BASIC}.packing", False)):
        _drop(draft, "data.dataloader_param.sampler_type", "packed rows are filled by length")
    if f"{BASIC}.dataset" not in out:
        draft.put(f"{BASIC}.dataset", "data", "name the rows: the setup does not")
    if MODEL not in out:
        draft.put(MODEL, "models/model", "name the model's folder: the setup does not")


def _settle_validation(draft: PeerSetup) -> None:
    """An interval of validation where rows are held out, and nothing about it where none are."""
    if not validates(draft):
        for key in (
            "training.val_interval",
            "training.val_micro_batch_size",
            "training.evaluate.patience",
            f"{BASIC}.val_max_samples",
        ):
            _drop(draft, key, "no rows are held out")
    elif "training.val_interval" not in draft.out:
        draft.put("training.val_interval", 500, "rows are held out: steps between validations")


def _settle_length(draft: PeerSetup) -> None:
    """Steps or epochs, not both."""
    out = draft.out
    if not out.get("training.train_iters"):
        out.pop("training.train_iters", None)
    elif "training.train_epochs" in out:
        # kohya's and musubi-tuner's epochs win over steps; elsewhere it is the other way round
        if draft.tool.name in ("kohya", "musubi") and draft.has("max_train_epochs"):
            out.pop("training.train_iters")
        else:
            out.pop("training.train_epochs")


def _settle_rate(draft: PeerSetup) -> None:
    """A rate for AdamW where the setup has an optimizer that works its rate out and takes 1."""
    given = " ".join(str(draft.get(word, "")) for word in ("optimizer_type", "optimizer", "optim", "train.optimizer"))
    if found := re.search(r"prodigy|d_?adapt", given, re.IGNORECASE):
        theirs = f"{draft.out.get('training.lr')} there, for {found.group()}, which works its rate out"
        rate = 1e-5
        if draft.out.get(f"{LORA}.enable"):
            rate = 1e-4
        draft.put("training.lr", rate, theirs)


def _drop(draft: PeerSetup, prefix: str, why: str, *, exact: bool = False) -> None:
    """Take keys out again; the settings that they came from have no effect. With `exact`, the prefix is the key."""

    def is_meant(key: str) -> bool:
        if exact:
            return key == prefix
        return key.startswith(prefix)

    for key in [key for key in draft.out if is_meant(key)]:
        del draft.out[key]
    for number, each in enumerate(draft.findings):
        if each.kind == "translated" and each.ours and all(map(is_meant, each.ours)):
            draft.findings[number] = replace(each, kind="idle", ours=(), note=why)


def _is_default(key: str, value: object) -> bool:
    """Whether our default says the same."""
    try:
        ours = value_at(_DEFAULTS, key)
    except LookupError:
        ours = _OF_CARDS.get(key)
        if key not in _OF_CARDS and value is False:
            ours = False
    if isinstance(ours, tuple):
        ours = list(ours)
    if key == "posttrain.dpo.beta":
        ours = 0.1  # null there: the default depends on the loss
    # in Python True == 1, in a YAML they are two values
    return bool(ours == value) and not isinstance(ours, bool) ^ isinstance(value, bool)


_DEFAULTS = Arguments()
_OF_CARDS = {f"data.dataset_param.{key}": value for key, value in dataset_cards()["generation"].items()}
_SECTIONS = ("model", "data", "parallel", "features", "training", "posttrain")


def _ordered(values: Mapping[str, object]) -> JsonObject:
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


def warnings_of(imported: Imported) -> list[str]:
    """What our own check of the result says that is not about files: a table that is wrong would show here."""
    try:
        return list(load_config(imported.sections()).warnings)
    except ConfigError as error:
        return [str(problem) for problem in error.problems] or [str(error)]
    except MMError as error:
        return [str(error)]
