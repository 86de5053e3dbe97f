"""Drawn answers: they depend on seed, name and model, not on who shares the batch; and they have the right shares."""

import pytest
import torch

from mindspeed_mm.fsdp.sampling.answers.drawn import (
    DrawRule,
    InverseDraws,
    draw_answers,
    policy_log_probs,
    truncated,
    uniforms,
)
from tests.helpers.tiny_models import make_tiny_qwen3_vl

END = 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> torch.nn.Module:
    from transformers import Qwen3VLForConditionalGeneration

    folder = tmp_path_factory.mktemp("model")
    make_tiny_qwen3_vl(folder)
    return Qwen3VLForConditionalGeneration.from_pretrained(folder).eval()


def drawn(model: torch.nn.Module, rule: DrawRule, numbers: list[int]) -> list[tuple[list[int], list[float]]]:
    """Answers to prompts of unequal lengths, padded on the left."""
    lengths = [3 + number % 4 for number in numbers]
    ids = torch.zeros(len(numbers), max(lengths), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, (number, length) in enumerate(zip(numbers, lengths, strict=True)):
        ids[row, -length:] = torch.arange(length) + 5 + number
        mask[row, -length:] = 1
    inputs = {"input_ids": ids, "attention_mask": mask}
    keys = [f"row {number}" for number in numbers]
    answers = draw_answers(model, inputs, keys, rule, end_ids=[END], pad_id=0)
    return [(answer.token_ids, answer.log_probs) for answer in answers]


def test_an_answer_does_not_depend_on_its_batch(model: torch.nn.Module) -> None:
    rule = DrawRule(seed=3, max_new_tokens=8, suppressed=(7, 8))
    whole = drawn(model, rule, list(range(12)))
    parts = [each for start in range(0, 12, 5) for each in drawn(model, rule, list(range(12))[start : start + 5])]
    alone = [drawn(model, rule, [number])[0] for number in range(12)]
    for (tokens, log_probs), other, third in zip(whole, parts, alone, strict=True):
        assert tokens == other[0] == third[0]
        assert log_probs == pytest.approx(third[1], abs=1e-5)
        assert not {7, 8} & set(tokens)
    assert len({tuple(tokens) for tokens, _ in whole}) > 6
    assert drawn(model, DrawRule(seed=4, max_new_tokens=8), [0]) != whole[:1]


def test_log_probs_are_those_of_a_forward_pass(model: torch.nn.Module) -> None:
    rule = DrawRule(seed=3, max_new_tokens=6, temperature=0.7, top_k=5, suppressed=(7,))
    ((tokens, log_probs),) = drawn(model, rule, [2])
    prompt = list(range(7, 12))
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].double() / 0.7
    logits[:, 7] = -torch.inf
    expected = logits.log_softmax(dim=1).gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1)
    assert log_probs == pytest.approx(expected.tolist(), abs=1e-5)


def test_shares_are_those_of_the_model() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, 3.0]]).expand(4000, 5)
    rule = DrawRule(seed=1, max_new_tokens=1, suppressed=(4,))
    draws = InverseDraws(rule, [str(number) for number in range(4000)])
    kept = draws(torch.zeros(4000, 1), logits)
    counted = torch.bincount(draws.tokens[0], minlength=5) / 4000
    assert torch.allclose(counted.double(), policy_log_probs(logits[:1], rule).exp()[0], atol=0.025)
    assert torch.equal(kept.argmax(dim=1), draws.tokens[0])


def test_truncation_keeps_the_likeliest() -> None:
    shares = torch.tensor([[0.5, 0.3, 0.15, 0.05]], dtype=torch.float64)
    assert truncated(shares, 0.7, 0).tolist() == [[0.5, 0.3, 0, 0]]
    assert truncated(shares, 0.5, 0).tolist() == [[0.5, 0, 0, 0]]
    assert truncated(shares, 1.0, 3).tolist() == [[0.5, 0.3, 0.15, 0]]


def test_uniform_numbers_belong_to_a_position() -> None:
    assert uniforms(1, "a", 3).tolist() == uniforms(1, "a", 5).tolist()[:3]
    assert uniforms(1, "a", 3).tolist() != uniforms(1, "b", 3).tolist()
