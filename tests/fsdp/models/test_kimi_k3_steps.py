"""Training Kimi-K3: a step equals its formulas, packed or not, and the same step under every plan."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.data import build_mm_dataset
from mindspeed_mm.fsdp.models.behaviour import packed_rows
from mindspeed_mm.fsdp.ops.attention import without_borders
from mindspeed_mm.fsdp.params.loader import load_config
from mindspeed_mm.tasks.verify.precision import keeping_double
from tests.helpers import kimi_k3_by_hand as by_hand
from tests.helpers.decoder_logits import Weights
from tests.helpers.parity_runs import Case, Fault, ParityRuns
from tests.helpers.plan_matrix import EP, FP64, PP, TP, ULYSSES
from tests.helpers.planned_steps import GLOBAL_BATCH, overrides, train_steps
from tests.helpers.tiny_kimi_k3 import STATE_HEADS, make_tiny_kimi_k3
from tests.helpers.tiny_run import make_tiny_run
from tests.helpers.written_families import loaded, random_pictures

import transformers  # isort: skip  (after the guard of the lines above)

pytestmark = pytest.mark.skipif(
    not hasattr(transformers, "KimiLinearConfig"),
    reason=f"transformers {transformers.__version__} lacks what it is built on",
)
IN_ORDER = "data.dataloader_param.shuffle=false"


SIZES: tuple[tuple[int, int] | None, ...] = ((62, 15), None, None, (16, 8), (16, 8), (62, 15), None, None)
"""Of each row's picture, so that a rank lacks what the other has; the table of places is brought to them by weights
that are exact in fp32."""


@pytest.fixture(scope="module")
def yamls(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("plans") / "step"
    make_tiny_kimi_k3(folder / "model")
    rows = []
    for number, size in enumerate(SIZES):
        row: dict[str, Any] = {"id": f"row{number}"}
        if size is not None:
            random_pictures([size])[0].save(folder / f"{number}.png")
            row["images"] = [f"{number}.png"]
        answer = " ".join(["one", "two", "three"][: 1 + number % 3])
        asked = {"role": "user", "content": "<image>Which?" if size else "Which digit?"}
        rows.append(json.dumps(row | {"messages": [asked, {"role": "assistant", "content": answer}]}))
    (folder / "rows.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    path = make_tiny_run(folder, **FP64)
    brief = "basic_parameters:\n      enable_thinking: false"
    path.write_text(path.read_text(encoding="utf-8").replace("basic_parameters:", brief), encoding="utf-8")
    return {"step": str(path)}


def step_by_hand(yaml: str) -> tuple[torch.Tensor, Weights]:
    """The loss of the first step, and the weights with their gradients."""
    arguments = load_config(Path(yaml)).arguments
    dataset, _ = build_mm_dataset(arguments.data.dataset_param, seed=7)
    folder = Path(str(arguments.model.model_name_or_path))
    token = json.loads((folder / "config.json").read_text(encoding="utf-8"))["media_placeholder_token_id"]
    w = {name: tensor.double().requires_grad_() for name, tensor in make_tiny_kimi_k3(folder).items()}
    total, count = torch.zeros((), dtype=torch.float64), 0
    for index in range(GLOBAL_BATCH):
        row = dataset[index]
        ids, labels = (torch.as_tensor(row[name]) for name in ("input_ids", "labels"))
        inputs, seen = dataset.plugin.collate(row.get("media") or []), None
        if "pixel_values" in inputs:
            ((_, rows, columns),) = inputs["image_grid_thw"].tolist()
            seen = by_hand.seen(w, inputs["pixel_values"].double(), (rows, columns))
        logits = by_hand.logits(w, by_hand.embedded(w, ids, token, seen))
        total = total + F.cross_entropy(logits[:-1], labels[1:], ignore_index=-100, reduction="sum")
        count += int((labels[1:] != -100).sum())
    loss = total / count
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach(), w


TEXT, OWN = "language_model.model.", "model.language_model."
SAME = {
    "language_model.lm_head.weight": "lm_head.weight",
    "mm_projector.proj.0.weight": "model.mm_projector.proj.0.weight",
    "vision_tower.patch_embed.proj.weight": "model.vision_tower.patch_embed.proj.weight",
    "vision_tower.encoder.blocks.1.wo.weight": "model.vision_tower.layers.1.attn.proj.weight",
    f"{TEXT}layers.1.self_attn.dt_bias": f"{OWN}layers.1.self_attn.forget_gate.dt_bias",
    **{
        f"{TEXT}{name}.weight": f"{OWN}{name}.weight"
        for name in (
            "embed_tokens", "layers.0.self_attn.b_proj", "layers.2.self_attn.g_proj", "layers.3.self_attn.kv_b_proj",
            "layers.3.self_attn.g_proj", "layers.1.block_sparse_moe.gate", "layers.2.mlp_res_proj",
            "layers.4.self_attention_res_norm", "layers.1.block_sparse_moe.routed_expert_down_proj",
            "output_attn_res_proj", "layers.0.mlp.up_proj",
        )
    },
}  # fmt: skip
"""Released name → name here."""


@contextmanager
def state_goes_on() -> Iterator[None]:
    """Layers with a state see a packed row as one document."""

    def through(self: packed_rows.SegmentedForward, *args: Any, **kwargs: Any) -> Any:
        return self._forward(*args, **without_borders(kwargs))

    with mock.patch.object(packed_rows.SegmentedForward, "__call__", through):
        yield


@pytest.mark.slow
def test_a_step_equals_the_formulas_packed_or_not(yamls: dict[str, str]) -> None:
    with keeping_double():
        expected, w = step_by_hand(yamls["step"])
        step, packed = (
            train_steps(yamls["step"], overrides(1, 1, IN_ORDER), packs=packs)[0] for packs in (False, True)
        )
        with state_goes_on():
            mixed = train_steps(yamls["step"], overrides(1, 1, IN_ORDER), packs=True)[0]
    for made in (step, packed):
        assert abs(float(made["loss"] - expected)) < 1e-9
        for theirs, ours in SAME.items():
            torch.testing.assert_close(made["gradients"][ours], w[theirs].grad, rtol=1e-9, atol=1e-9)
        rates = made["gradients"][f"{OWN}layers.0.self_attn.forget_gate.A_log"]
        stored = w[f"{TEXT}layers.0.self_attn.A_log"].grad
        assert stored is not None and not stored[STATE_HEADS:].any()
        torch.testing.assert_close(rates, stored[:STATE_HEADS], rtol=1e-9, atol=1e-9)
    assert abs(float(mixed["loss"] - expected)) > 1e-6


# --- plans ------------------------------------------------------------------------------------------------------------

RUNS = ParityRuns(
    __file__,
    {},
    slow={
        "step fsdp2": Case("step", 2, 2, 2),
        "step fsdp2, ep2": Case("step", 2, 2, 2, (EP,)),
        "step scratch fsdp2": Case("step scratch", 2, 2, 2),
        "step tp2": Case("step", 2, 1, 2, (TP,)),
        "step fsdp2, recompute": Case("step", 2, 2, 2, ("features.recompute=true",)),
        "step fsdp2, kda kept": Case("step", 2, 2, 2, ("features.recompute=true", "model.skip_kda_recompute=true")),
    },
    kinds={"scratch": ("model.train_from_scratch=true",)},
    slow_faults={"own denominator": Fault("step fsdp2", "rank's own denominator")},
)


@pytest.mark.parametrize("name", RUNS.case_params())
def test_plan_equals_one_process(name: str, yamls: dict[str, str]) -> None:
    RUNS.check(name, yamls)


@pytest.mark.parametrize("fault", RUNS.fault_params())
def test_planted_fault_is_found(fault: str, yamls: dict[str, str]) -> None:
    RUNS.check_fault(fault, yamls)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (ULYSSES, "layers of type linear_attention: only softmax attention goes over ranks"),
        (PP, "KimiK3TextModel holds output_attn_res_norm, output_attn_res_proj"),
    ],
)
def test_what_no_plan_can_do_is_said(given: str, says: str, tmp_path: Path) -> None:
    from mindspeed_mm.fsdp.distributed.context.plan import resolve_context_plan
    from mindspeed_mm.fsdp.models.structure.stages import find_cut_points

    make_tiny_kimi_k3(tmp_path / "model")
    model = loaded(tmp_path / "model")
    with pytest.raises(ConfigError, match=says):
        resolve_context_plan(model, 1, 2) if given == ULYSSES else find_cut_points(model)
