"""A tiny run that adds tokens, and the same training by plain transformers and PEFT."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from mindspeed_mm.tasks.verify.precision import keeping_double
from tests.helpers.tiny_models import make_tiny_qwen3, make_tiny_qwen3_vl
from tests.helpers.tiny_run import make_tiny_run

from transformers import (  # isort: skip  (tiny_models makes it importable)
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
)

PLAIN, SPECIAL = ["<think>", "</think>"], ["<call>"]
ANSWER = "<think>one<call>two</think> three"
QUESTION = "Which digit is it? <call>"
ADDED = {"add_tokens": PLAIN, "add_special_tokens": SPECIAL}
IDS = [320, 321, 322]
"""Numbers of the new tokens: the tiny tokenizer has 320."""
EXACT = {
    "parallel": {"fsdp_plan": {"param_dtype": "fp64"}},
    "training": {
        "train_iters": 2, "clip_grad": 0.0, "weight_decay": 0.1, "adam_fused": False, "micro_batch_size": 2,
        "lr_decay_style": "constant", "adam_eps": 1e-3,
    },
}  # fmt: skip
MAKE: dict[str, Callable[..., Path]] = {"text": make_tiny_qwen3, "vlm": make_tiny_qwen3_vl}


def make_run(folder: Path, kind: str, *, tie: bool, rows: int = 320, training: dict[str, Any] | None = None) -> Path:
    """A YAML over rows that are all the same conversation, with tokens that the model's folder does not have."""
    MAKE[kind](folder / "model", tie=tie, vocab_size=rows, initializer_range=0.3)
    messages = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]
    (folder / "rows.jsonl").write_text((json.dumps({"messages": messages, "images": []}) + "\n") * 24)
    sections = {**EXACT, "training": EXACT["training"] | (training or {})}
    return make_tiny_run(folder, model=ADDED, **sections)


def plain_tokenizer(folder: Path) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(PLAIN)
    tokenizer.add_tokens(SPECIAL, special_tokens=True)
    return tokenizer


def plain_batch(folder: Path, rows: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows, L) token ids of the conversation, and labels: the answer and the end of the turn."""
    tokenizer = plain_tokenizer(folder)

    def ids(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    before = ids(f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n")
    answer, end = ids(f"{ANSWER}<|im_end|>"), ids("\n")
    labels = [-100] * len(before) + answer + [-100] * len(end)
    return torch.tensor([[*before, *answer, *end]] * rows), torch.tensor([labels] * rows)


def plain_model(folder: Path, dtype: torch.dtype = torch.float64, *, grown: bool = True) -> Any:
    """The folder's model by transformers. `grown`: with rows of new tokens, each the mean of the first 320, in the type
    that the folder's weights have."""
    auto = AutoModelForImageTextToText if _is_vlm(folder) else AutoModelForCausalLM
    with keeping_double():  # tables of positions, too
        model = auto.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
    if grown:
        before = len(model.get_input_embeddings().weight)
        if before < IDS[-1] + 1:
            model.resize_token_embeddings(IDS[-1] + 1, pad_to_multiple_of=64, mean_resizing=False)
        after = len(model.get_input_embeddings().weight)
        new = sorted({*IDS, *range(before, after)})
        with torch.no_grad():
            for module in (model.get_input_embeddings(), model.get_output_embeddings()):
                mean = module.weight[:320].double().mean(0)
                module.weight[new] = mean.float().to(dtype)
    return model


def _is_vlm(folder: Path) -> bool:
    return "vision_config" in json.loads((folder / "config.json").read_text())


def plain_loss(model: Any, folder: Path) -> torch.Tensor:
    ids, labels = plain_batch(folder)
    logits = model(input_ids=ids).logits[:, :-1].flatten(0, 1)
    return F.cross_entropy(logits, labels[:, 1:].flatten())


def plain_steps(model: Any, folder: Path, steps: int = 2, undecayed: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """AdamW as the run has it: loss, gradients and weights of each step, by name."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    decays = {name: p for name, p in trained.items() if p.ndim > 1 and not any(part in name for part in undecayed)}
    others = [p for name, p in trained.items() if name not in decays]
    groups = [{"params": list(decays.values()), "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], lr=1e-3, eps=1e-3, foreach=False)
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        with keeping_double():
            loss = plain_loss(model, folder)
            loss.backward()
        gradients = {name: p.grad.clone() for name, p in trained.items() if p.grad is not None}
        optimizer.step()
        weights = {name: p.detach().clone() for name, p in trained.items()}
        found.append({"loss": loss.detach(), "gradients": gradients, "weights": weights})
    return found
