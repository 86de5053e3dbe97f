"""Rules between the keys of `posttrain` and of what it goes together with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Literal

from mindspeed_mm.core.errors import Problem
from mindspeed_mm.fsdp.params.argument import (
    Arguments,
    DataArguments,
    FeatureArguments,
    ModelArguments,
    TrainingArguments,
)
from mindspeed_mm.fsdp.params.data_args import DatasetParam
from mindspeed_mm.fsdp.params.posttrain_args import (
    PAIR_LOSSES,
    DpoArguments,
    PosttrainArguments,
    RolloutArguments,
)
from mindspeed_mm.fsdp.params.rules.distillation import (
    distillation_problems,
    has_held_out,
    reads_trajectories,
)
from mindspeed_mm.fsdp.params.rules.idle import idle_settings

_KEY = "posttrain"
_OF_GENERATORS = "generation"
"""Type of a data set of generators."""
_PROMPTS_OF_GENERATORS = "generation_prompts"
_ANSWERS_ALONE = ("label_smoothing", "ld_alpha", "pref_ftx_by")
_MEDIA_ALONE = ("timestep_weight", "weight_alpha", "weight_beta", "histogram_path")
"""Keys of `posttrain.dpo` that act on pairs of answers, and those that act on pairs of media."""
_MOVES_BASE = ("pissa", "olora", "corda", "loftq")
"""Initialisations after which the base model alone is not what training started from."""

ReferenceKind = Literal["adapters_off", "frozen", "stored"]


def posttrain_problems(arguments: Arguments) -> Iterator[Problem]:
    """What a post-training method cannot do as the configuration stands."""
    posttrain = arguments.posttrain
    yield from _rows_fit_the_method(arguments.data, arguments.posttrain)
    if posttrain.method is None:
        return
    yield from _of_the_model(arguments.model, arguments.training, arguments.features, arguments.posttrain)
    yield from _rows_hold_one_answer(arguments.data, arguments.posttrain)
    if needs_reference(posttrain):
        yield from _of_the_reference(arguments)
    if posttrain.method == "dpo":
        yield from _of_pairs_of_media(arguments)
        yield from _of_pairs(posttrain.dpo)
    elif posttrain.method == "dmd":
        yield from distillation_problems(arguments)
    else:
        yield from _of_samples(arguments)


def _rows_fit_the_method(data: DataArguments, posttrain: PosttrainArguments) -> Iterator[Problem]:
    """Preference pairs come with the method that compares them, and that method with such rows."""
    compares = posttrain.method == "dpo"
    for name, dataset in _row_sections(data):
        stage = dataset.basic_parameters.stage
        if not _gives_rows(dataset):
            continue
        key = f"data.{name}.basic_parameters.stage"
        if stage == "rm" and not compares:
            yield Problem(
                "'rm' reads preference pairs, and posttrain.method is "
                f"{posttrain.method or 'null'}, which does not compare them",
                key=key,
                way_out="Set posttrain.method: dpo, or stage: sft.",
            )
        if stage != "rm" and compares:
            way_out = "Set stage: rm, for rows with a chosen and a rejected answer."
            if dataset.dataset_type == _OF_GENERATORS:
                way_out = "Set stage: rm, for rows with file and file_rejected."
            yield Problem(
                f"'{stage}' reads rows with one answer, and posttrain.method: dpo compares two",
                key=key,
                way_out=way_out,
            )


def _row_sections(data: DataArguments) -> Iterator[tuple[str, DatasetParam]]:
    """The sections of `data` that name rows."""
    yield "dataset_param", data.dataset_param
    if data.val_dataset_param is not None:
        yield "val_dataset_param", data.val_dataset_param


def _gives_rows(dataset: DatasetParam) -> bool:
    """Whether the section names rows of conversations, or of media."""
    basic = dataset.basic_parameters
    if dataset.dataset_type == _OF_GENERATORS:
        return bool(basic.dataset or basic.get("features_dir"))
    return bool(basic.dataset) and dataset.dataset_type == "huggingface"


def draws_samples(posttrain: PosttrainArguments) -> bool:
    """Whether the model is trained on what it samples itself."""
    return posttrain.method in ("grpo", "nft")


def needs_reference(posttrain: PosttrainArguments) -> bool:
    """Whether the method compares the policy with a reference."""
    if posttrain.method == "dpo":
        return any(PAIR_LOSSES[name].has_reference for name in posttrain.dpo.loss_type)
    if posttrain.method == "grpo":
        return bool(posttrain.grpo.beta)
    return posttrain.method == "dmd" or (posttrain.method == "nft" and bool(posttrain.nft.kl))


def has_moving_reference(posttrain: PosttrainArguments) -> bool:
    """Whether the reference is a copy of what is trained that follows it."""
    return needs_reference(posttrain) and posttrain.reference.sync_steps > 0


def keeps_a_copy(training: TrainingArguments, posttrain: PosttrainArguments) -> bool:
    """Whether a second copy of what is trained follows it: an average, the policy that draws, or the reference."""
    return training.ema.enable or draws_by_older(posttrain) or has_moving_reference(posttrain)


def draws_by_older(posttrain: PosttrainArguments) -> bool:
    """Whether an older policy than the one that is trained draws the samples."""
    return posttrain.method == "nft" and posttrain.nft.old_decay != 0


def reference_kind(arguments: Arguments) -> ReferenceKind | None:
    """What `posttrain.reference.kind` comes to; None where no reference is needed."""
    reference = arguments.posttrain.reference
    if not needs_reference(arguments.posttrain):
        return None
    if reference.kind != "auto":
        return reference.kind
    if arguments.parallel.pipeline_parallel_size > 1 or reads_trajectories(arguments.posttrain):
        return "stored"
    if reference.model_name_or_path is not None or reference.sync_steps:
        return "frozen"
    return "adapters_off" if _base_is_no_reference(arguments.model, arguments.training) is None else "frozen"


def _base_is_no_reference(model: ModelArguments, training: TrainingArguments) -> str | None:
    """Why the model without its adapters is not what training starts from; None where it is."""
    lora = training.lora
    if not lora.enable:
        return "training.lora.enable is false: there are no adapters to switch off"
    if isinstance(start := lora.init_lora_weights, str) and start.startswith(_MOVES_BASE):
        return f"training.lora.init_lora_weights: {start} moves the base model"
    if lora.modules_to_save:
        return "training.lora.modules_to_save trains whole modules, which cannot be switched off"
    if model.add_tokens or model.add_special_tokens:
        return "the rows of tokens that model.add_tokens adds are trained, too, and cannot be switched off"
    if lora.pretrained_lora_path:
        return "training.lora.pretrained_lora_path starts from adapters, which would be switched off too"
    return None


def _of_the_model(
    model: ModelArguments, training: TrainingArguments, features: FeatureArguments, posttrain: PosttrainArguments
) -> Iterator[Problem]:
    method, loss = posttrain.method, features.loss_cfg
    if dropout := training.lora.enable and training.lora.dropout:
        yield Problem(
            f"{dropout}, but posttrain.method: {method} compares probabilities, which dropout would change at random",
            key="training.lora.dropout",
            way_out="Set it to 0.",
        )
    for name in ("z_loss_coef", "router_aux_loss_coef"):
        if value := getattr(loss, name):
            yield _not_with_method(f"features.loss_cfg.{name}", f"{value:g}", method)
    if loss.loss_type not in (None, "default", "per_token_loss"):
        yield _not_with_method("features.loss_cfg.loss_type", f"'{loss.loss_type}'", method)
    if depths := model.mtp_num_layers:
        yield _not_with_method("model.mtp_num_layers", str(depths), method)


def _rows_hold_one_answer(data: DataArguments, posttrain: PosttrainArguments) -> Iterator[Problem]:
    for name, dataset in _row_sections(data):
        basic = dataset.basic_parameters
        if basic.packs:
            key = "packing" if basic.packing else "neat_packing"
            yield Problem(
                f"true, but posttrain.method: {posttrain.method} compares answers, each in a row of its own",
                key=f"data.{name}.basic_parameters.{key}",
                way_out="Leave it out.",
            )


def _not_with_method(key: str, value: str, method: str | None) -> Problem:
    return Problem(
        f"{value} is for supervised training, and posttrain.method: {method} has its own loss",
        key=key,
        way_out="Leave it out.",
    )


def _of_the_reference(arguments: Arguments) -> Iterator[Problem]:
    training, posttrain = arguments.training, arguments.posttrain
    reference, kind = posttrain.reference, reference_kind(arguments)
    key, stages = f"{_KEY}.reference.kind", arguments.parallel.pipeline_parallel_size
    if kind != "stored" and stages > 1:
        yield Problem(
            f"'{kind}', but parallel.pipeline_parallel_size is {stages}: a pipeline has one model and no second pass",
            key=key,
            way_out="Set it to stored and run mm posttrain reference first.",
        )
    if kind == "adapters_off" and (reason := _base_is_no_reference(arguments.model, training)) is not None:
        yield Problem(f"'adapters_off', but {reason}", key=key, way_out="Set it to frozen, or to stored.")
    on_trajectories = reads_trajectories(posttrain)
    if kind == "stored" and posttrain.method != "dpo" and not on_trajectories:
        yield Problem(
            "'stored' is for preference pairs, and for the trajectories of posttrain.dmd.objective: ode_regression: "
            "samples that are drawn while training cannot be scored before",
            key=key,
            way_out="Set it to auto.",
        )
    if kind != "stored" and on_trajectories:
        yield Problem(
            f"'{kind}', but posttrain.dmd.objective: ode_regression reads what mm posttrain reference stored",
            key=key,
            way_out="Set it to auto.",
        )
    if reference.sync_steps:
        yield from _of_a_moving_reference(training, posttrain)
    frozen_only = {"sync_steps": reference.sync_steps, "model_name_or_path": reference.model_name_or_path}
    for name, value in frozen_only.items():
        if value and kind != "frozen" and not on_trajectories:
            yield Problem(
                f"{value}, but the reference is not a separate model: posttrain.reference.kind is {kind}",
                key=f"{_KEY}.reference.{name}",
                way_out="Set posttrain.reference.kind: frozen, or leave it out.",
            )
    if reference.path and kind != "stored":
        yield Problem(
            f"is given, but posttrain.reference.kind is {kind}",
            key=f"{_KEY}.reference.path",
            way_out="Set posttrain.reference.kind: stored, or leave it out.",
        )


def _of_a_moving_reference(training: TrainingArguments, posttrain: PosttrainArguments) -> Iterator[Problem]:
    reference = posttrain.reference
    key = f"{_KEY}.reference.sync_steps"
    if reference.model_name_or_path:
        yield Problem(
            f"{reference.sync_steps}, but a reference that follows the policy starts as it: "
            f"posttrain.reference.model_name_or_path is {reference.model_name_or_path}",
            key=key,
            way_out="Leave one of them out.",
        )
    other = ""
    if draws_by_older(posttrain):
        other = "posttrain.nft.old_decay keeps an older policy"
    elif training.ema.enable:
        other = "training.ema.enable is true"
    if other:
        yield Problem(
            f"{reference.sync_steps}, but {other}, and a run has room for one copy of its weights",
            key=key,
            way_out="Leave one of them out.",
        )


def _of_pairs(dpo: DpoArguments) -> Iterator[Problem]:
    if dpo.loss_weights is not None and len(dpo.loss_weights) != len(dpo.loss_type):
        yield Problem(
            f"has {len(dpo.loss_weights)} weights for {len(dpo.loss_type)} losses",
            key=f"{_KEY}.dpo.loss_weights",
            way_out="Give one for each loss in posttrain.dpo.loss_type.",
        )
    if dpo.loss_weights is not None and not any(dpo.loss_weights) and not dpo.pref_ftx:
        yield Problem(
            "are all 0: nothing is learnt", key=f"{_KEY}.dpo.loss_weights", way_out="Set one above 0, or leave it out."
        )
    if dpo.pref_ftx_by == "pair" and not dpo.pref_ftx:
        yield Problem(
            "has no effect: posttrain.dpo.pref_ftx is 0", key=f"{_KEY}.dpo.pref_ftx_by", way_out="Leave it out."
        )
    if "exo_pair" in dpo.loss_type and not dpo.label_smoothing:
        yield Problem(
            "0, but exo_pair takes the logarithm of it",
            key=f"{_KEY}.dpo.label_smoothing",
            way_out="Set it above 0, e.g. 0.001.",
        )
    reads = {loss: facts.reads for loss, facts in PAIR_LOSSES.items()}
    yield from idle_settings(dpo, f"{_KEY}.dpo", "loss_type", reads, dpo.loss_type)


def _of_pairs_of_media(arguments: Arguments) -> Iterator[Problem]:
    """Generators have one loss, and settings of their own."""
    dpo = arguments.posttrain.dpo
    if arguments.data.dataset_param.dataset_type != _OF_GENERATORS:
        yield from _without_effect(dpo, _MEDIA_ALONE, "answers")
        return
    yield from _without_effect(dpo, _ANSWERS_ALONE, "generators")
    if dpo.loss_type != ("sigmoid",):
        yield Problem(
            f"'{', '.join(dpo.loss_type)}' compares probabilities, which generators do not give",
            key=f"{_KEY}.dpo.loss_type",
            way_out="Set it to sigmoid.",
        )
    if reference_kind(arguments) == "stored":
        yield Problem(
            "'stored', but errors of generators are of other noise in each epoch",
            key=f"{_KEY}.reference.kind",
            way_out="Set it to auto.",
        )
    if bool(dpo.weight_alpha) != (dpo.histogram_path is not None):
        what = "is given, but posttrain.dpo.weight_alpha is 0"
        if dpo.weight_alpha:
            what = "is not given, but posttrain.dpo.weight_alpha weighs pairs by it"
        yield Problem(what, key=f"{_KEY}.dpo.histogram_path", way_out="Give both, or neither.")
    if (weight := arguments.training.diffusion.prior_loss_weight) is not None:
        yield _not_with_method("training.diffusion.prior_loss_weight", f"{weight:g}", "dpo")


def _without_effect(dpo: DpoArguments, names: Sequence[str], judged: str) -> Iterator[Problem]:
    """Of keys that act on the other kind of pairs alone, those that are set."""
    defaults = DpoArguments()
    for name in names:
        value = getattr(dpo, name)
        if value != getattr(defaults, name):
            yield Problem(f"{value} has no effect on {judged}", key=f"{_KEY}.dpo.{name}", way_out="Leave it out.")


def _of_samples(arguments: Arguments) -> Iterator[Problem]:
    posttrain, training = arguments.posttrain, arguments.training
    group = posttrain.grpo.num_generations
    if group < 2:
        yield Problem(
            f"{group}, but the samples of a prompt are compared with each other",
            key=f"{_KEY}.grpo.num_generations",
            way_out="Set it to 2 or more.",
        )
    if training.micro_batch_size * training.gradient_accumulation_steps % group:
        yield group_problem(arguments.training, arguments.posttrain)
    if arguments.parallel.pipeline_parallel_size > 1 and posttrain.rollout.backend == "transformers":
        yield Problem(
            "transformers samples with the model that is trained, and its layers are on several ranks: "
            f"parallel.pipeline_parallel_size is {arguments.parallel.pipeline_parallel_size}",
            key=f"{_KEY}.rollout.backend",
            way_out="Spread the model by fully_shard_parallel_size or tensor_parallel_size.",
        )
    if draws_by_older(posttrain) and training.ema.enable:
        yield Problem(
            "true, but posttrain.method: nft keeps an older policy, and a run has room for one copy of its weights",
            key="training.ema.enable",
            way_out="Leave it out, or set posttrain.nft.old_decay: 0, with which the policy itself draws the samples.",
        )
    if training.val_interval and has_held_out(arguments.data):
        yield Problem(
            "held-out rows are measured by a loss on their answers, and posttrain.method: "
            f"{posttrain.method} trains on other ones",
            key="training.val_interval",
            way_out="Set it to 0; mm evaluate scores answers to held-out rows.",
        )
    if not posttrain.rewards:
        of_media = arguments.data.dataset_param.dataset_type == _PROMPTS_OF_GENERATORS
        names = "jpeg_size, clip_score, hps_v2" if of_media else "exact_match, contains, number"
        yield Problem(
            f"is empty, and posttrain.method: {posttrain.method} learns from rewards",
            key=f"{_KEY}.rewards",
            way_out=f"Name one, e.g. rewards: [{{name: {names.partition(',')[0]}}}], or another of {names}.",
        )
    elif not any(reward.weight for reward in posttrain.rewards):
        yield Problem(
            "have the weight 0, all of them: nothing is learnt",
            key=f"{_KEY}.rewards",
            way_out="Give one another weight; a weight of 0 is for a judge that is only logged.",
        )
    for name, count in sorted(Counter(reward.name for reward in posttrain.rewards).items()):
        if count > 1:
            what = f"has '{name}' more than once"
            yield Problem(what, key=f"{_KEY}.rewards", way_out="Keep one and set its weight.")
    yield from _of_trajectories(posttrain)
    yield from _of_the_rollout(arguments.model, arguments.training, posttrain.rollout)


def group_problem(training: TrainingArguments, posttrain: PosttrainArguments) -> Problem:
    """Says that the samples of a rank and optimizer step are no whole number of groups."""
    grpo = posttrain.grpo
    samples = training.micro_batch_size * training.gradient_accumulation_steps
    return Problem(
        f"{grpo.num_generations} samples of a prompt, which stay on one rank, do not fit the {samples} samples of a "
        "rank and step (training.micro_batch_size × gradient_accumulation_steps)",
        key=f"{_KEY}.grpo.num_generations",
        way_out="Make that number a multiple of it.",
    )


def _of_trajectories(posttrain: PosttrainArguments) -> Iterator[Problem]:
    flow = posttrain.flow
    if posttrain.method == "grpo" and not flow.noise_level:
        yield Problem(
            "0, but posttrain.method: grpo needs samples that differ, and probabilities of their steps",
            key=f"{_KEY}.flow.noise_level",
            way_out="Set it above 0, e.g. 0.7, or posttrain.method: nft.",
        )
    if posttrain.method == "nft" and flow.guidance_scale > 1:
        yield Problem(
            f"{flow.guidance_scale:g}, but posttrain.method: nft learns what guidance would add, and draws without it",
            key=f"{_KEY}.flow.guidance_scale",
            way_out="Set it to 1, or posttrain.method: grpo.",
        )
    # The last step ends without noise and draws none.
    random_steps = flow.num_inference_steps - 1
    if flow.window.size is not None and flow.window.size > random_steps:
        yield Problem(
            f"{flow.window.size} is more than the {random_steps} steps that draw noise: all of "
            f"posttrain.flow.num_inference_steps, {flow.num_inference_steps}, but the last",
            key=f"{_KEY}.flow.window.size",
            way_out="Lower it.",
        )


def _of_the_rollout(model: ModelArguments, training: TrainingArguments, rollout: RolloutArguments) -> Iterator[Problem]:
    key, has_server = f"{_KEY}.rollout", rollout.backend != "transformers"
    if not rollout.temperature:
        yield Problem(
            "0 makes all samples of a prompt the same, and nothing is learnt from them",
            key=f"{key}.temperature",
            way_out="Set it to 1.",
        )
    if rollout.ahead and not has_server:
        yield Problem(
            f"{rollout.ahead}, but posttrain.rollout.backend is transformers: the model that trains also samples",
            key=f"{key}.ahead",
            way_out="Set it to 0, or use a server.",
        )
    if rollout.ahead > 1:
        yield Problem(
            f"{rollout.ahead}, but the weights of one rollout are handed over while another is trained on",
            key=f"{key}.ahead",
            way_out="Set it to 1.",
        )
    if rollout.ahead and rollout.correction == "none":
        yield Problem(
            f"{rollout.ahead}: samples are of an older policy, and posttrain.rollout.correction: none does nothing "
            "about it",
            key=f"{key}.ahead",
            way_out="Set posttrain.rollout.correction: token_truncate, or ahead: 0.",
        )
    yield from _of_the_server(model, training, rollout, has_server=has_server)


def _of_the_server(
    model: ModelArguments, training: TrainingArguments, rollout: RolloutArguments, *, has_server: bool
) -> Iterator[Problem]:
    key = f"{_KEY}.rollout"
    if has_server and not rollout.base_url:
        yield Problem(
            f"is not given, but posttrain.rollout.backend is {rollout.backend}",
            key=f"{key}.base_url",
            way_out="Give the server's address, e.g. http://host:8000.",
        )
    if rollout.base_url and has_server and not rollout.base_url.startswith(("http://", "https://")):
        yield Problem(
            f"'{rollout.base_url}' is no http address",
            key=f"{key}.base_url",
            way_out="Begin it with http:// or https://, e.g. http://host:8000.",
        )
    if rollout.base_url and not has_server:
        yield Problem(
            "is given, but posttrain.rollout.backend is transformers, which asks no server",
            key=f"{key}.base_url",
            way_out="Set posttrain.rollout.backend: vllm or sglang, or leave it out.",
        )
    if rollout.api_key_env and not has_server:
        yield Problem(
            "is given, but posttrain.rollout.backend is transformers, which asks no server",
            key=f"{key}.api_key_env",
            way_out="Set posttrain.rollout.backend: vllm or sglang, or leave it out.",
        )
    if has_server and not training.save:
        yield Problem(
            "is not given, but the server reads new weights from a folder of the run",
            key="training.save",
            way_out="Name a folder that the server sees under the same path.",
        )
    if has_server and not model.model_name_or_path:
        yield Problem(
            f"is not given, but posttrain.rollout.backend is {rollout.backend}, which is sent whole folders: they take "
            "what is not trained from that of the model",
            key="model.model_name_or_path",
            way_out="Name the folder that training starts from.",
        )
    lora = training.lora
    if has_server and lora.enable and (lora.quantize or lora.frozen_adapters):
        name = "quantize" if lora.quantize else "frozen_adapters"
        yield Problem(
            f"'{rollout.backend}' gets whole models, with the adapters added to the base that "
            f"training.lora.{name} changes",
            key=f"{key}.backend",
            way_out="Set it to transformers.",
        )
