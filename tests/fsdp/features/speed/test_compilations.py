"""Blocks are compiled twice at most, whatever the lengths of their rows; what would be compiled a third time computes
by plain operations where nobody asked for graphs, and is told."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mindspeed_mm.fsdp.features.speed.choice import MOST_COMPILATIONS, SpeedChoice
from mindspeed_mm.fsdp.features.speed.compiled_blocks import CompiledBlocks, compile_modules
from mindspeed_mm.fsdp.features.speed.fused_kernels import apply_fused_kernels
from mindspeed_mm.fsdp.models.behaviour.packed_rows import apply_packed_rows
from mindspeed_mm.fsdp.models.facts import facts_of
from mindspeed_mm.fsdp.models.structure.spec import find_blocks
from mindspeed_mm.fsdp.ops.attention import register_attention
from mindspeed_mm.fsdp.ops.compiled_calls import CountedBackend
from mindspeed_mm.fsdp.params.feature_args import CompilePlan
from tests.helpers.runs import lines, train
from tests.helpers.tiny_models import make_tiny_qwen3
from tests.helpers.tiny_run import make_rows, make_tiny_run

EAGER = CompilePlan(backend="eager")
STEPS = 50


@pytest.fixture(autouse=True)
def _nothing_compiled_before() -> None:
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_qwen3(tmp_path_factory.mktemp("tiny"), num_hidden_layers=3)


def build(folder: Path) -> Any:
    from transformers import Qwen3ForCausalLM

    model = Qwen3ForCausalLM.from_pretrained(folder)
    model.set_attn_implementation(register_attention())
    return model.train()


def padded() -> Iterator[dict[str, Any]]:
    """Two rows of fifty lengths; the last batch of an epoch has one."""
    for step in range(STEPS):
        length = 5 + step * 7 % 43
        rows = 1 if step % 10 == 9 else 2
        yield {"input_ids": torch.randint(10, 99, (rows, length)), "attention_mask": torch.ones(rows, length).long()}


def packed() -> Iterator[dict[str, Any]]:
    """A row of one to five documents; that of the second step fills its row."""
    for step in range(STEPS):
        lengths = [3 + (step * place) % 11 for place in range(1, 2 + step % 5 if step != 1 else 2)]
        borders = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
        yield {
            "input_ids": torch.randint(10, 99, (1, sum(lengths))),
            "position_ids": torch.cat([torch.arange(length) for length in lengths])[None],
            "cu_seq_lens_q": borders,
            "cu_seq_lens_k": borders,
            "max_length_q": max(lengths),
            "max_length_k": max(lengths),
        }


def steps(model: nn.Module, batches: Iterator[dict[str, Any]], plain: nn.Module | None = None) -> None:
    """Forward and backward; a plain model's outputs are compared."""
    for batch in batches:
        logits = model(**batch, use_cache=False).logits
        logits.square().mean().backward()
        if plain is not None:
            torch.testing.assert_close(logits, plain(**batch, use_cache=False).logits, rtol=1e-4, atol=1e-5)


def counted(model: nn.Module) -> dict[str, int]:
    compiled = facts_of(model).noted(CompiledBlocks)
    assert compiled is not None
    return compiled.counts()


@pytest.mark.parametrize(
    ("kind", "most", "fused"),
    [
        pytest.param(padded, None, False, id="padded, true"),
        pytest.param(padded, MOST_COMPILATIONS, True, id="padded, fused, auto", marks=pytest.mark.slow),
        pytest.param(packed, None, True, id="packed, fused, true", marks=pytest.mark.slow),
        pytest.param(packed, MOST_COMPILATIONS, False, id="packed, auto"),
    ],
)
def test_blocks_are_compiled_twice_in_fifty_steps(folder: Path, kind: Any, most: int | None, fused: bool) -> None:
    plain = build(folder)
    if kind is packed:
        apply_packed_rows(plain)
    model = copy.deepcopy(plain)
    if fused:
        apply_fused_kernels(model, SpeedChoice("torch.compile", "a test"))
    compile_modules(model, EAGER, find_blocks(model), most=most)
    steps(model, kind(), plain)
    numbers = counted(model)
    assert numbers["calls"] == STEPS * 3
    if kind is packed or most is not None:
        assert numbers["compilations"] == 2
    else:
        assert numbers["compilations"] == 3  # a batch of one row needs a graph of its own
    if kind is packed or most is None:
        assert numbers["compiled_calls"] == numbers["calls"]
    else:
        assert numbers["calls"] - numbers["compiled_calls"] == 5 * 3


@pytest.mark.parametrize("trained", ["all", pytest.param("last block", marks=pytest.mark.slow), "norms"])
def test_what_is_trained_of_blocks_makes_kinds_not_compilations(folder: Path, trained: str) -> None:
    """The first block's input has no gradient, nor have frozen blocks' parameters."""
    model = build(folder)
    for name, parameter in model.named_parameters():
        wanted = {"all": "embed" not in name, "last block": "layers.2" in name, "norms": "layernorm" in name}
        parameter.requires_grad_(wanted[trained])
    compile_modules(model, EAGER, find_blocks(model), most=MOST_COMPILATIONS)
    steps(model, batches=(batch for batch in padded() if len(batch["input_ids"]) == 2))
    numbers = counted(model)
    assert numbers["compilations"] == 2 and numbers["compiled_calls"] == numbers["calls"]


def specialise(model: Any) -> None:
    """Each block multiplies by a number of a table, whose index changes with every step."""
    table = [1.0 + place / 64 for place in range(64)]

    def forward_of(block: nn.Module) -> Any:
        own = block.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            return own(*args, **kwargs) * table[model.step]

        return forward

    for block in model.model.layers:
        block.forward = forward_of(block)
    model.step = 0
    model.register_forward_pre_hook(lambda *_: setattr(model, "step", model.step + 1))


def test_a_number_used_as_a_constant_falls_to_plain_operations(folder: Path) -> None:
    plain = build(folder)
    model = copy.deepcopy(plain)
    for each in (plain, model):
        specialise(each)
    compile_modules(model, EAGER, find_blocks(model), most=MOST_COMPILATIONS)
    steps(model, padded(), plain)
    numbers, compiled = counted(model), facts_of(model).noted(CompiledBlocks)
    assert numbers["compilations"] == 2
    assert numbers["compiled_calls"] == 2 * 3
    assert compiled is not None and "2 compilations do not fit it" in compiled.given_up()["Qwen3DecoderLayer"]


def test_asked_for_it_is_compiled_all_the_same(folder: Path) -> None:
    model = build(folder)
    specialise(model)
    compile_modules(model, EAGER, find_blocks(model))
    steps(model, batches=(batch for _, batch in zip(range(4), padded(), strict=False)))
    assert counted(model)["compilations"] == 4 > MOST_COMPILATIONS


def test_a_backend_that_fails_is_told_where_nobody_asked_for_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(CountedBackend, "_compile", fails)
    plain = build(folder)
    model = copy.deepcopy(plain)
    compile_modules(model, EAGER, find_blocks(model), most=MOST_COMPILATIONS)
    steps(model, batches=(batch for _, batch in zip(range(3), padded(), strict=False)), plain=plain)
    compiled = facts_of(model).noted(CompiledBlocks)
    assert compiled is not None and counted(model)["compiled_calls"] == 0
    assert "no such instruction" in compiled.given_up()["Qwen3DecoderLayer"]
    asked = build(folder)
    compile_modules(asked, EAGER, find_blocks(asked))
    with pytest.raises(Exception, match="no such instruction"):
        steps(asked, padded())


def test_a_compiler_that_fails_is_given_up_where_nobody_asked_for_it(folder: Path) -> None:
    plain = build(folder)
    model = copy.deepcopy(plain)
    (kind,) = compile_modules(model, EAGER, find_blocks(model), most=MOST_COMPILATIONS).kinds

    def fails(*_: Any, **__: Any) -> Any:
        raise torch._dynamo.exc.InternalTorchDynamoError("no such byte code")

    for block in model.model.layers:
        block.forward._fixed = fails
    steps(model, batches=(batch for _, batch in zip(range(2), padded(), strict=False)), plain=plain)
    assert "no such byte code" in kind.reason and kind.compiled_calls == 0
    kind.is_given_up, kind.most = False, None
    with pytest.raises(torch._dynamo.exc.InternalTorchDynamoError):
        steps(model, padded())


def test_passes_without_gradients_compile_nothing_unasked(folder: Path) -> None:
    model = build(folder)
    compile_modules(model, EAGER, find_blocks(model), most=MOST_COMPILATIONS)
    with torch.no_grad():
        for _, batch in zip(range(4), padded(), strict=False):
            model(**batch)
    assert counted(model) == {"compilations": 0, "calls": 0, "compiled_calls": 0}


def test_blocks_that_compute_otherwise_are_kinds_of_their_own(folder: Path) -> None:
    model = build(folder)
    model.model.layers[1].self_attn.sliding_window = 8
    model.model.layers[2].mlp.act_fn = nn.GELU()
    compiled = compile_modules(model, EAGER, find_blocks(model))
    assert [kind.blocks for kind in compiled.kinds] == [1, 1, 1]


def test_the_log_counts_what_ran(tmp_path: Path) -> None:
    """Through the trainer: a line when the first steps are done and at the end, an event with the numbers."""
    make_tiny_qwen3(tmp_path / "model")
    make_rows(tmp_path, images=(0,))
    yaml = make_tiny_run(tmp_path, training={"train_iters": 4})
    out = train(yaml, tmp_path / "save", "features.compile=true", "features.compile_plan.backend=eager")
    told = [line for line in out.splitlines() if line.startswith("compile ")]
    assert len(told) == 2 and "2 Qwen3DecoderLayer: at most 2 compilations of a block" in told[1]
    events = [each for each in lines(tmp_path / "save" / "events.jsonl") if each["kind"] == "compile"]
    assert [each["step"] for each in events] == [2, 4]
    assert events[1]["calls"] == events[1]["compiled_calls"] == 8
