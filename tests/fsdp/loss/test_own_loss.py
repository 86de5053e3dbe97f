"""The loss that a model returns itself, against plain transformers and torch in fp64: whatever the model does with the
number of tokens that it is told, the loss and the gradients are those of one mean over all label tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mindspeed_mm.fsdp.data.dataloader.fetch import completed
from mindspeed_mm.fsdp.loss.objectives import ModelLoss
from mindspeed_mm.fsdp.utils.torchvision_guard import prepare_for_transformers

pytestmark = pytest.mark.edge("N3", "N4")

VOCABULARY = 23


def qwen3() -> nn.Module:
    """Divides a sum by the count that it is told."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    return Qwen3ForCausalLM(Qwen3Config(vocab_size=VOCABULARY, **sizes, **heads))


def bart() -> nn.Module:
    """Takes any arguments, a count too, and returns a mean all the same."""
    from transformers import BartConfig, BartForConditionalGeneration

    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "dropout": 0.0}
    config = BartConfig(vocab_size=VOCABULARY, max_position_embeddings=32, **sizes, **heads)
    return BartForConditionalGeneration(config)


def t5() -> nn.Module:
    """Takes no count, and returns a mean."""
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0}
    return T5ForConditionalGeneration(T5Config(vocab_size=VOCABULARY, decoder_start_token_id=0, **sizes))


class Plugin(nn.Module):
    """Takes any arguments and returns a mean over the labels of its own choice of shift."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)

    def loss_function(self) -> None:
        """As every model of transformers has one."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None, **kwargs: Any) -> dict[str, Any]:
        logits = self.head(self.embed(input_ids))
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY), labels[:, 1:].reshape(-1))
        return {"loss": loss, "logits": logits}


MODELS: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "qwen3": (qwen3, True), "bart": (bart, False), "t5": (t5, False), "plugin": (Plugin, True)
}  # fmt: skip
"""Name → how it is made, whether it shifts the labels itself."""

ENCODER_DECODERS = ("bart", "t5")


def made(name: str) -> nn.Module:
    prepare_for_transformers()
    torch.manual_seed(0)
    return MODELS[name][0]().double().eval()


def batch(seed: int, labelled: tuple[int, ...], shifts: bool) -> dict[str, Any]:
    """One row for each entry of `labelled`, with so many labels at its end."""
    ids = torch.randint(3, VOCABULARY, (len(labelled), 9), generator=torch.Generator().manual_seed(seed))
    labels = torch.full_like(ids, -100)
    for row, count in enumerate(labelled):
        labels[row, 9 - count :] = ids[row, 9 - count :]
    shifted = labels
    if shifts:
        shifted = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], -100)], dim=1)
    names = [f"{seed}.{row}" for row in range(len(labelled))]
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "labels": labels,
        "shift_labels": shifted,
        "sample_ids": names,
    }


def ours(name: str, batches: list[dict[str, Any]]) -> tuple[torch.Tensor, nn.Module]:
    model = made(name)
    objective = ModelLoss(model)
    prepared = [objective.prepare(each) for each in batches]
    divisor = objective.count(prepared)["loss"] or 1
    terms = [objective.terms(model, each)["loss"] / divisor for each in prepared]
    for term in terms:
        term.backward()
    return torch.stack(terms).sum().detach(), model


def plain(name: str, batches: list[dict[str, Any]]) -> tuple[torch.Tensor, nn.Module]:
    """The mean of −log p over all labels of all batches, from the logits of the plain model."""
    model, sums, count = made(name), torch.zeros((), dtype=torch.float64), 0
    for each in batches:
        inputs = {key: each[key] for key in ("input_ids", "attention_mask")}
        if name in ENCODER_DECODERS:
            start = torch.full((len(each["labels"]), 1), model.config.decoder_start_token_id)
            shifted = torch.cat([start, each["labels"][:, :-1]], dim=1)
            inputs["decoder_input_ids"] = shifted.masked_fill(shifted == -100, model.config.pad_token_id)
        output = model(**inputs)
        logits = output["logits"] if isinstance(output, dict) else output.logits
        targets = each["shift_labels"].reshape(-1)
        sums = sums + F.cross_entropy(logits.reshape(-1, VOCABULARY), targets, ignore_index=-100, reduction="sum")
        count += int((targets != -100).sum())
    loss = sums / count
    loss.backward()
    return loss.detach(), model


def unless_logits(tensor: torch.Tensor) -> torch.Tensor:
    """Transformers' loss rounds logits to fp32, which would be all that is seen."""
    is_double = tensor.dtype == torch.float64
    return tensor if is_double and tensor.shape[-1:] == (VOCABULARY,) else tensor.to(torch.float32)


@pytest.mark.parametrize("name", MODELS)
def test_it_is_the_mean_over_all_label_tokens_however_they_are_split(name: str) -> None:
    shifts = MODELS[name][1]
    batches = [batch(1, (5, 2), shifts), batch(2, (8, 7), shifts), batch(3, (1, 0), shifts)]
    with mock.patch.object(torch.Tensor, "float", unless_logits):
        loss, model = ours(name, batches)
    expected, reference = plain(name, batches)
    assert loss.item() == pytest.approx(expected.item(), abs=1e-12)
    for own, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert (own.grad - other.grad).abs().max() < 1e-12


@pytest.mark.parametrize("name", MODELS)
def test_a_micro_batch_without_labels_adds_nothing_and_is_a_number(name: str) -> None:
    shifts = MODELS[name][1]
    full, blank = batch(1, (5, 2), shifts), batch(2, (0, 0), shifts)
    with mock.patch.object(torch.Tensor, "float", unless_logits):
        loss, model = ours(name, [full, blank])
        alone, reference = ours(name, [full])
    assert loss.item() == alone.item()
    for own, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(own.grad, other.grad)
    assert (blank["labels"] == -100).all(), "the batch itself is untouched"


@pytest.mark.parametrize("rows", [1, 2, 4], ids=["4x1", "2x2", "1x4"])
@pytest.mark.parametrize("name", ENCODER_DECODERS)
def test_an_encoder_decoder_counts_the_labels_of_a_plain_collator_where_they_stand(name: str, rows: int) -> None:
    whole = batch(1, (9, 9, 9, 9), shifts=False)
    for row, count in enumerate((1, 7, 3, 2)):
        whole["labels"][row, count:] = -100  # targets of a decoder begin with its first token
    whole["shift_labels"] = whole["labels"]
    given = {key: whole[key].split(rows) for key in ("input_ids", "attention_mask", "labels")}
    split = [dict(zip(given, tensors, strict=True)) for tensors in zip(*given.values(), strict=True)]
    with mock.patch.object(torch.Tensor, "float", unless_logits):
        loss, model = ours(name, [completed(each, ["row"] * rows) for each in split])
    expected, reference = plain(name, [whole])
    assert loss.item() == pytest.approx(expected.item(), abs=1e-12)
    for own, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert (own.grad - other.grad).abs().max() < 1e-12


def test_without_labels_micro_batches_weigh_their_samples() -> None:
    objective = ModelLoss(Plugin())
    plain_rows = {"input_ids": torch.zeros(3, 2, dtype=torch.long), "sample_ids": ["a", "b", "c"]}
    blank = {"input_ids": torch.zeros(1, 2, dtype=torch.long), "sample_ids": ["c"], "blank_rows": 1}
    assert objective.count([objective.prepare(plain_rows), objective.prepare(blank)]) == {"loss": 3}


def test_the_log_says_what_it_is() -> None:
    assert (
        ModelLoss(made("qwen3")).describe()
        == "the model's own, as the mean over label tokens, which is given their number"
    )
    assert "told" not in ModelLoss(nn.Identity()).describe()
