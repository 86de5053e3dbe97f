"""Every kind of adapter through the YAML and the trainer: two ranks compute what one process computes, in fp64, a run
that goes on equals one that did not stop, and the folder that is exported computes what was trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mindspeed_mm.fsdp.checkpoint.adapters import save_adapters
from mindspeed_mm.fsdp.models.behaviour.quantized_linear import can_shard_bytes
from mindspeed_mm.fsdp.models.facts import facts_of
from mindspeed_mm.fsdp.models.lora.names import is_adapter_weight
from mindspeed_mm.fsdp.train.configuration import load_with_plugins
from mindspeed_mm.fsdp.train.run.train_options import TrainOptions
from mindspeed_mm.fsdp.train.trainer import Trainer
from mindspeed_mm.tasks.export import export
from mindspeed_mm.tasks.requests.export import ExportRequest
from tests.fsdp.checkpoint.small_run import differing, everything
from tests.helpers.adapters import adapted_model, float_keeps_double, logits
from tests.helpers.distributed import run_ranks
from tests.helpers.parity import ParityError, compare_steps
from tests.helpers.planned_steps import overrides, train_steps
from tests.helpers.tiny_generator_run import make_tiny_generator_run
from tests.helpers.tiny_models import make_tiny_qwen3, make_tiny_qwen3_moe, make_tiny_qwen3_vl_moe
from tests.helpers.tiny_run import make_rows, make_tiny_run

LORA = {"enable": True, "rank": 4, "alpha": 12}
EXACT = ("training.train_iters=2", "parallel.fsdp_plan.param_dtype=fp64", "training.adam_fused=false")
EXPERTS = "training.lora.target_modules=[q_proj,experts.gate_up_proj,experts.down_proj]"
EP = "parallel.expert_parallel_size=2"
MERGER = "training.lora.modules_to_save=[model.visual.merger]"

CASES: dict[str, tuple[str, tuple[str, ...]]] = {
    "dora": ("vlm", ("training.lora.use_dora=true",)),
    "pissa": ("vlm", ("training.lora.init_lora_weights=pissa",)),
    "dora, olora, a merger trained whole": (
        "vlm", ("training.lora.use_dora=true", "training.lora.init_lora_weights=olora", MERGER),
    ),
    "a frozen tower, a merger trained whole": ("vlm", (MERGER, "model.freeze=[model.visual.blocks]")),
    "over frozen adapters": ("text", ("training.lora.frozen_adapters=[{under}]",)),
    "nf4": ("vlm", ("training.lora.quantize=nf4",)),
    "int8, loftq": ("vlm", ("training.lora.quantize=int8", "training.lora.init_lora_weights=loftq")),
    "nf4, text": ("text", ("training.lora.quantize=nf4",)),
    "experts": ("text moe", (EXPERTS,)),
    "experts, of pictures": ("vlm moe", (EXPERTS,)),
    "dora, clips": ("wan", ("training.lora.use_dora=true",)),
}  # fmt: skip
"""Name → family, overrides."""
SPREAD = {
    "experts": (EP, 'parallel.ep_plan.apply_modules=["*.mlp.experts"]'),
    "experts, of pictures": (EP, "parallel.ep_plan.dispatcher=allgather"),
}
"""Cases that are also run with experts spread over the ranks."""


@pytest.fixture(scope="module")
def yamls(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("lora_parity")
    training = {"lora": LORA, "train_iters": 4, "save_interval": 2, "weight_decay": 0.1, "clip_grad": 0.5}
    make_tiny_qwen3(root / "text" / "model")
    make_tiny_qwen3_moe(root / "text_moe" / "model", initializer_range=0.3)
    make_tiny_qwen3_vl_moe(root / "vlm_moe" / "model", initializer_range=0.3)
    for name in ("text", "text_moe"):
        make_rows(root / name, images=(0,))
    under = adapted_model(root / "text" / "model", rank=2, target_modules=["q_proj", "o_proj"], use_dora=True)
    save_adapters(under, root / "under", root / "text" / "model")
    made = {
        name: make_tiny_run(root / name.replace(" ", "_"), training=training)
        for name in ("vlm", "text", "text moe", "vlm moe")
    }
    made["wan"] = make_tiny_generator_run(root / "wan", "t2v", training=training)
    return {name: str(path) for name, path in made.items()}


def words(case: str, yamls: dict[str, str]) -> list[str]:
    under = Path(yamls["text"]).parent.parent / "under"
    return [word.format(under=under) for word in CASES[case][1]]


def trained_only(steps: list[Any]) -> list[Any]:
    """Bytes of a base are of no interest."""
    kinds = ("gradients", "weights")
    keep = {name for name, g in steps[0]["gradients"].items() if g is not None}
    return [{**step, **{kind: {n: t for n, t in step[kind].items() if n in keep} for kind in kinds}} for step in steps]


def steps_of(case: str, yamls: dict[str, str], ranks: int, *more: str, fault: str | None = None) -> list[Any]:
    with float_keeps_double():
        made = train_steps(yamls[CASES[case][0]], overrides(ranks, 1, *EXACT, *words(case, yamls), *more), fault)
    return trained_only(made)


QUICK = ["dora, olora, a merger trained whole", "over frozen adapters", "nf4", "experts"]


def shardable(cases: list[str]) -> list[str]:
    """Those that the installed torch can spread over ranks."""
    return [case for case in cases if can_shard_bytes() or not any("quantize" in word for word in CASES[case][1])]


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(shardable(QUICK), id="quick"),
        pytest.param(shardable([case for case in CASES if case not in QUICK]), id="others", marks=pytest.mark.slow),
    ],
)
def test_two_ranks_equal_one(cases: list[str], yamls: dict[str, str]) -> None:
    expected = {case: steps_of(case, yamls, 1) for case in cases}
    for measured in run_ranks(2, two_ranks, yamls, cases):
        for name, steps in measured.items():
            case = name.partition(" × ")[0]
            if name.endswith("averaged"):
                with pytest.raises(ParityError):
                    compare_steps(expected[case], steps, 1e-9)
            else:
                compare_steps(expected[case], steps, 1e-9)
    for case, steps in expected.items():
        names = [n for n, g in steps[1]["gradients"].items() if is_adapter_weight(n) and g.any()]
        assert names and not any(".frozen_" in n for n in names), case
        assert any("magnitude" in n for n in names) == ("dora" in case)
        assert any("merger" in n for n in steps[1]["gradients"]) == ("merger" in case)


def two_ranks(yamls: dict[str, str], cases: list[str]) -> dict[str, Any]:
    found = {case: steps_of(case, yamls, 2) for case in cases}
    found |= {f"{case} × ep2": steps_of(case, yamls, 2, *SPREAD[case]) for case in cases if case in SPREAD}
    return found | {
        f"{case} × averaged": steps_of(case, yamls, 2, fault="gradients averaged over ranks")
        for case in ("dora", "experts")
        if case in cases
    }


@pytest.mark.edge("R1")
def test_adapters_continue_under_pipeline_stages(tmp_path: Path) -> None:
    """Each stage takes its own layers, and a weight that two of them hold, out of one file."""
    make_tiny_qwen3(tmp_path / "model", num_hidden_layers=4, tie=True)
    make_rows(tmp_path, images=(0,))
    lora = {**LORA, "modules_to_save": ["model.embed_tokens", "lm_head"]}
    settings = {"rank": 4, "target_modules": ["q_proj", "o_proj"], "modules_to_save": ["model.embed_tokens", "lm_head"]}
    before = adapted_model(tmp_path / "model", **settings)
    save_adapters(before, tmp_path / "adapters", tmp_path / "model")
    lora |= {"target_modules": ["q_proj", "o_proj"], "pretrained_lora_path": str(tmp_path / "adapters")}
    yaml = str(make_tiny_run(tmp_path, training={"lora": lora, "clip_grad": 0.5}))
    expected = continued_steps(yaml, 1)
    names = {name for name, gradient in expected[0]["gradients"].items() if gradient is not None}
    assert any(".layers.0." in name for name in names) and any(".layers.3." in name for name in names)
    for measured in run_ranks(2, continued_steps, yaml, 4, "parallel.pipeline_parallel_size=2"):
        compare_steps(expected, measured, 1e-9)


def continued_steps(yaml: str, accumulation: int, *more: str) -> list[Any]:
    with float_keeps_double():
        return trained_only(train_steps(yaml, overrides(1, accumulation, *EXACT, *more)))


def train(yaml: str, save: Path, *changes: str, **options: Any) -> Any:
    engine = Trainer(
        load_with_plugins(Path(yaml), [f"training.save={save}", *changes]), TrainOptions(**options)
    ).train()
    assert engine is not None
    return engine


@pytest.mark.parametrize(
    "case",
    [
        "pissa",
        "over frozen adapters",
        *(
            pytest.param(case, marks=pytest.mark.slow)
            for case in ("int8, loftq", "experts", "dora, clips", "nf4, text")
        ),
    ],
)
def test_resume_is_bitwise_and_what_is_exported_was_trained(case: str, yamls: dict[str, str], tmp_path: Path) -> None:
    family, given = CASES[case][0], words(case, yamls)
    straight = train(yamls[family], tmp_path / "straight", *given)
    train(yamls[family], tmp_path / "broken", *given, steps=2)
    resumed = train(yamls[family], tmp_path / "broken", *given)
    expected, found = (everything(engine.model, engine.optimizer) for engine in (straight, resumed))
    assert differing(expected, found) == []
    if family not in ("text", "text moe"):
        return
    from transformers import AutoModelForCausalLM

    merged = export.run(ExportRequest(tmp_path / "broken", tmp_path / "merged", merge=True, dtype="fp64")).folder
    model = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float64)
    own = resumed.model.double().eval()
    for one in (model, own):
        one.set_experts_implementation("eager") if "moe" in family else None
    close = 1e-6 if "nf4" in case else 1e-9  # what bytes stand for is written in the base's fp32
    torch.testing.assert_close(logits(model.eval()), logits(own), rtol=0, atol=close)
    assert facts_of(own).lora is not None
