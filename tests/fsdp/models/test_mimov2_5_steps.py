"""Training MiMo-V2.5 with heads for further tokens: a step equals its formulas, and the same step under every plan."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from mindspeed_mm.fsdp.data import build_mm_dataset
from mindspeed_mm.fsdp.params.loader import load_config
from mindspeed_mm.tasks.verify.precision import keeping_double
from tests.helpers import mimov2_5_by_hand as by_hand
from tests.helpers.decoder_logits import Weights
from tests.helpers.parity_runs import Case, Fault, ParityRuns
from tests.helpers.plan_matrix import EP, FP64, PP, RING, ULYSSES
from tests.helpers.planned_steps import GLOBAL_BATCH, overrides, train_steps
from tests.helpers.released_rows import write_uneven_rows
from tests.helpers.tiny_mimov2_5 import FURTHER, make_tiny_mimov2_5
from tests.helpers.tiny_run import make_tiny_run

import transformers  # isort: skip  (after the guard of the lines above)

pytestmark = pytest.mark.skipif(
    not hasattr(transformers, "MiMoV2FlashConfig"),
    reason=f"transformers {transformers.__version__} lacks what it is built on",
)
FACTOR = 0.3
AHEAD = (f"model.mtp_num_layers={FURTHER}", f"model.mtp_loss_scaling_factor={FACTOR}")


@pytest.fixture(scope="module")
def yamls(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Rows of every medium, of some and of none, so that a rank lacks what the other has."""
    folder = tmp_path_factory.mktemp("plans") / "step"
    make_tiny_mimov2_5(folder / "model")
    rows = write_uneven_rows(folder, ("image", "video", "audio"))
    lines = rows.read_text(encoding="utf-8").splitlines()
    more = [json.dumps(json.loads(line) | {"id": f"more{number}"}) for number, line in enumerate(lines[:2])]
    (folder / "rows.jsonl").write_text("\n".join([*lines, *more]) + "\n", encoding="utf-8")
    return {"step": str(make_tiny_run(folder, **FP64))}


def step_by_hand(yaml: str) -> tuple[torch.Tensor, Weights]:
    """The loss of the first step, and the weights with their gradients."""
    arguments = load_config(Path(yaml)).arguments
    dataset, _ = build_mm_dataset(arguments.data.dataset_param, seed=7)
    folder = Path(str(arguments.model.model_name_or_path))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    w = {name: tensor.double().requires_grad_() for name, tensor in make_tiny_mimov2_5(folder).items()}
    sums, counts = [torch.zeros((), dtype=torch.float64) for _ in range(FURTHER + 1)], [0] * (FURTHER + 1)
    for index in range(GLOBAL_BATCH):
        row = dataset[index]
        ids, labels = (torch.as_tensor(row[name]) for name in ("input_ids", "labels"))
        media, inputs = [], dataset.plugin.collate(row.get("media") or [])
        for kind, pixels in (("image", "pixel_values"), ("video", "pixel_values_videos")):
            if pixels in inputs:
                (grid,) = inputs[f"{kind}_grid_thw"].tolist()
                media.append((config[f"{kind}_token_id"], by_hand.seen(w, inputs[pixels].double(), tuple(grid))))
        if "audio_codes" in inputs:
            token = config["processor_config"]["audio_token_id"]
            media.append((token, by_hand.heard(w, inputs["audio_codes"])))
        for depth, (total, count) in enumerate(by_hand.losses(w, by_hand.embedded(w, ids, media), labels, FURTHER)):
            sums[depth], counts[depth] = sums[depth] + total, counts[depth] + count
    means = [total / count for total, count in zip(sums, counts, strict=True)]
    loss = means[0] + FACTOR / FURTHER * torch.stack(means[1:]).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach(), w


SAME_NAME = (
    *("lm_head.weight", "model.embed_tokens.weight", "model.layers.1.self_attn.qkv_proj.weight", "model.norm.weight"),
    *("visual.merger.mlp.0.weight", "visual.blocks.1.attn.sinks", "visual.patch_embed.proj.weight"),
    *("speech_embeddings.0.weight", "audio_encoder.projection.mlp.0.weight", "model.layers.1.mlp.gate.weight"),
)
FIRST = (*AHEAD, "data.dataloader_param.shuffle=false", "training.train_iters=1")


@contextmanager
def embeddings_not_ahead() -> Iterator[None]:
    """Every depth gets the embedding of its own token, not of the one ahead."""
    from mindspeed_mm.fsdp.models.mimov2_5.modeling_mimov2_5 import MiMoV2FurtherHeads

    def forward(self: Any, hidden: torch.Tensor, embeddings: torch.Tensor, **arguments: Any) -> tuple[Any, ...]:
        found = []
        for layer in self.layers:
            hidden = layer(embeddings, hidden, **arguments)
            found.append(hidden)
        return tuple(found)

    with mock.patch.object(MiMoV2FurtherHeads, "forward", forward):
        yield


def test_losses_of_further_tokens_equal_the_formulas(yamls: dict[str, str]) -> None:
    with keeping_double():
        expected, w = step_by_hand(yamls["step"])
        (step,) = train_steps(yamls["step"], overrides(1, 1, *FIRST))
    assert abs(float(step["loss"] - expected)) < 1e-9
    ours = {name: name for name in SAME_NAME}
    ours |= {f"model.mtp.layers.{n}.eh_proj.weight": f"mtp.layers.{n}.eh_proj.weight" for n in range(FURTHER)}
    for theirs, name in ours.items():
        torch.testing.assert_close(step["gradients"][name], w[theirs].grad, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
def test_further_tokens_that_read_their_own_embedding_are_found(yamls: dict[str, str]) -> None:
    with keeping_double(), embeddings_not_ahead():
        expected, _ = step_by_hand(yamls["step"])
        (shifted,) = train_steps(yamls["step"], overrides(1, 1, *FIRST))
    assert abs(float(shifted["loss"] - expected)) > 1e-4


# --- plans ------------------------------------------------------------------------------------------------------------

RUNS = ParityRuns(
    __file__,
    {},
    slow={
        "step fsdp2, ep2": Case("step ahead", 2, 2, 2, (EP,)),
        "step fsdp2": Case("step", 2, 2, 2),
        "step scratch fsdp2": Case("step scratch", 2, 2, 2),
        "step ulysses2": Case("step", 2, 1, 2, (ULYSSES,)),
        "step ring2": Case("step", 2, 1, 2, (RING,)),
        "step pp2": Case("step", 2, 1, 2, (PP,)),
        "step fsdp2, recompute": Case("step ahead", 2, 2, 2, ("features.recompute=true",)),
    },
    kinds={"scratch": ("model.train_from_scratch=true",), "ahead": AHEAD},
    slow_faults={"own denominator": Fault("step fsdp2", "rank's own denominator")},
)


@pytest.mark.parametrize("name", RUNS.case_params())
def test_plan_equals_one_process(name: str, yamls: dict[str, str]) -> None:
    RUNS.check(name, yamls)


@pytest.mark.parametrize("fault", RUNS.fault_params())
def test_planted_fault_is_found(fault: str, yamls: dict[str, str]) -> None:
    RUNS.check_fault(fault, yamls)
