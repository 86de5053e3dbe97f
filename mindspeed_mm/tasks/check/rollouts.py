"""The first batch of a model that is trained on what it draws itself, without a model that draws."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.core.outbound import CHECK_S
from mindspeed_mm.fsdp.data import MMDataset, build_mm_dataset
from mindspeed_mm.fsdp.data.data_utils.data_collator import build_collator
from mindspeed_mm.fsdp.params.argument import DataArguments, PosttrainArguments, TrainingArguments
from mindspeed_mm.fsdp.posttrain_rewards.registry import check_solutions
from mindspeed_mm.fsdp.sampling.answers.drawn import DrawnAnswer
from mindspeed_mm.fsdp.train.rollouts.server import SERVERS, check_media_served
from mindspeed_mm.fsdp.train.rollouts.text import answered_row, check_lengths, row_of
from mindspeed_mm.fsdp.train.run.data import prompts_of
from mindspeed_mm.fsdp.utils.processor import tokenizer_of


def open_prompts(data: DataArguments, training: TrainingArguments) -> MMDataset:
    """The prompts of a run."""
    param = prompts_of(data).dataset_param
    return build_mm_dataset(param, seed=training.seed, val_dataset_param=None, encode_ahead=False)[0]


def check_server(posttrain: PosttrainArguments) -> None:
    """Raise `MachineError` unless the server that draws answers is there."""
    rollout = posttrain.rollout
    if rollout.backend != "transformers" and rollout.base_url is not None:
        SERVERS[rollout.backend](rollout.base_url, CHECK_S, rollout.api_key_env).check()


def first_answers(
    data: DataArguments,
    training: TrainingArguments,
    posttrain: PosttrainArguments,
    dataset: MMDataset,
    prompts: Sequence[Any],
    longest: int | None,
) -> Batch:
    """The first micro-batch of a language model: prompts with answers of the largest length, which need most memory.

    Args:
        arguments: The configuration.
        dataset: Of the prompts.
        prompts: Of the first step.
        longest: Tokens that the model takes; None: it does not say.

    Raises:
        DataError: A prompt leaves no room for an answer, has no solution that a reward compares with, or has media that
            no server is sent.
    """
    size = training.micro_batch_size
    check_solutions([each.name for each in posttrain.rewards], list(map(row_of, prompts)))
    most_new = posttrain.rollout.max_completion_length
    check_lengths(prompts, most_new, longest)
    if posttrain.rollout.backend != "transformers":
        check_media_served(prompts)
    collate = build_collator(dataset.processor, dataset.plugin, data.dataloader_param.collate_param)
    answer = DrawnAnswer([tokenizer_of(dataset.processor).pad_token_id or 0] * most_new, [], 0.0, is_truncated=True)
    drawn = [prompt for prompt in prompts for _ in range(posttrain.grpo.num_generations)][:size]
    return collate([answered_row(prompt, answer) for prompt in drawn])


def first_blanks(data: DataArguments, training: TrainingArguments) -> Batch:
    """The first micro-batch of a generator: blank media with the captions of its prompts."""
    dataset, _ = build_mm_dataset(data.dataset_param, seed=training.seed, encode_ahead=False)
    rows = [dataset[number % len(dataset)] for number in range(training.micro_batch_size)]
    collate = dataset.build_collator(data.dataloader_param.collate_param)
    assert collate is not None
    return collate(rows)
