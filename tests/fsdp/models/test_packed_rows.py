"""Samples packed into one row train as each by itself: loss and every gradient, in fp64, for every family; and where
one of the parts that keep them apart is taken out, the same comparison fails.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from mindspeed_mm.core.batch import ENGINE_KEYS
from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.data.data_utils.data_collator import GenericCollator
from mindspeed_mm.fsdp.data.data_utils.positions import (
    RopeIndexPositions,
    TextPositions,
    as_whole_numbers,
    find_rope_index,
)
from mindspeed_mm.fsdp.models.behaviour import packed_rows
from mindspeed_mm.fsdp.models.behaviour.packed_rows import apply_packed_rows
from mindspeed_mm.fsdp.ops.attention import BORDER_KEYS, AttentionError, without_borders
from mindspeed_mm.fsdp.params.data_args import CollateParam
from mindspeed_mm.tasks.verify.precision import keeping_double
from tests.helpers.packed_families import FAMILIES as USUAL
from tests.helpers.packed_families import PAD, Family, InDouble, Plugin, of, transformers
from tests.helpers.packed_more_families import MORE
from tests.helpers.parity import ParityError, StepRecord, compare_steps, record_step

FAMILIES = USUAL | MORE
DEFAULT = ("qwen3", "gpt_oss", "qwen3_vl", "qwen3_5", "omni", "lfm2")
"""Of the default run; the others are slow ones."""

every_family = pytest.mark.parametrize(
    "name", [name if name in DEFAULT else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]
)


def positions_of(family: Family, config: Any) -> Any:
    config.architectures = [family.model]
    owner = find_rope_index(config)
    return TextPositions() if owner is None else RopeIndexPositions(owner, config)


def collator(family: Family, positions: Any = None, multiple: int = 1) -> GenericCollator:
    tokenizer = mock.Mock(spec=["pad_token_id"], pad_token_id=PAD)
    plugin: Any = Plugin(family.marks)
    return GenericCollator(tokenizer, plugin, CollateParam(pad_to_multiple_of=multiple), positions)


def step(model: Any, batches: list[dict[str, Any]]) -> StepRecord:
    """Σ cross-entropy / 30, and every gradient."""
    total = torch.zeros((), dtype=torch.float64)
    for batch in batches:
        inputs = {key: value for key, value in batch.items() if key not in ENGINE_KEYS}
        logits = model(**inputs, use_cache=False).logits
        total = total + F.cross_entropy(logits.flatten(0, -2), batch["shift_labels"].flatten(), reduction="sum")
    loss = total / 30
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return record_step(model, loss, torch.nn.utils.get_total_norm(gradients))


@cache
def one_by_one(name: str) -> StepRecord:
    """Every sample alone in its batch, by the model as it comes."""
    family = FAMILIES[name]
    model, collate = family.build(), collator(family)
    with keeping_double(), InDouble():
        return step(model, [collate([sample]) for sample in family.samples() if len(sample["input_ids"]) > 1])


def packed(
    name: str, *, prepare: Callable[..., None] = apply_packed_rows, change: Any = None, **built: Any
) -> StepRecord:
    """All samples in one row with padding behind them. `change`: made to the batch."""
    family = FAMILIES[name]
    model = family.build(**built)
    batch = collator(family, positions_of(family, model.config), multiple=16)(family.samples())
    if change is not None:
        batch = change(batch)
    prepare(model)
    with keeping_double(), InDouble():
        return step(model, [batch])


@every_family
def test_packed_equals_one_by_one(name: str) -> None:
    compare_steps(one_by_one(name), packed(name), FAMILIES[name].bound)


# --- planted leaks ----------------------------------------------------------------------------------------------------


def joined(batch: dict[str, Any]) -> dict[str, Any]:
    """The first and second sample lose the border between them."""
    borders = torch.cat([batch["cu_seq_lens_q"][:1], batch["cu_seq_lens_q"][2:]])
    longest = int(borders.diff().max())
    return batch | {
        "cu_seq_lens_q": borders, "cu_seq_lens_k": borders, "max_length_q": longest, "max_length_k": longest
    }  # fmt: skip


@every_family
def test_a_lost_border_is_seen(name: str) -> None:
    with pytest.raises(ParityError):
        compare_steps(one_by_one(name), packed(name, change=joined), FAMILIES[name].bound)


def in_one_count(batch: dict[str, Any]) -> dict[str, Any]:
    """Positions that do not start again."""
    positions = batch["position_ids"]
    return batch | {"position_ids": torch.arange(positions.shape[-1]).expand_as(positions)}


@pytest.mark.parametrize("name", ["qwen3_vl", "omni"])
def test_positions_of_media_that_are_counted_as_text_are_seen(name: str) -> None:
    with pytest.raises(ParityError):
        compare_steps(one_by_one(name), packed(name, change=in_one_count), FAMILIES[name].bound)


def test_three_rows_of_positions_and_transformers_own_packing_leak() -> None:
    """What packing by positions alone does to models with mRoPE: why borders and a fourth row are sent."""

    def three_rows(batch: dict[str, Any]) -> dict[str, Any]:
        return without_borders(batch) | {"position_ids": batch["position_ids"][1:]}

    def nothing(model: Any) -> None:
        pass

    with pytest.raises(ParityError):
        compare_steps(one_by_one("qwen3_vl"), packed("qwen3_vl", prepare=nothing, change=three_rows), 1e-10)


def test_a_state_that_runs_on_is_seen() -> None:
    """Delta nets that are not cut: transformers refuses borders without a kernel of its own, and leaks without them."""

    def uncut(model: Any) -> None:
        with mock.patch.object(packed_rows, "SegmentedForward", lambda mixer: leaking(mixer.forward)):
            apply_packed_rows(model)

    def leaking(forward: Any) -> Any:
        return lambda *args, **kwargs: forward(*args, **without_borders(kwargs))

    with pytest.raises(ParityError):
        compare_steps(one_by_one("qwen3_5"), packed("qwen3_5", prepare=uncut), 1e-10)


@pytest.mark.edge("F3")
def test_a_tower_is_not_told_the_texts_borders() -> None:
    """Qwen3-VL hands on what it is given beside its own arguments."""
    told: list[set[str]] = []

    def watch(_: Any, __: Any, kwargs: dict[str, Any]) -> None:
        told.append(set(kwargs))

    def watched(model: Any) -> None:
        apply_packed_rows(model)
        model.model.visual.register_forward_pre_hook(watch, with_kwargs=True)

    packed("qwen3_vl", prepare=watched)
    assert told and all(keys.isdisjoint(BORDER_KEYS) for keys in told)


@pytest.mark.edge("F3")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "part", "left_out"),
    [
        ("kimi_k25", "_models_beside_the_decoder", lambda model: []),
        ("minimax_m3_vl", "_models_beside_the_decoder", lambda model: []),
        ("gemma3", "blocks_key", lambda model: None),
        ("gemma4", "blocks_key", lambda model: None),
        ("hrm_text prefixes", "blocks_key", lambda model: None),
        ("molmo2", "blocks_key", lambda model: None),
        ("bailing_hybrid", "find_mixers", lambda model: []),
        ("lfm2_vl", "find_mixers", lambda model: []),
    ],
)
def test_what_is_left_out_is_seen(monkeypatch: pytest.MonkeyPatch, name: str, part: str, left_out: Any) -> None:
    """Towers that are told the text's borders, images that are not blocks, states that run on."""
    monkeypatch.setattr(packed_rows, part, left_out)
    monkeypatch.setattr(packed_rows, "check_packed_rows", lambda *_, **__: None)
    # Once a run has put our kernel under the towers of this process, they get the borders twice: a TypeError.
    with pytest.raises((ParityError, AttentionError, TypeError, ValueError)):
        compare_steps(one_by_one(name), packed(name), 1e-10)


# --- with other features ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3_5", pytest.param("gpt_oss", marks=pytest.mark.slow)])
def test_packed_with_recompute(name: str) -> None:
    def prepare(model: Any) -> None:
        apply_packed_rows(model)
        model.gradient_checkpointing_enable({"use_reentrant": False})

    compare_steps(one_by_one(name), packed(name, prepare=prepare), 1e-10)


def test_documents_of_nearly_one_length_go_through_a_mixer_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on an accelerator."""
    monkeypatch.setattr(packed_rows, "waste_on", lambda device: 10.0)
    compare_steps(one_by_one("qwen3_5"), packed("qwen3_5"), 1e-10)


def test_buckets() -> None:
    assert packed_rows.buckets([5, 1, 5, 4, 0, 1], 0.0) == [[0, 2], [3], [1, 5]]
    assert packed_rows.buckets([5, 1, 5, 4, 0, 1], 0.25) == [[0, 2, 3], [1, 5]]
    lengths = torch.randint(1, 2000, (100,), generator=torch.Generator().manual_seed(0)).tolist()
    for bucket in packed_rows.buckets(lengths, 0.25):
        real = sum(lengths[n] for n in bucket)
        assert max(lengths[n] for n in bucket) * len(bucket) <= 1.25 * real
    assert sorted(n for bucket in packed_rows.buckets(lengths, 0.25) for n in bucket) == list(range(100))


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["eager", "sdpa", "flex", "flex_attention"])
def test_kernels_that_know_no_borders_are_refused(attention: str) -> None:
    with pytest.raises(ConfigError, match=r"model.attn_implementation.*Leave it out"):
        apply_packed_rows(FAMILIES["qwen3"].build(), attention=attention)


@pytest.mark.parametrize(
    ("config", "model", "words"),
    [
        (transformers.WhisperConfig(), "WhisperForConditionalGeneration", "encoder-decoder"),
        (transformers.MambaConfig(num_hidden_layers=1), "MambaForCausalLM", "not behind transformers' interface"),
        (transformers.RecurrentGemmaConfig(num_hidden_layers=3), "RecurrentGemmaForCausalLM", "carry a state"),
        (transformers.Llama4TextConfig(num_hidden_layers=2), "Llama4ForCausalLM", "layers of type chunked_attention"),
        (transformers.MllamaTextConfig(num_hidden_layers=1), "MllamaForCausalLM", "see the pictures of a whole row"),
    ],
)
def test_models_that_mix_documents_are_refused(config: Any, model: str, words: str) -> None:
    with torch.device("meta"):
        made = getattr(transformers, model)._from_config(config)
    with pytest.raises(ConfigError, match=words):
        apply_packed_rows(made)


def test_attention_with_a_convolution_inside_is_refused() -> None:
    """Zaya's: its queries and keys are mixed over tokens by a module that is not told the borders."""
    config = of("ZayaConfig", num_hidden_layers=1)()
    with torch.device("meta"):
        model = transformers.ZayaForCausalLM._from_config(config)
    assert packed_rows.find_mixers(model) == []
    with pytest.raises(ConfigError, match=r"carry a state[\s\S]*layers of type hybrid"):
        apply_packed_rows(model)


def test_attention_that_looks_no_kernel_up_is_refused() -> None:
    """Though the file of its decoder knows the table: documents would see each other, and nothing would say so."""

    class Own(torch.nn.Module):
        def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, None]:
            return F.scaled_dot_product_attention(*[hidden_states] * 3, is_causal=True), None

    model: Any = FAMILIES["qwen3"].build()
    for layer in model.model.layers:
        layer.self_attn = Own()
    with pytest.raises(ConfigError, match="not behind transformers' interface"):
        apply_packed_rows(model)


def test_a_model_that_does_not_name_its_text_model_is_told_so() -> None:
    class Sketch(transformers.PreTrainedModel):  # type: ignore[misc]
        config_class = transformers.LlamaConfig

        def __init__(self, config: transformers.LlamaConfig) -> None:
            super().__init__(config)
            self.text = transformers.LlamaModel(config)

        def forward(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:
            return self.text(input_ids, **kwargs)

    class Named(Sketch):
        def get_decoder(self) -> torch.nn.Module:
            return self.text

    config = transformers.LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    with pytest.raises(ConfigError, match=r"or `get_decoder\(\)` does not name its text model"):
        apply_packed_rows(Sketch(config))
    apply_packed_rows(Named(config))


def test_a_model_of_a_plugin_must_take_the_borders() -> None:
    class Plain(torch.nn.Module):
        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return input_ids

    with pytest.raises(ConfigError, match="takes no cu_seq_lens_q"):
        apply_packed_rows(Plain())


def test_positions_that_are_no_whole_numbers_arrive_as_they_are() -> None:
    positions = torch.tensor([[0.0, 1.5, 2.25]])
    sent = as_whole_numbers(positions)
    assert sent.dtype == torch.int32 and as_whole_numbers(positions.round()).dtype == torch.int64
    _, received = packed_rows.read_positions(torch.nn.Identity(), (), {"position_ids": sent}) or ((), {})
    assert torch.equal(received["position_ids"], positions)
