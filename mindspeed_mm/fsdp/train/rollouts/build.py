"""Builds what `posttrain.method: grpo` asks for: the loader of rollouts, the loss, and what draws answers."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn

from mindspeed_mm.core.errors import ConfigError, Problem, told_as
from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.core.model_kinds import GENERATOR, LANGUAGE, UNIFIED, ModelKind, kind_of_folder
from mindspeed_mm.core.outbound import CHECK_S
from mindspeed_mm.fsdp.checkpoint.adapters import save_merged_hf
from mindspeed_mm.fsdp.checkpoint.hf import save_hf
from mindspeed_mm.fsdp.data import MMDataLoader, build_mm_dataloader
from mindspeed_mm.fsdp.data.data_utils.data_collator import build_collator
from mindspeed_mm.fsdp.data.dataloader.order import TOO_FEW
from mindspeed_mm.fsdp.data.dataset import MMDataset
from mindspeed_mm.fsdp.loss.pair_objective import ReferenceModel
from mindspeed_mm.fsdp.loss.policy_gradient import PolicyObjective, PolicyRule
from mindspeed_mm.fsdp.models.behaviour.shared_media import RepeatedMedia
from mindspeed_mm.fsdp.params.argument import (
    Arguments,
    DataArguments,
    ModelArguments,
    PosttrainArguments,
    TrainingArguments,
)
from mindspeed_mm.fsdp.params.posttrain_args import GrpoArguments, RolloutArguments
from mindspeed_mm.fsdp.plan.outline import build_outline
from mindspeed_mm.fsdp.posttrain_rewards.registry import (
    KEY,
    Reward,
    build_reward,
    check_judges,
    takes_setting,
    told_under,
)
from mindspeed_mm.fsdp.sampling.answers.drawn import DrawRule
from mindspeed_mm.fsdp.train.assemble import Assembled
from mindspeed_mm.fsdp.train.reference import FrozenModel
from mindspeed_mm.fsdp.train.reference_start import reference_start
from mindspeed_mm.fsdp.train.rollouts.files import digest_of
from mindspeed_mm.fsdp.train.rollouts.loader import RolloutLoader
from mindspeed_mm.fsdp.train.rollouts.order import RolloutOrder, RolloutPlan
from mindspeed_mm.fsdp.train.rollouts.server import SERVERS, TIMEOUT_S, ServedRollouts
from mindspeed_mm.fsdp.train.rollouts.text import TextRollouts
from mindspeed_mm.fsdp.train.run.data import RunData
from mindspeed_mm.fsdp.train.run.job import DataShare, Job
from mindspeed_mm.fsdp.train.run.resume import base_of_adapters
from mindspeed_mm.fsdp.utils.model_parts import attribute_at, longest_of
from mindspeed_mm.fsdp.utils.processor import tokenizer_of
from mindspeed_mm.fsdp.utils.ranks import Ranks

if TYPE_CHECKING:
    from mindspeed_mm.fsdp.utils.processor import Processor

_OF_MEDIA = re.compile(
    r"(image|video|audio|vision|boi|eoi|boa|eoa)\w*_(token_id|token_index)|(image|video|audio)_token"
)
"""Keys of configurations that name tokens of media."""


def build_rollout_loader(arguments: Arguments, job: Job, prompts: MMDataset) -> RolloutLoader:
    """The loader of a run that trains on its own samples. Raises as `build_rollout_order`."""
    order = build_rollout_order(arguments, job.data_share, prompts)
    settings = _marks_of_settings(arguments, prompts) if order.folder is not None else ("", "")
    return RolloutLoader(order, job, keeps_all=arguments.posttrain.rollout.keep, settings=settings)


def build_rollout_order(arguments: Arguments, share: DataShare, prompts: MMDataset) -> RolloutOrder:
    """Which prompts make a rollout, and which steps it serves.

    Args:
        arguments: The whole configuration.
        share: The prompts of this rank.
        prompts: Of the run.

    Raises:
        ConfigError: The order is unknown, or the samples of the data set are no prompts for this model.
        DataError: There are fewer prompts than a rollout takes.
    """
    training, posttrain = arguments.training, arguments.posttrain
    grpo = posttrain.grpo
    check_prompts(arguments.model, arguments.data, arguments.posttrain, prompts)
    plan = RolloutPlan(
        grpo.num_generations,
        grpo.steps_per_generation,
        grpo.num_iterations,
        scale=grpo.scale_rewards,
        aggregation=grpo.multi_objective_aggregation,
        ahead=posttrain.rollout.ahead,
    )
    # Where a rollout is one step, checkpoints stand between rollouts, and none is needed again.
    folder = None
    if training.save and (posttrain.rollout.keep or plan.uses > 1):
        folder = Path(training.save)
    return RolloutOrder(
        _build_prompt_loader(arguments.data, arguments.training, arguments.posttrain, share, prompts), plan, folder
    )


def check_prompts(
    model: ModelArguments, data: DataArguments, posttrain: PosttrainArguments, dataset: MMDataset
) -> None:
    """Raise `ConfigError` unless the samples of a data set are prompts for the model that is trained."""
    kind = kind_of_folder(model.model_name_or_path)
    if dataset.prompts_for is not kind:
        raise ConfigError(
            f"'{data.dataset_param.dataset_type}', but {posttrain.method} draws from prompts, and "
            f"its rows are none for a {kind.name} model",
            key="data.dataset_param.dataset_type",
            way_out=PROMPTS_OF_KINDS[kind],
        )


PROMPTS_OF_KINDS = {
    LANGUAGE: "Set huggingface, for rows of conversations, or with a prompt and a solution.",
    GENERATOR: "Set generation_prompts, and name a .txt or .json file of prompts.",
    UNIFIED: "Leave posttrain.method out: such models are trained on answers and pictures.",
}
"""Kind of model → where it finds prompts."""
MADE_BY_KINDS: dict[ModelKind, Literal["texts", "pictures"]] = {
    LANGUAGE: "texts",
    GENERATOR: "pictures",
    UNIFIED: "texts",
}
"""Kind of model → what it makes of prompts."""


def _build_prompt_loader(
    data: DataArguments,
    training: TrainingArguments,
    posttrain: PosttrainArguments,
    share: DataShare,
    prompts: MMDataset,
) -> MMDataLoader:
    """The loader of the prompts of a rollout: a batch of them for each step that its samples are spread over."""
    grpo = posttrain.grpo
    samples = training.micro_batch_size * training.gradient_accumulation_steps
    param = data.dataloader_param
    with told_as(partial(_too_few_prompts, grpo.steps_per_generation)):
        return build_mm_dataloader(
            prompts,
            # Reading a prompt takes less than answering it: workers would wait.
            param.model_copy(update={"num_workers": 0, "prefetch_factor": None, "enable_preload": False}),
            packs=False,
            # In prompts: each of them becomes `num_generations` samples.
            micro_batch_size=samples // grpo.num_generations,
            gradient_accumulation_steps=grpo.steps_per_generation,
            dp_rank=share.rank,
            dp_size=share.ranks,
            seed=training.seed,
            dataset_param=data.dataset_param,
            group=share.group,
        )


def _too_few_prompts(steps: int, problem: Problem) -> Problem:
    """Of a rollout for several steps, whose prompts are drawn at once, say so."""
    if steps == 1 or problem.key != TOO_FEW:
        return problem
    return replace(
        problem,
        what=f"{steps}: {problem.what}, which are the prompts of {steps} steps",
        key="posttrain.grpo.steps_per_generation",
        way_out="Lower it, or give more rows.",
    )


def _marks_of_settings(arguments: Arguments, prompts: MMDataset) -> tuple[str, str]:
    """Of what decides, besides the weights that are trained, what is drawn and what it is worth: a run that starts
    again before its first checkpoint may have others. The second one is of what is drawn alone: rewards may be
    mended."""
    of_training = {"seed", "lora", "diffusion"}
    sections: JsonObject = {"model": True, "data": True, "posttrain": True, "training": of_training}
    given = arguments.model_dump(mode="json", include=sections)
    fingerprint = prompts.fingerprint()
    drawing = {**given, "posttrain": {**given["posttrain"], "rewards": None}}
    first, second = (json.dumps([each, fingerprint], sort_keys=True, default=str) for each in (given, drawing))
    return digest_of(first), digest_of(second)


def policy_rule(grpo: GrpoArguments, rollout: RolloutArguments) -> PolicyRule:
    """Return the rule of the policy loss: the settings of `posttrain.grpo`, with the longest answer that
    `posttrain.rollout` allows."""
    return PolicyRule(
        loss_type=grpo.loss_type,
        level=grpo.importance_sampling_level,
        epsilon=grpo.epsilon,
        epsilon_high=grpo.epsilon_high,
        delta=grpo.delta,
        beta=grpo.beta,
        corrects_kl=grpo.use_bias_correction_kl,
        entropy_coef=grpo.entropy_coef,
        max_completion_length=rollout.max_completion_length,
    )


def build_policy_objective(
    posttrain: PosttrainArguments, assembled: Assembled, data: RunData, reference: ReferenceModel | None = None
) -> PolicyObjective:
    """The loss on sampled answers.

    Args:
        posttrain: The section.
        assembled: The policy.
        data: Of the run.
        reference: Of the KL term.
    """
    head = assembled.applied.head
    assert head is not None  # see `check_method`
    rollout = posttrain.rollout
    seeing = [assembled.model]
    if isinstance(reference, FrozenModel):
        seeing.append(reference.model)
    correction = None
    # Servers compute probabilities a little differently: importance weights make up for it.
    if rollout.backend != "transformers" and rollout.correction != "none":
        correction = (rollout.correction, rollout.correction_max)
    return PolicyObjective(
        assembled.model,
        head,
        policy_rule(posttrain.grpo, rollout),
        RepeatedMedia(*seeing),
        suppressed=never_drawn(assembled.model, data.train.processor),
        temperature=rollout.temperature,
        reference=reference,
        correction=correction,
    )


def build_text_rollouts(
    arguments: Arguments, assembled: Assembled, job: Job, data: RunData, objective: PolicyObjective
) -> TextRollouts:
    """What draws answers.

    Raises:
        ConfigError: A reward is unknown.
    """
    model, dataset, training = assembled.model, data.train, arguments.training
    rollout = arguments.posttrain.rollout
    rule = DrawRule(
        training.seed,
        rollout.max_completion_length,
        rollout.temperature,
        rollout.top_p,
        rollout.top_k,
        never_drawn(model, dataset.processor),
    )
    rollouts = TextRollouts if rollout.backend == "transformers" else ServedRollouts
    source = rollouts(
        model,
        job.device,
        dataset,
        build_collator(dataset.processor, dataset.plugin, arguments.data.dataloader_param.collate_param),
        objective,
        rule,
        rewards_with_servers(arguments.posttrain, LANGUAGE, job.device),
        micro_batch_size=training.micro_batch_size,
        batch_size=rollout.batch_size or training.micro_batch_size,
        end_ids=end_ids(model, dataset),
        longest=longest_of(model.config),
        masks_truncated=arguments.posttrain.grpo.mask_truncated_completions,
    )
    if isinstance(source, ServedRollouts):
        _connect(source, arguments, job)
    return source


def _connect(source: ServedRollouts, arguments: Arguments, job: Job) -> None:
    """Say which server draws, and how it gets weights: in a folder of the run."""
    rollout, folder = arguments.posttrain.rollout, arguments.training.save
    assert rollout.base_url is not None and folder is not None and arguments.model.model_name_or_path is not None
    source.server = SERVERS[rollout.backend](rollout.base_url, TIMEOUT_S, rollout.api_key_env)
    source.speaks = job.rank == 0
    ranks = Ranks()
    # Asked with a short limit: a server that is away should not hold up the start.
    checked = SERVERS[rollout.backend](rollout.base_url, CHECK_S, rollout.api_key_env)
    ranks.first("asking the server", checked.check)
    start = base_of_adapters(arguments.training) or Path(arguments.model.model_name_or_path)
    written = Path(folder).absolute() / "hf" / "rollouts"
    bare: nn.Module | None = None
    if arguments.training.lora.enable:
        bare = build_outline(reference_start(arguments)).model

    def write_weights(model: nn.Module) -> Path:
        if bare is None:
            save_hf(model, written, start, overwrite=True, ranks=ranks)
        else:
            save_merged_hf(model, bare, written, start, ranks=ranks)
        return written

    source.write_weights = write_weights


def build_rewards(
    posttrain: PosttrainArguments,
    device: torch.device | str = "cpu",
    judged: Literal["texts", "pictures"] | None = None,
) -> list[Reward]:
    """The rewards that the section names.

    Args:
        posttrain: The section.
        device: Where those with a model of their own work.
        judged: What the model makes; None: that is seen when they are called.

    Raises:
        ConfigError: One is unknown, does not take its settings, or judges something else.
    """
    rewards = []
    for place, each in enumerate(posttrain.rewards):
        key = f"{KEY}[{place}]"
        with told_under(key):
            if judged is not None:
                check_judges(each.name, judged)
            offered = {"timeout_s": each.timeout_s, "device": str(device)}
            taken = {name: value for name, value in offered.items() if takes_setting(each.name, name)}
            rewards.append(build_reward(each.name, each.weight, {**taken, **each.settings}, key=key))
    return rewards


def rewards_with_servers(
    posttrain: PosttrainArguments, kind: ModelKind, device: torch.device | str = "cpu"
) -> list[Reward]:
    """The same for what a kind of model makes; the servers that they need have been asked, by one rank, whether they
    are there.

    Raises:
        ConfigError: One is unknown, does not take its settings, or judges something else.
        MachineError: A server is not there.
    """
    rewards = build_rewards(posttrain, device, MADE_BY_KINDS[kind])
    for reward in rewards:
        Ranks().first(f"asking the server of the reward '{reward.name}'", reward.check_server)
    return rewards


def never_drawn(model: nn.Module, processor: Processor) -> tuple[int, ...]:
    """Ids that a model must not give: tokens of media, behind which it would look for media, and ids that its tokenizer
    does not know."""
    config = model.config
    words, known = int(config.get_text_config().vocab_size), len(tokenizer_of(processor))
    # Embeddings are often padded beyond the tokenizer's words.
    never = set(range(known, words))
    sections = [attribute_at(config, name) for name in attribute_at(config, "sub_configs", {})]
    for section in (config, *sections):
        if section is None:
            continue
        for key, value in section.to_dict().items():
            if isinstance(value, int) and _OF_MEDIA.fullmatch(key):
                never.add(value)
    return tuple(sorted(never))


def end_ids(model: nn.Module, dataset: MMDataset) -> list[int]:
    """Tokens that end an answer: those of the generation configuration, and those by which training ends one."""
    tokenizer, template = tokenizer_of(dataset.processor), dataset.template
    configured: int | Sequence[int] = attribute_at(model, "generation_config.eos_token_id", ())
    ends = {configured} if isinstance(configured, int) else set(configured)
    if tokenizer.eos_token is not None:
        ends.add(tokenizer.eos_token_id)
    if template is not None and template.turn_end is not None:
        ends.add(tokenizer.convert_tokens_to_ids(template.turn_end))
    return sorted(ends - {None})
