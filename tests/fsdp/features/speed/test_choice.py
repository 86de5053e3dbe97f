"""What `auto` chooses for fused kernels and compiled blocks, fact by fact."""

from __future__ import annotations

from typing import Any

import pytest

from mindspeed_mm.core.errors import MachineError
from mindspeed_mm.fsdp.features.speed.choice import (
    COMPILED,
    LEAST_STEPS,
    LIGER,
    NPU,
    Machine,
    SpeedFacts,
    choose_compile,
    choose_fused,
)
from mindspeed_mm.fsdp.params.argument import Arguments
from mindspeed_mm.fsdp.plan.speed_facts import speed_facts

HOPPER = Machine("cuda", frozenset({"triton"}), (9, 0))
WITH_LIGER = Machine("cuda", frozenset({"triton", "liger_kernel"}), (9, 0))
ONLY_LIGER = Machine("cuda", frozenset({"liger_kernel"}), (9, 0))
BARE = Machine("cuda", frozenset(), (9, 0))
PASCAL = Machine("cuda", frozenset({"triton"}), (6, 1))
ASCEND = Machine("npu", frozenset({"torch_npu", "triton"}))
CPU = Machine("cpu", frozenset({"triton", "liger_kernel"}))
SIMULATED = Machine("openreg", frozenset({"triton", "liger_kernel"}))


@pytest.mark.parametrize(
    ("machine", "facts", "what", "reason", "more"),
    [
        (HOPPER, {}, "inductor", "triton makes kernels", ""),
        (HOPPER, {"steps": LEAST_STEPS}, "inductor", "triton makes kernels", ""),
        (HOPPER, {"steps": LEAST_STEPS - 1}, "", "99 steps", ""),
        (HOPPER, {"keeps_rounding": "fp64"}, "", "fp64", ""),
        (HOPPER, {"compiles_nothing": "same bits"}, "", "same bits", ""),
        (HOPPER, {"keeps_blocks": "zbv"}, "", "zbv", ""),
        (BARE, {}, "", "triton is not installed", "pip install triton"),
        (PASCAL, {}, "", "compute capability 7.0, this device has 6.1", ""),
        (ASCEND, {}, "", "nothing is known to be faster on 'npu'", ""),
        (SIMULATED, {}, "", "nothing is known to be faster on 'openreg'", ""),
        (CPU, {}, "", "a CPU gains little by it, and its runs keep their bits", ""),
    ],
)
def test_compiled_blocks(machine: Machine, facts: dict[str, Any], what: str, reason: str, more: str) -> None:
    chosen = choose_compile("auto", SpeedFacts(machine, **facts))
    assert chosen.what == what and reason in chosen.reason
    assert chosen.more.startswith(more) if more else chosen.more == ""
    assert choose_compile(True, SpeedFacts(machine, **facts)).what == "inductor"
    assert choose_compile(False, SpeedFacts(machine, **facts)).what == ""


def test_a_backend_without_kernels_is_for_those_who_ask() -> None:
    assert "aot_eager" in choose_compile("auto", SpeedFacts(HOPPER), "aot_eager").reason
    assert choose_compile(True, SpeedFacts(HOPPER), "aot_eager").what == "aot_eager"


@pytest.mark.parametrize(
    ("machine", "facts", "blocks", "what", "reason", "more"),
    [
        (WITH_LIGER, {}, False, LIGER, "installed", ""),
        (WITH_LIGER, {"steps": 5, "compiles_nothing": "x"}, False, LIGER, "installed", ""),
        (WITH_LIGER, {}, True, COMPILED, "parts of the compiled blocks", ""),
        (WITH_LIGER, {"keeps_rounding": "fp64"}, False, "", "fp64", ""),
        (ONLY_LIGER, {}, False, LIGER, "installed", ""),
        (HOPPER, {}, False, COMPILED, "not installed", "pip install liger-kernel"),
        (HOPPER, {"steps": 5}, False, "", "5 steps", "pip install liger-kernel"),
        (HOPPER, {"compiles_nothing": "same bits"}, False, "", "same bits", "pip install liger-kernel"),
        (HOPPER, {"keeps_blocks": "zbv"}, False, COMPILED, "not installed", "pip install liger-kernel"),
        (BARE, {}, False, "", "triton is not installed", "pip install liger-kernel"),
        (ASCEND, {}, False, NPU, "installed", ""),
        (Machine("npu"), {}, False, "", "not installed", "pip install torch_npu"),
        (SIMULATED, {}, False, "", "openreg", ""),
        (CPU, {}, False, "", "a CPU gains little by it, and its runs keep their bits", ""),
    ],
)
def test_fused_kernels(
    machine: Machine, facts: dict[str, Any], blocks: bool, what: str, reason: str, more: str
) -> None:
    chosen = choose_fused("auto", SpeedFacts(machine, **facts), blocks_compiled=blocks)
    assert chosen.what == what and reason in chosen.reason
    assert chosen.more.startswith(more) if more else chosen.more == ""
    assert choose_fused(False, SpeedFacts(machine, **facts)).what == ""


@pytest.mark.parametrize(
    ("machine", "words"),
    [(CPU, "no fused kernels on 'cpu'"), (BARE, "liger-kernel"), (PASCAL, "7.0"), (Machine("npu"), "torch_npu")],
)
def test_a_wish_that_cannot_be_had_is_refused(machine: Machine, words: str) -> None:
    with pytest.raises(MachineError, match=words):
        choose_fused(True, SpeedFacts(machine))


def test_a_wish_is_done_where_auto_would_not() -> None:
    assert choose_fused(True, SpeedFacts(HOPPER, steps=5, compiles_nothing="x")).what == COMPILED
    assert choose_fused(True, SpeedFacts(ONLY_LIGER, keeps_rounding="fp64")).what == LIGER


RECOMPUTE = {"features.recompute": True}
KEEPS = [
    ({}, "", "", ""),
    ({"parallel.fsdp_plan.param_dtype": "bf16"}, "", "", ""),
    ({"parallel.fsdp_plan.param_dtype": "fp64"}, "fp64", "", ""),
    ({"training.use_deter_comp": True}, "", "use_deter_comp", ""),
    ({"posttrain.method": "dpo"}, "", "", "posttrain.method dpo"),
    ({"posttrain.method": "grpo"}, "", "token by token", "posttrain.method grpo"),
    ({**RECOMPUTE, "model.skip_gdn_recompute": True}, "", "", "skip_gdn_recompute"),
    ({"model.skip_gdn_recompute": True}, "", "", ""),
    ({**RECOMPUTE, "features.recompute_plan.mode": "selective"}, "", "", ""),
    (
        {**RECOMPUTE, "features.recompute_plan.mode": "selective", "features.enable_weight_offload": True},
        "",
        "",
        "enable_weight_offload",
    ),
    ({**RECOMPUTE, "features.enable_weight_offload": True}, "", "", ""),
    ({**RECOMPUTE, "features.recompute_plan.use_reentrant": True}, "", "", "use_reentrant"),
    ({"model.attn_implementation": "flex"}, "", "", "flex"),
    ({"training.lora.enable": True}, "", "", ""),
    ({"training.lora.enable": True, "training.lora.quantize": "nf4"}, "", "", "nf4"),
    ({"parallel.pipeline_parallel_size": 2, "parallel.pp_plan.schedule": "zbv"}, "", "", "zbv"),
    ({"parallel.pipeline_parallel_size": 2}, "", "", ""),
]


@pytest.mark.parametrize(("settings", "rounding", "nothing", "blocks"), KEEPS)
def test_what_a_configuration_says(settings: dict[str, Any], rounding: str, nothing: str, blocks: str) -> None:
    facts = speed_facts(arguments_of(settings), HOPPER)
    for found, words in (
        (facts.keeps_rounding, rounding),
        (facts.compiles_nothing, nothing),
        (facts.keeps_blocks, blocks),
    ):
        assert words in found and bool(words) == bool(found)


def test_a_model_that_is_compared_with_is_not_compiled() -> None:
    assert "compared with" in speed_facts(Arguments(), HOPPER, trains=False).keeps_blocks


def test_the_length_of_a_run_is_known_where_it_is_set() -> None:
    assert speed_facts(arguments_of({"training.train_iters": 7}), HOPPER).steps == 7
    assert speed_facts(arguments_of({"training.train_epochs": 7}), HOPPER).steps is None


def arguments_of(settings: dict[str, Any]) -> Arguments:
    tree: dict[str, Any] = {}
    for key, value in settings.items():
        *path, last = key.split(".")
        section = tree
        for name in path:
            section = section.setdefault(name, {})
        section[last] = value
    return Arguments.model_validate(tree)
