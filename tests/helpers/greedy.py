"""Greedy answers to encoded questions."""

from __future__ import annotations

from collections.abc import Sequence

from mindspeed_mm.fsdp.data.data_utils.encode import EncodedQuestion
from mindspeed_mm.fsdp.sampling.answers.choosing import Sampling
from mindspeed_mm.fsdp.sampling.answers.generator import Generator
from mindspeed_mm.fsdp.sampling.answers.live import Answer, LiveAnswer


def greedy_answers(generator: Generator, questions: Sequence[EncodedQuestion], max_new_tokens: int) -> list[Answer]:
    """The answers of one batch, in order."""
    sampling = Sampling(max_new_tokens, temperature=0)
    return generator.answer_live([LiveAnswer(question, sampling) for question in questions])
