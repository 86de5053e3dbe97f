"""Expert parallelism through the trainer equals one process, in fp64: a text model and a vision-language model on
uneven rows, every dispatcher, with sharding, copies, accumulation, recompute, adapters, balance and the router's
loss."""

from __future__ import annotations

from contextlib import ExitStack
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch

from mindspeed_mm.fsdp.distributed import torch_parallelize
from mindspeed_mm.fsdp.distributed.expert import dispatch as expert_parallel_dispatch
from mindspeed_mm.fsdp.loss import router_aux
from mindspeed_mm.fsdp.ops import experts
from tests.helpers.distributed import run_ranks
from tests.helpers.parity import ParityError, StepRecord, compare_steps
from tests.helpers.planned_steps import train_steps
from tests.helpers.tiny_models import make_tiny_qwen3_moe, make_tiny_qwen3_vl_moe
from tests.helpers.tiny_run import make_rows, make_tiny_run

TOLERANCE = 1e-9
GLOBAL_BATCH = 8
EP = "parallel.expert_parallel_size=2"
ALLGATHER = "parallel.ep_plan.dispatcher=allgather"
RECOMPUTE = "features.recompute=true"
AUX = "features.loss_cfg.router_aux_loss_coef=0.5"
SKIP = "features.skip_moe_pad_tokens=true"
BALANCE = "features.enable_ep_balance=true"
GROUPED = "model.use_grouped_expert_matmul=true"
HYBRID = "parallel.fully_shard_parallel_size=2"
RING, ULYSSES, TP = (
    f"parallel.{size}=2" for size in ("ring_attention_size", "ulysses_parallel_size", "tensor_parallel_size")
)

CASES = {  # name → (model, ranks, data ranks, accumulation, overrides)
    "text ep2": ("text", 2, 2, 2, (EP,)),
    "text ep2, allgather": ("text", 2, 2, 1, (EP, ALLGATHER)),
    "text ep2, recompute, balance": ("text", 2, 2, 1, (EP, RECOMPUTE, BALANCE)),
    "text fsdp2, grouped, no padding": ("text", 2, 2, 2, (GROUPED, SKIP)),
    "vlm ep2, recompute": ("vlm", 2, 2, 1, (EP, RECOMPUTE)),
    "vlm ep2 × ring2": ("vlm", 2, 1, 2, (EP, RING)),
    "text aux ep2, no padding, recompute": ("text aux", 2, 2, 1, (EP, AUX, SKIP, RECOMPUTE)),
    "text aux fsdp2, accumulated": ("text aux, accumulated", 2, 2, 2, (AUX,)),
    "vlm aux ep2 × ulysses2": ("vlm aux", 2, 1, 1, (EP, AUX, ULYSSES)),
    "text ep2 × efsdp2": ("text", 4, 4, 2, (EP,)),
    "text ep2 × edp2, allgather": ("text", 4, 4, 1, (EP, HYBRID, ALLGATHER)),
}
SLOW = {
    "text ep4, balance": ("text", 4, 4, 1, ("parallel.expert_parallel_size=4", BALANCE, SKIP)),
    "text ep4 on hybrid": ("text", 4, 4, 1, ("parallel.expert_parallel_size=4", HYBRID,
                                             "parallel.expert_fully_shard_parallel_size=1")),
    "text fsdp4 with a size for nothing": ("text", 4, 4, 1, ("parallel.expert_fully_shard_parallel_size=1",)),
    "text ep2 × efsdp2, zero-2": ("text", 4, 4, 2, (EP, "parallel.fsdp_plan.reshard_after_forward=false")),
    "text ep2, frozen experts": ("text frozen", 2, 2, 1, (EP,)),
    "text ep2, no padding": ("text", 2, 2, 2, (EP, SKIP)),
    "text lora ep2": ("text lora", 2, 2, 1, (EP,)),
    "text ep2 × tp2": ("text", 4, 2, 1, (EP, TP)),
    "vlm ep2 × efsdp2, allgather": ("vlm", 4, 4, 2, (EP, ALLGATHER)),
    "vlm aux ep2 × efsdp2, recompute": ("vlm aux", 4, 4, 1, (EP, AUX, RECOMPUTE)),
    "vlm ep2 × fsdp2 × ring2": ("vlm", 4, 2, 1, (EP, RING)),
    "vlm ep4 × ring2 × ulysses2": ("vlm", 4, 1, 1, ("parallel.expert_parallel_size=4", RING, ULYSSES)),
}  # fmt: skip
FAULTS = {
    "doubled expert gradient": "text ep2",
    "expert gradient averaged": "text ep2",
    "token lost in dispatch": "text ep2",
    "token lost in allgather": "text ep2, allgather",
    "statistics of own tokens only": "text aux ep2, no padding, recompute",
}

FP64 = {
    "parallel": {"fsdp_plan": {"param_dtype": "fp64"}},
    "training": {"train_iters": 2, "clip_grad": 0.5, "weight_decay": 0.1, "adam_fused": False},
}
MODEL: dict[str, Any] = {"initializer_range": 0.3, "num_hidden_layers": 2}


@pytest.fixture(scope="module")
def yamls(tmp_path_factory: pytest.TempPathFactory) -> tuple[tuple[str, str], ...]:
    folder = tmp_path_factory.mktemp("experts")
    make_tiny_qwen3_moe(folder / "text" / "model", **MODEL)
    make_rows(folder / "text", images=(0,))
    make_tiny_qwen3_vl_moe(folder / "vlm" / "model", **MODEL)
    return tuple((name, str(make_tiny_run(folder / name, **FP64))) for name in ("text", "vlm"))


WORDS = {
    "aux": (AUX,),
    "aux, accumulated": (AUX,),
    "lora": ("training.lora.enable=true",),
    "frozen": ("model.freeze=[model.layers.*.mlp.experts]",),
}


def run_of(model: str, yamls: dict[str, str], data_ranks: int, accumulation: int, *words: str) -> tuple[str, list[str]]:
    micro = GLOBAL_BATCH // data_ranks // accumulation
    sizes = [f"training.micro_batch_size={micro}", f"training.gradient_accumulation_steps={accumulation}"]
    family, _, kind = model.partition(" ")
    return yamls[family], [*sizes, *dict.fromkeys([*words, *WORDS.get(kind, ())])]


def run_cases(ranks: int, yamls: dict[str, str], slow: bool) -> dict[str, list[StepRecord]]:
    """Every case that takes this many ranks; 1: the references, with transformers' own experts and none of our
    features."""
    cases = SLOW if slow else CASES
    measured = {}
    with mock.patch.object(torch.Tensor, "float", float_unless_double):
        if ranks == 1:
            kinds = {case[0] for case in cases.values()}
            return {kind: train_steps(*run_of(kind, yamls, 1, 2 if "accumulated" in kind else 1)) for kind in kinds}
        for name, (model, needed, data_ranks, accumulation, words) in cases.items():
            if needed == ranks:
                measured[name] = train_steps(*run_of(model, yamls, data_ranks, accumulation, *words))
        for fault, name in FAULTS.items():
            if not slow and cases[name][1] == ranks:
                model, _, data_ranks, accumulation, words = cases[name]
                with planted(fault):
                    measured[fault] = train_steps(*run_of(model, yamls, data_ranks, accumulation, *words))
    return measured


def planted(fault: str) -> Any:
    """The fault as a patch of the one function that it would be a bug in."""
    if fault == "doubled expert gradient":
        return expert_gradients_times(2.0)
    if fault == "expert gradient averaged":
        return expert_gradients_times(0.5)
    if fault == "statistics of own tokens only":
        return mock.patch.object(router_aux.dist, "all_reduce", lambda *args, **kwargs: None)
    stack = ExitStack()
    for module in (experts, expert_parallel_dispatch):
        stack.enter_context(mock.patch.object(module, "sort_pairs", without_the_last))
    return stack


def expert_gradients_times(factor: float) -> Any:
    summed = torch_parallelize.sum_gradients

    def wrong(model: torch.nn.Module) -> None:
        summed(model)
        for module in experts.fused_experts(model).values():
            module.set_gradient_divide_factor(1 / factor)  # type: ignore[operator]

    return mock.patch.object(torch_parallelize, "sum_gradients", wrong)


def without_the_last(*args: Any, **kwargs: Any) -> experts.Pairs:
    pairs = experts_sort_pairs(*args, **kwargs)
    last = int(pairs.counts_E.nonzero()[-1])
    return experts.Pairs(pairs.slots_S[:-1], pairs.counts_E - torch.eye(len(pairs.counts_E), dtype=torch.long)[last])


experts_sort_pairs = experts.sort_pairs


def float_unless_double(tensor: torch.Tensor) -> torch.Tensor:
    """Models round to fp32 here and there, which would be all that could be seen in fp64."""
    return tensor if tensor.dtype == torch.float64 else tensor.to(torch.float32)


@cache
def results_of(ranks: int, yamls: tuple[tuple[str, str], ...], slow: bool = False) -> list[dict[str, list[StepRecord]]]:
    return run_ranks(ranks, run_cases, ranks, dict(yamls), slow, timeout_s=400)


def check(name: str, yamls: tuple[tuple[str, str], ...], slow: bool) -> None:
    model, ranks, *_ = (SLOW if slow else CASES)[name]
    expected = results_of(1, yamls, slow)[0][model]
    for measured in results_of(ranks, yamls, slow):
        compare_steps(expected, measured[name], TOLERANCE)


@pytest.mark.parametrize("name", CASES)
def test_plan_equals_one_process(name: str, yamls: tuple[tuple[str, str], ...]) -> None:
    check(name, yamls, slow=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_more_plans_equal_one_process(name: str, yamls: tuple[tuple[str, str], ...]) -> None:
    check(name, yamls, slow=True)


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_found(fault: str, yamls: tuple[tuple[str, str], ...]) -> None:
    model, ranks, *_ = CASES[FAULTS[fault]]
    measured = results_of(ranks, yamls)[0][fault]
    with pytest.raises(ParityError):
        compare_steps(results_of(1, yamls)[0][model], measured, TOLERANCE)


def losses_in(yaml: str, dtype: str, *words: str) -> list[tuple[float, float]]:
    ranks = torch.distributed.get_world_size()
    words = (f"parallel.fsdp_plan.param_dtype={dtype}", GROUPED, *words)
    steps = train_steps(*run_of("text", {"text": yaml}, ranks, 1, *words))
    return [(float(step["loss"]), float(step["grad_norm"])) for step in steps]


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "of_loss", "of_norm"), [("fp32", 1e-5, 1e-5), ("bf16", 2e-3, 2e-2)])
def test_shorter_types_by_the_grouped_kernel(
    dtype: str, of_loss: float, of_norm: float, yamls: tuple[tuple[str, str], ...]
) -> None:
    yaml = dict(yamls)["text"]
    expected = run_ranks(1, losses_in, yaml, dtype, timeout_s=120)[0]
    found = run_ranks(2, losses_in, yaml, dtype, EP, timeout_s=120)[0]
    for (loss, norm), (own_loss, own_norm) in zip(expected, found, strict=True):
        assert own_loss == pytest.approx(loss, rel=of_loss)
        assert own_norm == pytest.approx(norm, rel=of_norm)
