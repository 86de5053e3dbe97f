"""Rules that hold between keys."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from inspect import signature

from mindspeed_mm.core.config_path import value_at
from mindspeed_mm.core.errors import ConfigError, Problem
from mindspeed_mm.core.patterns import compile_pattern
from mindspeed_mm.fsdp.params.argument import (
    Arguments,
    DataArguments,
    FeatureArguments,
    ModelArguments,
    ParallelArguments,
    TrainingArguments,
)
from mindspeed_mm.fsdp.params.cards import dataset_cards, models_of_datasets
from mindspeed_mm.fsdp.params.rules.idle import idle_of_training
from mindspeed_mm.fsdp.params.rules.model import lora_problems, multi_token_problems, token_problems
from mindspeed_mm.fsdp.params.rules.plan import memory_problems, pipeline_problems, speed_problems
from mindspeed_mm.fsdp.params.rules.posttrain import posttrain_problems
from mindspeed_mm.fsdp.params.rules.training import evaluation_fits, loss_problems, optimizer_problems, tools_problems
from mindspeed_mm.fsdp.params.schema_walk import pattern_keys, walk_fields
from mindspeed_mm.fsdp.params.value_types import Section


def check_cross_section(arguments: Arguments) -> list[Problem]:
    """Every rule between keys that the configuration breaks. Pure: no file, no model, no device is asked."""
    values = {"arguments": arguments} | {name: arguments[name] for name in Arguments.model_fields}
    problems: list[Problem] = []
    for rule in _RULES:
        problems += rule(**{name: values[name] for name in _reads(rule)})
    return problems


@cache
def _reads(rule: Callable[..., Iterable[Problem]]) -> tuple[str, ...]:
    """Names of a rule's parameters: the sections that it reads, or `arguments` for all."""
    return tuple(signature(rule).parameters)


def _patterns_are_well_formed(arguments: Arguments) -> Iterator[Problem]:
    for key in pattern_keys():
        for pattern in value_at(arguments, key) or ():
            try:
                compile_pattern(pattern, key=key)
            except ConfigError as error:
                yield from error.problems


def _something_is_trained(model: ModelArguments, training: TrainingArguments) -> Iterator[Problem]:
    if "*" not in model.freeze:
        return
    if training.lora.enable:
        yield Problem(
            "'*' freezes everything, the adapters of training.lora.enable included",
            key="model.freeze",
            way_out="Remove it: training.lora already freezes everything but the adapters.",
        )
    else:
        yield Problem(
            "'*' freezes everything: nothing is left to train", key="model.freeze", way_out="Name parts of it."
        )


def _adapters_have_a_base(model: ModelArguments, training: TrainingArguments) -> Iterator[Problem]:
    """Checkpoints of adapters do not hold the base model: its weights must be somewhere else."""
    if training.lora.enable and model.train_from_scratch:
        yield Problem(
            "true, but training.lora.enable trains adapters of existing weights",
            key="model.train_from_scratch",
            way_out="Keep one of them.",
        )


def _learning_rates_are_in_order(training: TrainingArguments) -> Iterator[Problem]:
    for name, value in (("lr_min", training.lr_min), ("lr_start", training.lr_start)):
        if value > training.lr:
            yield Problem(f"{value} is above training.lr, {training.lr}", key=f"training.{name}", way_out="Lower it.")
    if training.lr_decay_style == "wsd" and training.lr_warmup_ratio + training.lr_decay_ratio > 1:
        yield Problem(
            f"{training.lr_decay_ratio} and lr_warmup_ratio, {training.lr_warmup_ratio}, add up to more than all steps",
            key="training.lr_decay_ratio",
            way_out="For wsd it is the share of the steps that decay, e.g. 0.1.",
        )


def _stable_part_is_left(training: TrainingArguments) -> Iterator[Problem]:
    if training.lr_decay_style == "wsd" and training.lr_decay_ratio >= 1.0 and not training.lr_warmup_ratio:
        yield Problem(
            "'wsd' decays over the last lr_decay_ratio of all steps: at 1.0 nothing stays stable",
            key="training.lr_decay_ratio",
            way_out="Set it to the share of steps that decay, e.g. 0.1.",
        )


def _documents_can_be_cut(data: DataArguments) -> Iterator[Problem]:
    for key, dataset in data.described.items():
        basic = dataset.basic_parameters
        if basic.truncation != "split":
            continue
        if basic.streaming:
            yield Problem(
                "documents are cut where their lengths are known, and streamed rows are not measured",
                key=f"{key}.basic_parameters.truncation",
                way_out="Set streaming: false; or truncation: shrink, which keeps the first cutoff_len tokens of each.",
            )
        elif basic.stage in ("rm", "prompt"):
            yield Problem(
                f"only documents are cut into pieces, and rows of stage {basic.stage} are conversations",
                key=f"{key}.basic_parameters.truncation",
                way_out="Leave truncation out, or set another value.",
            )


def _streams_are_not_counted(data: DataArguments, training: TrainingArguments) -> Iterator[Problem]:
    """Rows that are streamed have no number until all are read."""
    for key, dataset in data.described.items():
        basic = dataset.basic_parameters
        if basic.get("streaming") and not basic.preprocess_on_fly:
            yield Problem(
                "streamed rows are not known before they are read",
                key=f"{key}.basic_parameters.preprocess_on_fly",
                way_out="Leave it true, or set streaming: false.",
            )
    is_streamed = data.dataset_param.basic_parameters.get("streaming")
    if is_streamed and training.train_epochs is not None:
        yield Problem(
            "the number of streamed rows is not known until all are read, so epochs cannot be counted in steps",
            key="training.train_epochs",
            way_out="Set training.train_iters instead, or streaming: false.",
        )
    elif is_streamed and training.train_iters is None:
        yield Problem(
            "is not set, and the number of streamed rows is not known: say how long the run is",
            key="training.train_iters",
            way_out="Set it to a number of steps, or set streaming: false, which trains for one epoch.",
        )


def _scaling_plan_is_regex(training: TrainingArguments) -> Iterator[Problem]:
    for index, entry in enumerate(training.lr_scaling_plan):
        try:
            re.compile(entry.match)
        except re.error as error:
            key = f"training.lr_scaling_plan[{index}].match"
            yield Problem(f"'{entry.match}' is not a regular expression: {error}", key=key)


def _prior_is_paired_and_weighted(data: DataArguments, training: TrainingArguments) -> Iterator[Problem]:
    """Samples of the prior are a loss term of their own, which has to be weighted; each step takes as many of them as
    of the others."""
    basic = data.dataset_param.basic_parameters
    entries = basic.get("dataset") or ()
    if not any(isinstance(entry, Section) and entry.get("prior") for entry in entries):
        return
    if basic.get("mix") is not None:
        yield Problem(
            "sets shares, but a dataset has prior: true, of which each step takes as many samples as of the others",
            key="data.dataset_param.basic_parameters.mix",
            way_out="Leave it out.",
        )
    samples = training.micro_batch_size
    if samples % 2 and data.dataloader_param.max_tokens_per_batch is None:
        yield Problem(
            f"{samples} is odd, but a micro-batch has as many samples of the subject as of its prior",
            key="training.micro_batch_size",
            way_out=f"Set {samples + 1}.",
        )
    if training.diffusion.prior_loss_weight is None:
        yield Problem(
            "null, but an entry of dataset is to preserve the prior",
            key="training.diffusion.prior_loss_weight",
            way_out="Set it, e.g. to 1.0.",
        )


def _weights_have_one_source(model: ModelArguments, training: TrainingArguments) -> Iterator[Problem]:
    if model.train_from_scratch and training.load and training.load_format == "hf":
        yield Problem(
            "true, but training.load names weights to start from",
            key="model.train_from_scratch",
            way_out="Keep one of them.",
        )


def _pixel_limits_are_in_order(data: DataArguments) -> Iterator[Problem]:
    for key, dataset in data.described.items():
        for media in ("image", "video"):
            least = dataset.preprocess_parameters[f"{media}_min_pixels"]
            most = dataset.preprocess_parameters[f"{media}_max_pixels"]
            if least is not None and most is not None and least > most:
                key_of_least = f"{key}.preprocess_parameters.{media}_min_pixels"
                yield Problem(f"{least} is above {media}_max_pixels, {most}", key=key_of_least, way_out="Lower it.")


def _prompts_and_history_do_not_contradict(data: DataArguments) -> Iterator[Problem]:
    for key, dataset in data.described.items():
        if dataset.basic_parameters.train_on_prompt and dataset.basic_parameters.mask_history:
            yield Problem(
                "true, but mask_history trains on the last answer only",
                key=f"{key}.basic_parameters.train_on_prompt",
                way_out="Keep one of them.",
            )


def _validation_has_one_source(data: DataArguments, training: TrainingArguments) -> Iterator[Problem]:
    basic = data.dataset_param.basic_parameters
    has_room = basic.val_max_samples != 0
    given = []
    if data.val_dataset_param is not None:
        given.append("data.val_dataset_param")
    if has_room and (basic.val_dataset or basic.get("val_features_dir")):
        given.append("data.dataset_param.basic_parameters.val_dataset")
    if has_room and basic.val_rate:
        given.append("data.dataset_param.basic_parameters.val_rate")
    if len(given) > 1:
        yield Problem(f"is given together with {given[1]}", key=given[0], way_out="Keep one source of validation rows.")
    is_plugin = data.dataset_param.dataset_type not in dataset_cards()
    if training.val_interval and not given and not is_plugin:
        way_out = "Raise data.dataset_param.basic_parameters.val_max_samples, which is 0."
        if has_room:
            way_out = "Give data.dataset_param.basic_parameters.val_dataset or val_rate."
        yield Problem(
            f"{training.val_interval}, but there are no rows for validation",
            key="training.val_interval",
            way_out=way_out,
        )


def _rows_fit_the_model(model: ModelArguments, data: DataArguments) -> Iterator[Problem]:
    kind = data.dataset_param.dataset_type
    model_id = models_of_datasets().get(kind)
    if model_id is not None and model.model_id != model_id:
        yield Problem(
            f"'{kind}' makes samples which model.model_id: {model_id} alone is trained on, and it is "
            f"{model.model_id or 'not set'}",
            key="data.dataset_param.dataset_type",
            way_out=f"Set model.model_id: {model_id}, or dataset_type: huggingface.",
        )


def _prefetch_has_workers(data: DataArguments) -> Iterator[Problem]:
    loader = data.dataloader_param
    if loader.prefetch_factor is not None and loader.num_workers == 0:
        key = "data.dataloader_param.prefetch_factor"
        yield Problem(f"{loader.prefetch_factor}, but num_workers is 0", key=key, way_out="Leave one of them out.")


def _recompute_is_given_once(parallel: ParallelArguments, features: FeatureArguments) -> Iterator[Problem]:
    """The loader moves both keys to `features`; a tree made in code may still hold two answers."""
    for name in ("recompute", "recompute_plan"):
        value, other = parallel[name], features[name]
        if value is not None and value != other:
            yield Problem(f"differs from features.{name}", key=f"parallel.{name}", way_out="Keep one of them.")


@cache
def _switched_sections() -> tuple[str, ...]:
    """Sections of `training` that have an `enable`."""
    keys = (key for key, _ in walk_fields() if key.startswith("training."))
    return tuple(key.removesuffix(".enable") for key in keys if key.endswith(".enable"))


def _switches_are_given(arguments: Arguments) -> Iterator[Problem]:
    """A forgotten `enable` would train something else: the whole model instead of adapters, no average.

    Sections of `tools` change nothing that is learned, and MindSpeed-MM's own files give their keys without it.
    """
    for path in _switched_sections():
        section, switch = value_at(arguments, path), f"{path}.enable"
        given = [key for key in section if key in section.model_fields_set] if isinstance(section, Section) else []
        if given and "enable" not in given:
            yield Problem(
                f"is given, but {switch} is not, and nothing in {path} has an effect without it",
                key=f"{path}.{given[0]}",
                way_out=f"Set {switch}: true; or false, to keep the keys without their effect.",
            )


_RULES: tuple[Callable[..., Iterable[Problem]], ...] = (
    _patterns_are_well_formed,
    _something_is_trained,
    _adapters_have_a_base,
    _learning_rates_are_in_order,
    _stable_part_is_left,
    idle_of_training,
    _documents_can_be_cut,
    _streams_are_not_counted,
    _scaling_plan_is_regex,
    _prior_is_paired_and_weighted,
    _weights_have_one_source,
    _pixel_limits_are_in_order,
    _prompts_and_history_do_not_contradict,
    _validation_has_one_source,
    evaluation_fits,
    _rows_fit_the_model,
    _prefetch_has_workers,
    tools_problems,
    _recompute_is_given_once,
    _switches_are_given,
    speed_problems,
    pipeline_problems,
    lora_problems,
    loss_problems,
    optimizer_problems,
    memory_problems,
    multi_token_problems,
    posttrain_problems,
    token_problems,
)
