"""Rollouts of language models: answers that the model itself draws, with its parameters whole for so long."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import gcd

import numpy as np
import torch
from torch import nn

from mindspeed_mm.core.batch import ENGINE_KEYS, IGNORED_LABEL, Batch
from mindspeed_mm.core.errors import DataError
from mindspeed_mm.core.json_file import JsonMapping, JsonObject
from mindspeed_mm.fsdp.data.data_utils.data_collator import (
    Collator,
    left_padded_questions,
    with_media,
    with_media_once,
)
from mindspeed_mm.fsdp.data.data_utils.sample import EncodedPrompt, EncodedSample
from mindspeed_mm.fsdp.data.dataset import MMDataset
from mindspeed_mm.fsdp.distributed.sharding.fully_shard import resident
from mindspeed_mm.fsdp.distributed.tensor.collectives import whole_logits
from mindspeed_mm.fsdp.loss.policy_gradient import PolicyObjective
from mindspeed_mm.fsdp.posttrain_rewards.registry import Judged, Reward, Row, names_and_weights, scores_of
from mindspeed_mm.fsdp.sampling.answers.drawn import DrawnAnswer, DrawRule, draw_answers
from mindspeed_mm.fsdp.train.train_engine import move
from mindspeed_mm.fsdp.utils.processor import tokenizer_of


class TextRollouts:
    """Draws answers, has them judged and makes batches of them.

    Args:
        model: Sharded, or plain.
        device: Where it is.
        dataset: Of prompts; its processor and media plugin are used.
        collate: Samples → batch, as other training has it.
        objective: The loss, which tells of its ratios.
        rule: How tokens are drawn.
        rewards: Judge answers.
        micro_batch_size: Answers that are trained on at a time.
        batch_size: Answers that are drawn at a time.
        end_ids: Tokens that end an answer.
        longest: Tokens of prompt and answer that the model takes; None: it does not say.
        masks_truncated: Leave answers out of the loss that were cut at the longest length.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        dataset: MMDataset,
        collate: Collator,
        objective: PolicyObjective,
        rule: DrawRule,
        rewards: Sequence[Reward],
        *,
        micro_batch_size: int,
        batch_size: int,
        end_ids: Sequence[int],
        longest: int | None = None,
        masks_truncated: bool = False,
    ) -> None:
        self._model, self._device, self._dataset, self._collate = model, device, dataset, collate
        self._objective, self._rule, self._rewards = objective, rule, rewards
        self._micro_batch_size, self._batch_size = micro_batch_size, batch_size
        self._end_ids, self._longest, self._masks_truncated = list(end_ids), longest, masks_truncated
        self._tokenizer = tokenizer_of(dataset.processor)
        self.reward_names, self.reward_weights = names_and_weights(rewards)

    # --- drawing ------------------------------------------------------------------------------------------------------

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Inside, parameters are whole, gradients are off and the model is in evaluation mode. Afterwards it is in
        training mode."""
        with torch.no_grad(), resident(self._model), whole_logits(self._model):
            self._model.eval()
            try:
                yield
            finally:
                self._model.train()

    def draw(self, prompts: Sequence[EncodedPrompt], keys: Sequence[str]) -> list[DrawnAnswer]:
        """See `RolloutSource`. Prompts of like length are drawn together.

        Raises:
            DataError: A prompt and the longest answer are more than the model takes.
        """
        check_lengths(prompts, self._rule.max_new_tokens, self._longest)
        order = sorted(range(len(prompts)), key=lambda place: (len(prompts[place]["input_ids"]), place))
        found: dict[int, DrawnAnswer] = {}
        for start in range(0, len(order), self._batch_size):
            together = order[start : start + self._batch_size]
            turns, copies = in_turns([prompts[place] for place in together])
            own_prompts, own_keys = [], []
            for turn in turns:
                own_prompts.append(prompts[together[turn]])
                own_keys.append(keys[together[turn]])
            for turn, answer in zip(turns, self._drawn(own_prompts, own_keys, copies), strict=True):
                found[together[turn]] = answer
        return [found[place] for place in range(len(prompts))]

    def _drawn(self, prompts: Sequence[EncodedPrompt], keys: Sequence[str], copies: int) -> list[DrawnAnswer]:
        batch = with_media_once(self._collate_prompts, self._dataset.plugin, prompts, copies)
        inputs = dict(self._objective.media.repeat(batch))
        # What the training loop adds to batches, no forward of a model takes.
        for name in ENGINE_KEYS & inputs.keys():
            del inputs[name]
        return draw_answers(
            self._model,
            move(inputs, self._device),
            keys,
            self._rule,
            end_ids=self._end_ids,
            pad_id=self._tokenizer.pad_token_id,
        )

    def _collate_prompts(self, prompts: Sequence[EncodedPrompt]) -> Batch:
        """Padded on the left, so that answers begin together."""
        plugin, questions = self._dataset.plugin, [(prompt["input_ids"], prompt["media"]) for prompt in prompts]
        batch: Batch = left_padded_questions(questions, plugin, self._tokenizer.pad_token_id)
        return with_media(batch, plugin, [media for _, media in questions])

    # --- judging ------------------------------------------------------------------------------------------------------

    def text_of(self, answer: DrawnAnswer) -> str:
        """Its words, as a reader has them."""
        return str(self._tokenizer.decode(answer.token_ids, skip_special_tokens=True))

    def judge(self, prompts: Sequence[EncodedPrompt], samples: Sequence[DrawnAnswer]) -> torch.Tensor:
        """Decode the answers and score each with every reward: (samples, rewards) fp64, NaN where a reward does not
        judge."""
        texts: list[str] = []
        answers: list[str] = []
        rows: list[Row] = []
        token_ids: list[list[int]] = []
        ids: list[str] = []
        for prompt, answer in zip(prompts, samples, strict=True):
            texts.append(prompt["text"])
            answers.append(self.text_of(answer))
            rows.append(row_of(prompt))
            token_ids.append(answer.token_ids)
            ids.append(prompt["sample_id"])
        return scores_of(self._rewards, Judged(texts, answers, rows, token_ids, ids))

    # --- records ------------------------------------------------------------------------------------------------------

    def record(self, prompt: EncodedPrompt, sample: DrawnAnswer) -> JsonObject:
        """Return the answer as a JSON record with its prompt, token ids, log-probabilities and entropy."""
        return {
            "row": prompt["row"],
            "id": prompt["sample_id"],
            "prompt": prompt["text"],
            "text": self.text_of(sample),
            "token_ids": sample.token_ids,
            "log_probs": sample.log_probs,
            "entropy": sample.entropy,
            "truncated": sample.is_truncated,
        }

    def restore(self, record: JsonMapping) -> DrawnAnswer:
        """Rebuild the answer that `record` wrote: token ids, log-probabilities, entropy and whether it is truncated."""
        return DrawnAnswer(
            list(record["token_ids"]), list(record["log_probs"]), record["entropy"], is_truncated=record["truncated"]
        )

    def facts(self, samples: Sequence[DrawnAnswer]) -> dict[str, float]:
        """Return sums over the answers, by name: samples, completion tokens, truncated answers and entropy."""
        facts = {"samples": len(samples), "completion_tokens": 0, "truncated_share": 0, "entropy": 0.0}
        for answer in samples:
            facts["completion_tokens"] += len(answer.token_ids)
            facts["truncated_share"] += answer.is_truncated
            facts["entropy"] += answer.entropy
        return facts

    def take_metrics(self) -> dict[str, float]:
        """Return the objective's means over this rank's tokens since the last call."""
        return self._objective.take_metrics()

    # --- batches ------------------------------------------------------------------------------------------------------

    def batches(
        self,
        prompts: Sequence[EncodedPrompt],
        samples: Sequence[DrawnAnswer],
        advantages: torch.Tensor,
        *,
        is_fresh: bool,
    ) -> list[Batch]:
        """Return the micro-batches of a step: up to `micro_batch_size` answers each, with advantages and the
        log-probabilities of their tokens when drawn."""
        found = []
        for first in range(0, len(samples), self._micro_batch_size):
            own = slice(first, first + self._micro_batch_size)
            found.append(self._batch(prompts[own], samples[own], advantages[own], is_fresh))
        return found

    def _batch(
        self,
        prompts: Sequence[EncodedPrompt],
        samples: Sequence[DrawnAnswer],
        advantages: torch.Tensor,
        is_fresh: bool,
    ) -> Batch:
        turns, copies = in_turns(prompts)
        rows: list[EncodedSample] = []
        sampled: list[float] = []  # of the labelled tokens, row by row
        for turn in turns:
            answer = samples[turn]
            is_trained = not (self._masks_truncated and answer.is_truncated)
            rows.append(answered_row(prompts[turn], answer, is_trained))
            if is_trained:
                sampled += answer.log_probs
        return with_media_once(self._collate, self._dataset.plugin, rows, copies) | {
            "_advantages": advantages[turns],
            "_sampled": torch.tensor(sampled, dtype=torch.float64),
            "_fresh": is_fresh,
        }


def row_of(prompt: EncodedPrompt) -> Row:
    """What rewards are told of it."""
    return {"id": prompt["sample_id"], **prompt["columns"]}


def in_turns(prompts: Sequence[EncodedPrompt]) -> tuple[list[int], int]:
    """An order of rows that come in equal blocks with the same media, which are encoded once, and the number of blocks.

    Args:
        prompts: Of each row; those of a group are one object.
    """
    groups: dict[int, list[int]] = {}
    for place, prompt in enumerate(prompts):
        groups.setdefault(id(prompt), []).append(place)
    # As many equal blocks as each group can be cut into.
    blocks = gcd(*map(len, groups.values()))
    if blocks == 1 or not any(prompt["media"] for prompt in prompts):
        return list(range(len(prompts))), 1
    turns: list[int] = []
    for block in range(blocks):
        for places in groups.values():
            part = len(places) // blocks
            turns += places[block * part : (block + 1) * part]
    return turns, blocks


def check_lengths(prompts: Sequence[EncodedPrompt], most_new: int, longest: int | None) -> None:
    """Raise `DataError` where a prompt and an answer of `most_new` tokens are more than the model takes."""
    for prompt in prompts:
        length = len(prompt["input_ids"]) + most_new
        if longest is not None and length > longest:
            raise DataError(
                f"the prompt's {len(prompt['input_ids'])} tokens and an answer of up to {most_new} are {length}, and "
                f"the model takes {longest}",
                where=prompt["sample_id"],
                key="posttrain.rollout.max_completion_length",
                way_out="Lower it, or leave such rows out.",
            )


def answered_row(prompt: EncodedPrompt, answer: DrawnAnswer, is_trained: bool = True) -> EncodedSample:
    """Prompt and answer as other training has them; the answer's tokens are labels."""
    ids = np.concatenate([prompt["input_ids"], np.array(answer.token_ids, dtype=np.int64)])
    labels = np.full_like(ids, IGNORED_LABEL)
    if is_trained:
        labels[len(prompt["input_ids"]) :] = answer.token_ids
    return {
        "sample_id": prompt["sample_id"],
        "input_ids": ids,
        "labels": labels,
        "media": prompt["media"],
        "shrunk": False,
    }
