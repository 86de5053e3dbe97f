"""Expert parallelism through the trainer equals one process, in fp64: a text model and a vision-language model on
uneven rows, every dispatcher, with sharding, copies, accumulation, recompute, adapters, balance and the router's
loss."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch

from mindspeed_mm.fsdp.distributed import torch_parallelize
from mindspeed_mm.fsdp.distributed.expert import dispatch as expert_parallel_dispatch
from mindspeed_mm.fsdp.loss import router_aux
from mindspeed_mm.fsdp.models.structure.stages import RouterPassing
from mindspeed_mm.fsdp.ops import experts
from tests.helpers.distributed import run_ranks
from tests.helpers.parity_runs import Case, Fault, ParityRuns
from tests.helpers.plan_matrix import EP, FP64, HYBRID, INTERLEAVED, PP, RING, TP, ULYSSES
from tests.helpers.planned_steps import overrides, train_steps
from tests.helpers.tiny_models import make_tiny_qwen3_moe, make_tiny_qwen3_vl_moe
from tests.helpers.tiny_run import make_rows, make_tiny_run

ALLGATHER = "parallel.ep_plan.dispatcher=allgather"
RECOMPUTE = "features.recompute=true"
AUX = "features.loss_cfg.router_aux_loss_coef=0.5"
SKIP = "features.skip_moe_pad_tokens=true"
BALANCE = "features.enable_ep_balance=true"
FOUR_STAGES = "parallel.pp_plan.split_points=[model.layers.0, model.layers.1, model.norm]"
"""The first stage has the embedding and the last one the head, and neither of them a router."""
GROUPED = "model.use_grouped_expert_matmul=true"

CASES = {
    "text ep2": Case("text", 2, 2, 2, (EP,)),
    "text ep2, allgather": Case("text", 2, 2, 1, (EP, ALLGATHER)),
    "text ep2, recompute, balance": Case("text", 2, 2, 1, (EP, RECOMPUTE, BALANCE)),
    "text fsdp2, grouped, no padding": Case("text", 2, 2, 2, (GROUPED, SKIP)),
    "vlm ep2, recompute": Case("vlm", 2, 2, 1, (EP, RECOMPUTE)),
    "vlm ep2 × ring2": Case("vlm", 2, 1, 2, (EP, RING)),
    "text aux ep2, no padding, recompute": Case("text aux", 2, 2, 1, (EP, AUX, SKIP, RECOMPUTE)),
    "text aux fsdp2, accumulated": Case("text aux, accumulated", 2, 2, 2, (AUX,)),
    "vlm aux ep2 × ulysses2": Case("vlm aux", 2, 1, 1, (EP, AUX, ULYSSES)),
    "text pp2 × ep2": Case("text", 4, 2, 2, (PP, EP)),
    "text aux pp2, no padding, recompute": Case("text aux, accumulated", 2, 1, 2, (PP, AUX, SKIP, RECOMPUTE)),
    "text aux pp2 × ep2, no padding": Case("text aux, accumulated", 4, 2, 2, (PP, EP, AUX, SKIP)),
    "text ep2 × efsdp2": Case("text", 4, 4, 2, (EP,)),
    "text ep2 × edp2, allgather": Case("text", 4, 4, 1, (EP, HYBRID, ALLGATHER)),
}
SLOW = {
    "text ep4, balance": Case("text", 4, 4, 1, ("parallel.expert_parallel_size=4", BALANCE, SKIP)),
    "text ep4 on hybrid": Case("text", 4, 4, 1, ("parallel.expert_parallel_size=4", HYBRID,
                                             "parallel.expert_fully_shard_parallel_size=1")),
    "text fsdp4 with a size for nothing": Case("text", 4, 4, 1, ("parallel.expert_fully_shard_parallel_size=1",)),
    "text ep2 × efsdp2, zero-2": Case("text", 4, 4, 2, (EP, "parallel.fsdp_plan.reshard_after_forward=false")),
    "text ep2, frozen experts": Case("text frozen", 2, 2, 1, (EP,)),
    "text ep2, no padding": Case("text", 2, 2, 2, (EP, SKIP)),
    "text lora ep2": Case("text lora", 2, 2, 1, (EP,)),
    "text ep2 × tp2": Case("text", 4, 2, 1, (EP, TP)),
    "text pp2 × ep2, balance, recompute": Case("text", 4, 2, 2, (PP, EP, BALANCE, RECOMPUTE)),
    "text lora pp2 × ep2, allgather": Case("text lora", 4, 2, 2, (PP, EP, ALLGATHER)),
    "vlm aux pp2 × ep2, recompute": Case("vlm aux, accumulated", 4, 2, 2, (PP, EP, AUX, SKIP, RECOMPUTE)),
    "text aux pp2 interleaved": Case("text aux, accumulated", 2, 1, 2, (PP, AUX, SKIP, FOUR_STAGES, *INTERLEAVED)),
    "text aux zbv": Case("text aux, accumulated", 2, 1, 2, (PP, AUX, FOUR_STAGES, "parallel.pp_plan.schedule=zbv")),
    "text aux pp2 × ring2": Case("text aux, accumulated", 4, 1, 2, (PP, RING, AUX)),
    "vlm pp2 × ep2, recompute": Case("vlm", 4, 2, 2, (PP, EP, RECOMPUTE)),
    "vlm ep2 × efsdp2, allgather": Case("vlm", 4, 4, 2, (EP, ALLGATHER)),
    "vlm aux ep2 × efsdp2, recompute": Case("vlm aux", 4, 4, 1, (EP, AUX, RECOMPUTE)),
    "vlm ep2 × fsdp2 × ring2": Case("vlm", 4, 2, 1, (EP, RING)),
    "vlm ep4 × ring2 × ulysses2": Case("vlm", 4, 1, 1, ("parallel.expert_parallel_size=4", RING, ULYSSES)),
}  # fmt: skip
MODEL: dict[str, Any] = {"initializer_range": 0.3, "num_hidden_layers": 2}


@pytest.fixture(scope="module")
def yamls(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("experts")
    make_tiny_qwen3_moe(folder / "text" / "model", **MODEL)
    make_rows(folder / "text", images=(0,))
    make_tiny_qwen3_vl_moe(folder / "vlm" / "model", **MODEL)
    return {name: str(make_tiny_run(folder / name, **FP64)) for name in ("text", "vlm")}


def expert_gradients_times(factor: float) -> AbstractContextManager[Any]:
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


def with_a_token_lost() -> AbstractContextManager[Any]:
    stack = ExitStack()
    for module in (experts, expert_parallel_dispatch):
        stack.enter_context(mock.patch.object(module, "sort_pairs", without_the_last))
    return stack


def own_statistics() -> AbstractContextManager[Any]:
    return mock.patch.object(router_aux.dist, "all_reduce", lambda *args, **kwargs: None)


def routers_of_the_last_stage() -> AbstractContextManager[Any]:
    return mock.patch.object(RouterPassing, "leaving", lambda self, like: like.new_zeros(self.numbers))


RUNS = ParityRuns(
    __file__,
    CASES,
    SLOW,
    slow_faults={
        "doubled expert gradient": Fault("text ep2", partial(expert_gradients_times, 2.0)),
        "expert gradient averaged": Fault("text ep2", partial(expert_gradients_times, 0.5)),
        "token lost in dispatch": Fault("text ep2", with_a_token_lost),
        "token lost in allgather": Fault("text ep2, allgather", with_a_token_lost),
        "doubled expert gradient of stages": Fault("text pp2 × ep2", partial(expert_gradients_times, 2.0)),
        "routers of the last stage only": Fault("text aux pp2 × ep2, no padding", routers_of_the_last_stage),
        "statistics of own tokens only": Fault("text aux ep2, no padding, recompute", own_statistics),
    },
    kinds={
        "aux": (AUX,),
        "aux, accumulated": (AUX,),
        "lora": ("training.lora.enable=true",),
        "frozen": ("model.freeze=[model.layers.*.mlp.experts]",),
    },
    accumulated={"text aux, accumulated": 2, "vlm aux, accumulated": 2},
)
"""One process has transformers' own experts and none of our features."""


@pytest.mark.parametrize("name", RUNS.case_params())
def test_plan_equals_one_process(name: str, yamls: dict[str, str]) -> None:
    RUNS.check(name, yamls)


@pytest.mark.parametrize("fault", RUNS.fault_params())
def test_planted_fault_is_found(fault: str, yamls: dict[str, str]) -> None:
    RUNS.check_fault(fault, yamls)


def losses_in(yaml: str, dtype: str, *words: str) -> list[tuple[float, float]]:
    ranks = torch.distributed.get_world_size()
    words = (f"parallel.fsdp_plan.param_dtype={dtype}", GROUPED, *words)
    steps = train_steps(yaml, overrides(ranks, 1, *words))
    return [(float(step["loss"]), float(step["grad_norm"])) for step in steps]


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "of_loss", "of_norm"), [("fp32", 1e-5, 1e-5), ("bf16", 2e-3, 2e-2)])
def test_shorter_types_by_the_grouped_kernel(dtype: str, of_loss: float, of_norm: float, yamls: dict[str, str]) -> None:
    yaml = yamls["text"]
    expected = run_ranks(1, losses_in, yaml, dtype)[0]
    found = run_ranks(2, losses_in, yaml, dtype, EP)[0]
    for (loss, norm), (own_loss, own_norm) in zip(expected, found, strict=True):
        assert own_loss == pytest.approx(loss, rel=of_loss)
        assert own_norm == pytest.approx(norm, rel=of_norm)
