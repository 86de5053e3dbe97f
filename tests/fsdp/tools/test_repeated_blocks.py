"""A few blocks of each kind are simulated, and the forecast is that of all, to the byte."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.fsdp.params.argument import Arguments
from mindspeed_mm.fsdp.params.cards import ModelCard, families
from mindspeed_mm.fsdp.params.loader import load_config
from mindspeed_mm.fsdp.tools.memory_model import kinds, repeats, unrolling
from mindspeed_mm.fsdp.tools.memory_model.kinds import find_alike, kinds_of, simulated_periods
from mindspeed_mm.fsdp.tools.memory_model.ledger import BookedWork, Label, MemoryLedger
from mindspeed_mm.fsdp.tools.memory_model.unrolling import NotAlike, SimulatedRun, unrolled
from mindspeed_mm.fsdp.train.memory import forecast as forecasts
from mindspeed_mm.fsdp.train.memory.forecast import forecast
from tests.helpers.needed_memory import asked_of, with_record

TOKENS = 48
SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 96,
}
QWEN3 = SMALL | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
GEMMA2 = SMALL | {"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"], "sliding_window": 8}
DEEPSEEK = SMALL | {
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 2,
    "num_nextn_predict_layers": 1,
}
del DEEPSEEK["head_dim"]
NEXT = SMALL | {
    "model_type": "qwen3_next",
    "architectures": ["Qwen3NextForCausalLM"],
    "num_experts": 0,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}


def written(folder: Path, config: dict[str, Any], layers: int) -> Path:
    """A folder with a configuration of so many layers, and no weights."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers}))
    return folder


def arguments_of(model: Path, *words: str) -> Arguments:
    """A run on rows of text."""
    basic = {"dataset": "rows.jsonl", "cutoff_len": TOKENS}
    sections = {"model": {"model_name_or_path": str(model)}, "data": {"dataset_param": {"basic_parameters": basic}}}
    return load_config(sections | {"training": {"train_iters": 1}}, words).arguments


def rows() -> Batch:
    """A micro-batch."""
    ids = torch.zeros(1, TOKENS, dtype=torch.long)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "labels": ids.clone(),
        "shift_labels": ids.clone(),
    }


@contextmanager
def counting() -> Iterator[Counter[str]]:
    """How many blocks ran, by class, and which simulations by kinds were given up."""
    calls: Counter[str] = Counter()
    call = repeats.RepeatedBlocks._call

    def noted(self: repeats.RepeatedBlocks, index: int, *args: Any, **kwargs: Any) -> Any:
        module = self._modules[index]
        own = module._call_impl

        def run(*args: Any, **kwargs: Any) -> Any:
            calls[type(module).__name__] += 1
            return own(*args, **kwargs)

        with mock.patch.object(module, "_call_impl", run):
            return call(self, index, *args, **kwargs)

    def forecast_or_not(*args: Any, **kwargs: Any) -> Any:
        try:
            return simulated(*args, **kwargs)
        except Exception as error:
            calls[str(error)] += 1
            raise

    simulated = forecasts._forecast
    with (
        mock.patch.object(repeats.RepeatedBlocks, "_call", noted),
        mock.patch.object(forecasts, "_forecast", forecast_or_not),
    ):
        yield calls


def both(arguments: Arguments, world_size: int = 1, device_type: str = "cuda") -> tuple[Any, Any]:
    """The forecast by kinds, which must not be given up, and that of all blocks."""
    with counting() as calls:
        by_kinds = forecast(arguments, rows(), world_size, device_type)
    assert calls and all(name.isidentifier() for name in calls), calls
    return by_kinds, forecast(arguments, rows(), world_size, device_type, whole=True)


RECOMPUTE = "features.recompute=true"
SELECTIVE = "features.recompute_plan.mode=selective"
ACCUMULATE = "training.gradient_accumulation_steps=2"
LORA = "training.lora.enable=true"
OFFLOAD = "features.enable_activation_offload=true"
CHUNKS = "features.enable_chunk_loss=true"
BF16 = "parallel.fsdp_plan.param_dtype=bf16"
STAGES = ("parallel.pipeline_parallel_size=2", "training.gradient_accumulation_steps=2")
EXPERTS = "parallel.expert_parallel_size=2"
CASES = [
    pytest.param(QWEN3, 7, 1, (ACCUMULATE, OFFLOAD), id="offload"),
    pytest.param(QWEN3, 6, 2, (RECOMPUTE, SELECTIVE, LORA, BF16), id="selective lora"),
    pytest.param(QWEN3, 11, 2, (RECOMPUTE, BF16, *STAGES), id="unequal stages"),
    pytest.param(GEMMA2, 10, 1, (CHUNKS,), id="windows"),
    pytest.param(DEEPSEEK, 9, 2, (RECOMPUTE, EXPERTS, "model.mtp_num_layers=1"), id="first dense, further heads"),
]
MORE = [
    pytest.param(QWEN3, 6, 1, (), id="plain"),
    pytest.param(QWEN3, 7, 4, (BF16, ACCUMULATE, "parallel.fsdp_plan.reshard_after_forward=false"), id="gathered"),
    pytest.param(QWEN3, 8, 2, ("model.freeze=['model.layers.0','model.layers.1','model.embed_tokens']",), id="frozen"),
    pytest.param(QWEN3, 9, 2, (RECOMPUTE, "features.recompute_plan.apply_modules=['model.layers.{0-2}']"), id="some"),
    pytest.param(QWEN3, 7, 2, ("parallel.fsdp_plan.cpu_offload=true",), id="parameters on the host"),
    pytest.param(QWEN3, 7, 2, ("parallel.tensor_parallel_size=2",), id="tensor parallel"),
    pytest.param(QWEN3, 7, 2, ("parallel.ulysses_parallel_size=2",), id="context parallel"),
    pytest.param(NEXT, 22, 1, (RECOMPUTE,), id="hybrid"),
    pytest.param(DEEPSEEK, 9, 2, (ACCUMULATE, OFFLOAD, BF16), id="experts"),
]


@pytest.mark.parametrize(
    ("config", "layers", "ranks", "words"),
    [*CASES, *(pytest.param(*case.values, id=case.id, marks=pytest.mark.slow) for case in MORE)],
)
def test_the_forecast_by_kinds_is_that_of_all_blocks(
    config: dict[str, Any], layers: int, ranks: int, words: tuple[str, ...], tmp_path: Path
) -> None:
    by_kinds, whole = both(arguments_of(written(tmp_path / "model", config, layers), *words), ranks)
    assert by_kinds == whole and whole.activations > 0


def test_as_many_blocks_run_whatever_the_depth(tmp_path: Path) -> None:
    """Of 20 layers and of 61; all but those of the kind that is repeated."""
    counts = []
    for layers in (20, 61):
        arguments = arguments_of(written(tmp_path / str(layers), DEEPSEEK, layers), RECOMPUTE)
        with counting() as calls:
            peak = forecast(arguments, rows(), device_type="cuda").peak
        counts.append(dict(calls))
        assert peak > 0
    assert counts[0] == counts[1] == {"DeepseekV3DecoderLayer": simulated_periods(1)}


@pytest.mark.slow
def test_what_blocks_leave_to_the_end_of_the_step_is_simulated(tmp_path: Path) -> None:
    """Autograd's older way of recomputation keeps the blocks' inputs as long as the graph."""
    words = (RECOMPUTE, "features.recompute_plan.use_reentrant=true")
    arguments = arguments_of(written(tmp_path / "model", QWEN3, 6), *words)
    with counting() as calls:
        by_kinds = forecast(arguments, rows(), device_type="cuda")
    assert any("takes or frees" in name for name in calls)
    assert by_kinds == forecast(arguments, rows(), device_type="cuda", whole=True)


ALL_ALIKE = mock.patch.object(kinds._Likeness, "holds", lambda _: True)


@pytest.mark.parametrize(
    ("config", "layers"),
    [(GEMMA2, 9), (DEEPSEEK, 6), (DEEPSEEK | {"first_k_dense_replace": 3}, 7)],
    ids=["windows", "two dense", "three dense"],
)
def test_two_kinds_taken_for_one_are_noticed(config: dict[str, Any], layers: int, tmp_path: Path) -> None:
    """Forgotten windows show in the calls, layers of other sizes in the books."""
    arguments = arguments_of(written(tmp_path / "model", config, layers))
    whole = forecast(arguments, rows(), device_type="cuda", whole=True)
    with ALL_ALIKE, counting() as calls:
        assert forecast(arguments, rows(), device_type="cuda") == whole
    given_up = [name for name in calls if not name.isidentifier()]
    assert given_up if "n_group" in config else calls["Gemma2DecoderLayer"] == layers


def test_without_a_look_at_blocks_and_books_the_forecast_is_wrong(tmp_path: Path) -> None:
    arguments = arguments_of(written(tmp_path / "model", DEEPSEEK | {"first_k_dense_replace": 3}, 6))
    whole = forecast(arguments, rows(), device_type="cuda", whole=True)
    with (
        ALL_ALIKE,
        mock.patch.object(unrolling._Unrolling, "_described", lambda *_: None),
        mock.patch.object(unrolling._Unrolling, "_taken", lambda *_: None),
        mock.patch.object(unrolling._Unrolling, "_check_neighbours", lambda *_: None),
    ):
        assert forecast(arguments, rows(), device_type="cuda") != whole


# --- kinds ------------------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    """A block that knows its number."""

    def __init__(self, number: int, width: int = 4, window: int = 0) -> None:
        super().__init__()
        self.layer_idx, self.window, self.settings = number, window, {"gate": partial(max, 0)}
        self.up = nn.Linear(4, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """(…, 4) → (…, width)."""
        return torch.as_tensor(self.up(hidden))


def numbers_of(layers: list[Layer], change: Callable[[nn.Module], object] = lambda model: None) -> list[int]:
    """Kinds of the layers of a model."""
    model = nn.Sequential(*layers)
    change(model)
    return kinds_of(model, [str(number) for number in range(len(layers))], [])[0]


def test_what_makes_a_kind() -> None:
    assert numbers_of([Layer(0), Layer(1), Layer(2, width=5), Layer(3)]) == [0, 0, 1, 0]
    assert numbers_of([Layer(0), Layer(1, window=7), Layer(2)]) == [0, 1, 0]
    assert numbers_of([Layer(0), Layer(1), Layer(1)]) == [0, 0, 1]  # what counts must count the blocks
    assert numbers_of([Layer(0), Layer(1)], lambda model: model[1].up.bias.requires_grad_(False)) == [0, 1]
    assert numbers_of([Layer(0), Layer(1)], lambda model: setattr(model[1].up, "weight", model[0].up.weight)) == [0, 1]
    assert numbers_of([Layer(0), Layer(1)], lambda model: model[1].register_forward_hook(print)) == [0, 1]
    assert numbers_of([Layer(0), Layer(1)], lambda model: model[1].settings.update(gate=partial(max, 1))) == [0, 1]
    assert numbers_of([Layer(0), Layer(1)], lambda model: model[1].register_buffer("scale", torch.ones(1))) == [0, 1]
    assert numbers_of([Layer(0), Layer(1)], lambda model: model[1].eval()) == [0, 1]
    assert numbers_of([Layer(0), Layer(1)], lambda model: model[1].up.weight.data.fill_(3)) == [0, 0]


def test_where_kinds_repeat_themselves() -> None:
    assert find_alike([0] * 5) == []
    assert find_alike([0] * 6) == [(0, 6, 1)]
    assert find_alike([0, 0, *[1] * 58, 2]) == [(2, 60, 1)]
    assert find_alike([0, 0, 1] * 6 + [0, 0]) == [(0, 18, 3)]
    assert find_alike([0, 1] * 5 + [2] * 6) == [(0, 10, 2), (10, 16, 1)]


# --- the books --------------------------------------------------------------------------------------------------------


def books(blocks: int, *, larger: int = -1, escapes: bool = False, sums: str = "") -> MemoryLedger:
    """A forward and a backward pass of blocks that keep something, hand something on, and leave a gradient. With
    `sums`, each adds to the gradient of what all of them read; the last one begins it, under this category."""
    ledger, kept, summed = MemoryLedger(), [], -1
    ledger.begin("forward")
    handed = ledger.take(Label("activations", "embedding"), 10)
    for number in range(blocks):
        ledger.enter(BookedWork("forward", 0, f"b{number}"))
        inner = ledger.take(Label("temporary", "block"), 7)
        kept.append((handed, ledger.take(Label("activations", "block"), 9 if number == larger else 3)))
        ledger.give_back(inner)
        handed = ledger.take(Label("activations", "block"), 5)
    ledger.note()
    ledger.begin("backward")
    coming = ledger.take(Label("temporary", "loss"), 5)
    for number in reversed(range(blocks)):
        ledger.enter(BookedWork("backward", 0, f"b{number}"))
        ledger.give_back(handed)
        handed, own = kept[number]
        ledger.take(Label("gradients", "block"), 8)
        going = ledger.take(Label("temporary", "block"), 5)
        if sums and summed < 0:
            summed = ledger.take(Label(sums, "block"), 6)
        elif sums:
            added = ledger.take(Label("temporary", "block"), 6)
            before, summed = summed, ledger.take(Label("temporary", "block"), 6)
            ledger.give_back(before)
            ledger.give_back(added)
        if not escapes:
            ledger.give_back(own)
        ledger.give_back(coming)
        coming = going
    ledger.enter(BookedWork("", 0, ""))
    for _, own in kept if escapes else ():
        ledger.give_back(own)
    return ledger


RUN = SimulatedRun(("b0", "b1", "b2", "b3", "b4"), 1, 6)


def read(ledger: MemoryLedger) -> tuple[object, ...]:
    """What a prediction takes from books."""
    moment, log = ledger.peak(), ledger.log
    held = [ledger.alive_at(at) for at in (moment, *log.moments)]
    return moment, held, ledger.phase_at(moment), ledger.resident(), len(log.events), log.moments, log.phases


@pytest.mark.parametrize("sums", ["", "temporary", "gradients"])
def test_what_was_left_out_is_written(sums: str) -> None:
    assert read(MemoryLedger(unrolled(books(5, sums=sums).log, [RUN]))) == read(books(11, sums=sums))


def test_books_of_other_blocks_stay_as_they_are() -> None:
    assert read(MemoryLedger(unrolled(books(4).log, []))) == read(books(4))
    elsewhere = SimulatedRun(("c0", "c1", "c2", "c3", "c4"), 1, 6)  # of another rank
    assert read(MemoryLedger(unrolled(books(4).log, [elsewhere]))) == read(books(4))


@pytest.mark.parametrize("ledger", [books(5, larger=2), books(5, escapes=True)], ids=["sizes", "escapes"])
def test_blocks_that_differ_are_not_written(ledger: MemoryLedger) -> None:
    with pytest.raises(NotAlike):
        unrolled(ledger.log, [RUN])


# --- all families -----------------------------------------------------------------------------------------------------


TOO_LONG = "hunyuan_video_1"
"""Beginning of the names of families whose attention masks, of all pairs of tokens, are computed for real: minutes a
block."""
FAMILIES = [card for card in families() if not card.name.startswith(TOO_LONG) and any(with_record(card))]


@pytest.mark.slow
@pytest.mark.parametrize("card", FAMILIES, ids=lambda card: card.name)
@pytest.mark.parametrize("method", ["full", "lora"])
def test_of_every_family(card: ModelCard, method: Any, tmp_path: Path) -> None:
    hub = min(with_record(card), key=lambda name: card.released[name] or float("inf"))
    arguments, batch = asked_of(card, hub, method, tmp_path / "model")
    assert forecast(arguments, batch, device_type="cuda") == forecast(arguments, batch, device_type="cuda", whole=True)
