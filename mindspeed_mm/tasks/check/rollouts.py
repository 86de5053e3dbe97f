"""The first batch of a language model that is trained on its own answers, without a model that draws them."""

from __future__ import annotations

from typing import Any

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.fsdp.data import MMDataset, build_mm_dataset
from mindspeed_mm.fsdp.data.data_utils.data_collator import build_collator
from mindspeed_mm.fsdp.params.argument import Arguments
from mindspeed_mm.fsdp.posttrain_rewards.registry import check_solutions
from mindspeed_mm.fsdp.sampling.answers.drawn import DrawnAnswer
from mindspeed_mm.fsdp.train.rollouts.build import build_prompt_loader
from mindspeed_mm.fsdp.train.rollouts.text import answered_row, check_lengths, row_of
from mindspeed_mm.fsdp.train.run.data import prompts_of
from mindspeed_mm.fsdp.utils.processor import tokenizer_of


def first_answers(
    arguments: Arguments, data_ranks: int, longest: int | None
) -> tuple[MMDataset, dict[str, Any], Batch]:
    """Opens the prompts and makes the first micro-batch: prompts with answers of the largest length, which need most
    memory.

    Args:
        arguments: The configuration.
        data_ranks: Ranks that have rows of their own.
        longest: Tokens that the model takes; None: it does not say.

    Returns:
        The prompts, what a resume compares of how they are put together, and the batch.

    Raises:
        DataError: There are too few prompts, or one is off, leaves no room for an answer or has no solution that a
            reward compares with.
    """
    training, posttrain = arguments.training, arguments.posttrain
    param, group = prompts_of(arguments.data).dataset_param, posttrain.grpo.num_generations
    dataset, _ = build_mm_dataset(param, seed=training.seed, val_dataset_param=None, encode_ahead=False)
    loader = build_prompt_loader(arguments, dataset, 0, data_ranks)
    prompts = next(iter(loader))[0]["prompts"]
    check_solutions([each.name for each in posttrain.rewards], list(map(row_of, prompts)))
    drawn = [prompt for prompt in prompts for _ in range(group)][: training.micro_batch_size]
    most_new = posttrain.rollout.max_completion_length
    check_lengths(prompts, most_new, longest)
    collate = build_collator(dataset.processor, dataset.plugin, arguments.data.dataloader_param.collate_param)
    own = {"num_generations": group, "steps_per_generation": posttrain.grpo.steps_per_generation}
    batching = {**loader.batching, **own, "iterations": posttrain.grpo.num_iterations}
    answer = DrawnAnswer([tokenizer_of(dataset.processor).pad_token_id or 0] * most_new, [], 0.0, is_truncated=True)
    return dataset, batching, collate([answered_row(prompt, answer) for prompt in drawn])
