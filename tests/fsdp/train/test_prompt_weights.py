"""Weights of turns act on the loss whoever speaks: against cross-entropies summed by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tests.helpers.runs import losses, train
from tests.helpers.tiny_models import make_tiny_qwen3
from tests.helpers.tiny_run import make_tiny_run

PROMPT, ANSWER = "What is red and round?", "the old ball"
WEIGHTS = {PROMPT: 0.5, ANSWER: 0.25}


@pytest.mark.edge("N2")
def test_a_weighted_prompt_is_a_weighted_mean(tmp_path: Path) -> None:
    """Of all tokens: those of the two turns count as they say, what the template writes around them counts one."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    make_tiny_qwen3(tmp_path / "model", initializer_range=0.3)
    said = [
        {"role": role, "content": text, "weight": WEIGHTS[text]}
        for role, text in (("user", PROMPT), ("assistant", ANSWER))
    ]
    (tmp_path / "images").mkdir()
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": said, "images": []}) + "\n")
    yaml = make_tiny_run(tmp_path)
    words = ("training.train_iters=1", "training.micro_batch_size=1")
    train(yaml, tmp_path / "run", *words, "data.dataset_param.basic_parameters.train_on_prompt=true")

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    text = tokenizer.apply_chat_template(said, tokenize=False)
    encoded = tokenizer(text, return_offsets_mapping=True, add_special_tokens=False)
    weights = torch.ones(len(encoded["input_ids"]), dtype=torch.float64)
    for turn, weight in WEIGHTS.items():
        first, end = text.index(turn), text.index("<|im_end|>", text.index(turn)) + len("<|im_end|>")
        weights[[first <= start < end for start, _ in encoded["offset_mapping"]]] = weight
    ids = torch.tensor([encoded["input_ids"]])
    logits = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float64)(input_ids=ids).logits[0]
    each = F.cross_entropy(logits[:-1], ids[0, 1:], reduction="none")
    expected = float((weights[1:] * each).sum().detach() / weights[1:].sum())
    assert expected != pytest.approx(float(each.mean().detach()), rel=1e-3)
    assert losses(tmp_path / "run")[1] == pytest.approx(expected, rel=1e-5)
