"""What docs/coming-from.md calls different: the other side is computed by the tool's own rule, written here in plain
torch and lists from the function that is named, and ours by the code that trains."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from mindspeed_mm.core.batch import IGNORED_LABEL
from mindspeed_mm.fsdp.data import build_mm_dataset
from mindspeed_mm.fsdp.data.data_utils.sample import TooLongError
from mindspeed_mm.fsdp.loss.head_loss import HeadLoss
from mindspeed_mm.fsdp.loss.objectives import build_objective
from mindspeed_mm.fsdp.params.loader import load_config
from tests.helpers.tiny_models import make_tiny_qwen3

PAGE = (Path(__file__).parents[3] / "docs" / "coming-from.md").read_text(encoding="utf-8")
SECTION = " ".join(PAGE.partition("## What is different on purpose")[2].partition("\n## ")[0].split())


# --- the mean of a step -----------------------------------------------------------------------------------------------

Steps = list[tuple[torch.Tensor, torch.Tensor]]
"""Micro-batches of a step: logits of one row, (tokens, words), and labels, (tokens)."""


class Known(nn.Module):
    """A model whose logits are its parameters: row `input_ids[0, 0]` of a micro-batch."""

    def __init__(self, step: Steps) -> None:
        super().__init__()
        self.rows = nn.ParameterList(nn.Parameter(logits.clone()) for logits, _ in step)
        self.head = nn.Linear(step[0][0].shape[1], step[0][0].shape[1], bias=False, dtype=torch.float64)
        nn.init.eye_(self.head.weight)

    def forward(self, input_ids: torch.Tensor) -> Any:
        return SimpleNamespace(logits=self.head(self.rows[int(input_ids[0, 0])])[None])


def logits_of(loss: float) -> list[float]:
    """Logits of two words, of which the first one's −log p is `loss`."""
    return [0.0, float(np.log(np.expm1(loss)))]


def example() -> Steps:
    """The page's example: four tokens with loss 1, and a micro-batch of one with loss 3."""
    rows = [[1.0] * 4, [3.0]]
    return [
        (torch.tensor([logits_of(loss) for loss in losses], dtype=torch.float64), torch.zeros(len(losses)).long())
        for losses in rows
    ]


def uneven() -> Steps:
    draw = torch.Generator().manual_seed(0)
    return [
        (torch.randn(tokens, 7, generator=draw, dtype=torch.float64), torch.randint(0, 7, (tokens,), generator=draw))
        for tokens in (5, 2, 9)
    ]


def ours(step: Steps, loss_type: str) -> tuple[float, list[torch.Tensor]]:
    """Loss and gradients of a step as the engine divides them: one denominator, counted over its micro-batches."""
    model = Known(step)
    objective = build_objective(loss_type, model, HeadLoss(model.head))
    batches = []
    for number, (_, labels) in enumerate(step):
        ids = torch.full((1, len(labels)), number)
        batches.append(
            objective.prepare({"input_ids": ids, "labels": ids, "shift_labels": labels[None], "sample_ids": ["a"]})
        )
    counts = objective.count(batches)
    total = torch.stack([objective.terms(model, batch)["loss"] for batch in batches]).sum() / counts["loss"]
    total.backward()
    return float(total.detach()), [row.grad for row in model.rows if row.grad is not None]


def counted_by_transformers(step: Steps) -> tuple[float, list[torch.Tensor]]:
    """transformers' Trainer (trainer.py: `get_batch_samples` counts labels of all micro-batches; loss/loss_utils.py:
    `fixed_cross_entropy` divides each sum by it), for models whose loss takes the count."""
    rows = [logits.clone().requires_grad_() for logits, _ in step]
    items = sum(int((labels != IGNORED_LABEL).sum()) for _, labels in step)
    total = torch.zeros((), dtype=torch.float64)
    for row, (_, labels) in zip(rows, step, strict=True):
        total = total + functional.cross_entropy(row, labels, reduction="sum") / items
    total.backward()
    return float(total.detach()), [row.grad for row in rows if row.grad is not None]


def mean_of_means(step: Steps) -> tuple[float, list[torch.Tensor]]:
    """transformers' Trainer for other models, and before 4.46 for all (trainer.py: `training_step` divides the mean of
    a micro-batch by their number); Megatron-LM (pipeline_parallel/schedules.py: `forward_step` divides what `loss_func`
    returns by `num_microbatches`)."""
    rows = [logits.clone().requires_grad_() for logits, _ in step]
    total = torch.zeros((), dtype=torch.float64)
    for row, (_, labels) in zip(rows, step, strict=True):
        total = total + functional.cross_entropy(row, labels) / len(step)
    total.backward()
    return float(total.detach()), [row.grad for row in rows if row.grad is not None]


def are_equal(one: tuple[float, list[torch.Tensor]], other: tuple[float, list[torch.Tensor]]) -> bool:
    same = [torch.allclose(mine, theirs, atol=1e-12, rtol=0) for mine, theirs in zip(one[1], other[1], strict=True)]
    return abs(one[0] - other[0]) < 1e-12 and all(same)


@pytest.mark.parametrize("step", [example(), uneven()], ids=["example", "uneven"])
def test_the_loss_of_a_step(step: Steps) -> None:
    """Loss and gradients: by all label tokens of the step, as transformers counts them; by micro-batches on request."""
    assert are_equal(ours(step, "default"), counted_by_transformers(step))
    assert are_equal(ours(step, "per_micro_batch_loss"), mean_of_means(step))
    assert not are_equal(ours(step, "default"), mean_of_means(step))


def test_the_numbers_of_the_page_are_those_of_the_example() -> None:
    here, there = ours(example(), "default")[0], mean_of_means(example())[0]
    assert re.search(rf"make {here:.1f} here and {there:.1f} there", SECTION)


# --- samples that are too long ----------------------------------------------------------------------------------------


def kept_by_llamafactory(source: int, target: int, limit: int) -> tuple[int, int]:
    """Tokens of a question and of its answer that LLaMA-Factory keeps (data/processor/processor_utils.py:
    `infer_seqlen`): the longer side is cut, or both in proportion; each from its end."""
    if 2 * target < limit:
        allowed = limit
    elif 2 * source < limit:
        allowed = limit - source
    else:
        allowed = limit * target // (source + target)
    answer = min(allowed, target)
    return min(max(limit - answer, 0), source), answer


def kept_by_trl(source: int, target: int, limit: int) -> tuple[int, int]:
    """Tokens of a question and of its answer that TRL's SFTTrainer keeps (trainer/sft_trainer.py: `truncate` in
    `_prepare_dataset`, `truncation_mode` keep_start): the first ones of the row."""
    return min(source, limit), max(0, min(target, limit - source))


def pieces_of_ms_swift(labels: Sequence[int], limit: int, strategy: str) -> list[list[int]]:
    """Labels that ms-swift trains on (swift/template/base.py: `Template.encode`; arguments/base_args/template_args.py:
    `delete`, the default, becomes an error, for which another row is drawn)."""
    if strategy == "delete":
        return []
    if strategy == "left":
        return [list(labels[-limit:])]
    if strategy == "right":
        return [list(labels[:limit])]
    return [[IGNORED_LABEL, *labels[at + 1 : at + limit]] for at in range(0, len(labels), limit)]


def kept_by_axolotl(length: int, limit: int, strategy: str = "drop") -> int:
    """Tokens that axolotl keeps of a row (utils/data/utils.py: `handle_long_seq_in_dataset`)."""
    if length <= limit:
        return length
    return limit if strategy == "truncate" else 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("long")
    make_tiny_qwen3(folder / "model")
    words = ["Which digit is this?", "seven eight nine", "Which digit is this?", "zero one two three"]
    turns = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(words)]
    (folder / "rows.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    return folder


def sample_of(folder: Path, limit: int, truncation: str) -> dict[str, Any]:
    """The row as it is trained on.

    Raises:
        TooLongError: It is left out.
    """
    basic = {"dataset": str(folder / "rows.jsonl"), "cutoff_len": limit, "truncation": truncation}
    sections = {
        "model": {"model_name_or_path": str(folder / "model")},
        "data": {"dataset_param": {"basic_parameters": basic}},
    }
    train, _ = build_mm_dataset(load_config(sections).arguments.data.dataset_param, seed=0, encode_ahead=False)
    found: dict[str, Any] = train[0]
    return found


def turns_of(labels: Sequence[int]) -> list[list[int]]:
    """Runs of tokens that are learned: the answers."""
    runs: list[list[int]] = []
    for before, label in zip([IGNORED_LABEL, *labels], labels, strict=False):
        if label != IGNORED_LABEL:
            runs += [[label]] if before == IGNORED_LABEL else []
            runs[-1] += [label] if before != IGNORED_LABEL else []
    return runs


def test_no_answer_is_cut_here(folder: Path) -> None:
    """A row is left out, or keeps its first turns with answers that end as they were written."""
    labels = sample_of(folder, 1024, "drop")["labels"].tolist()
    answers = turns_of(labels)
    assert len(answers) == 2 and answers[0][-1] == answers[1][-1]
    for limit in range(len(labels) - 9, len(labels), 4):
        with pytest.raises(TooLongError):
            sample_of(folder, limit, "drop")
        assert turns_of(sample_of(folder, limit, "shrink")["labels"].tolist()) == answers[:1]
    with pytest.raises(TooLongError):
        sample_of(folder, 4, "shrink")


def test_what_the_others_keep() -> None:
    """Of a question of six tokens and an answer of six, the last of which says that the answer ends."""
    question, answer, limit = [1] * 6, [2, 3, 4, 5, 6, 7], 8
    labels = [*([IGNORED_LABEL] * 6), *answer]
    cut = {
        "LLaMA-Factory": answer[: kept_by_llamafactory(len(question), len(answer), limit)[1]],
        "TRL": answer[: kept_by_trl(len(question), len(answer), limit)[1]],
        "ms-swift, right": turns_of(pieces_of_ms_swift(labels, limit, "right")[0])[-1],
        "axolotl, truncate": turns_of(labels[: kept_by_axolotl(len(labels), limit, "truncate")])[-1],
    }
    assert all(0 < len(part) < 6 and part == answer[: len(part)] for part in cut.values()), cut
    assert pieces_of_ms_swift(labels, limit, "delete") == [] and kept_by_axolotl(len(labels), limit) == 0
    assert pieces_of_ms_swift(labels, limit, "left") == [[IGNORED_LABEL, IGNORED_LABEL, *answer]]  # a cut question
    split = [turns_of(piece) for piece in pieces_of_ms_swift(labels, limit, "split")]
    assert split == [[[2, 3]], [[5, 6, 7]]]  # the first label of a piece is not learned
    assert kept_by_llamafactory(20, 2, 10) == (8, 2)  # a question is cut from its end


def test_the_example_of_the_page_is_what_the_tools_keep() -> None:
    factory, trl = kept_by_llamafactory(6, 6, 8), kept_by_trl(6, 6, 8)
    told = rf"become {factory[0]} and {factory[1]} in LLaMA-Factory, {trl[0]} and {trl[1]} in TRL"
    assert re.search(rf"limit of 8 tokens, a question of 6 and an answer of 6 {told}", SECTION)
    assert re.search(r"ms-swift and axolotl leave such a row out", SECTION)
