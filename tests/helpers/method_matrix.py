"""The matrix of methods of post-training × parallel plans: what each cell runs, and what it is held to.

Every cell goes through the real trainer in fp64 for two steps, rollouts and references included, and must equal one
process that takes a step's samples at once. The cells of a plan run in one start of its processes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

from torch import nn

from mindspeed_mm.fsdp.models.diffusion.components import load_encoders
from mindspeed_mm.fsdp.train import generator_family as families
from mindspeed_mm.tasks.verify.precision import keeping_double
from tests.helpers.distributed import run_ranks
from tests.helpers.plan_matrix import FP64, LAYERS, TP, ULYSSES
from tests.helpers.planned_steps import overrides, train_steps
from tests.helpers.tiny_generators import make_tiny_flux
from tests.helpers.tiny_media_pairs import PAIRS as MEDIA_PAIRS
from tests.helpers.tiny_media_pairs import make_tiny_media_pairs
from tests.helpers.tiny_models import make_tiny_qwen3_vl
from tests.helpers.tiny_pairs import make_tiny_pairs
from tests.helpers.tiny_rollout_run import make_tiny_rollout_run
from tests.helpers.tiny_run import make_tiny_run

TOLERANCE = 1e-9
LIMIT_S = 1500.0

ANSWERS: dict[str, Any] = {
    "method": "grpo",
    "grpo": {"num_generations": 2},
    "rollout": {"max_completion_length": 6},
    "rewards": [{"name": "regex", "settings": {"pattern": "[a-f]"}}, {"name": "repetition", "settings": {"words": 1}}],
}
DRAWN: dict[str, Any] = {
    "grpo": {"num_generations": 2, "clip_range": 0.1},
    "nft": {"kl": 0.0, "old_decay": 0},
    "flow": {"num_inference_steps": 4},
}
LORA = ("training.lora.enable=true", "training.lora.rank=2")


def _pairs(folder: Path) -> Path:
    make_tiny_qwen3_vl(folder / "model", **LAYERS)
    return make_tiny_pairs(folder, **FP64)


def _answers(folder: Path) -> Path:
    make_tiny_qwen3_vl(folder / "model", **LAYERS)
    return make_tiny_run(folder, posttrain=ANSWERS, **FP64)


def _media_pairs(folder: Path) -> Path:
    make_tiny_flux(folder / "model", num_layers=2, num_single_layers=2)
    return make_tiny_media_pairs(folder, **FP64)


def _drawn(folder: Path) -> Path:
    make_tiny_flux(folder / "model", num_layers=2, num_single_layers=2)
    return make_tiny_rollout_run(folder, posttrain=DRAWN, **FP64)


ROWS = {"pairs": _pairs, "answers": _answers, "media pairs": _media_pairs, "drawn": _drawn}
"""Kind of rows → what writes a run on them."""


def _loss(name: str, *more: str) -> tuple[str, tuple[str, ...]]:
    return "pairs", (f"posttrain.dpo.loss_type=[{name}]", *more)


def _policy(*words: str) -> tuple[str, tuple[str, ...]]:
    return "answers", tuple(f"posttrain.grpo.{word}" for word in words)


def _flow(*words: str) -> tuple[str, tuple[str, ...]]:
    return "drawn", tuple(f"posttrain.{word}" for word in words)


SMOOTHED = "posttrain.dpo.label_smoothing=0.1"
METHODS: dict[str, tuple[str, tuple[str, ...]]] = {
    "sigmoid": ("pairs", (SMOOTHED,)),
    "sigmoid + pref_ftx": ("pairs", ("posttrain.dpo.pref_ftx=0.5",)),
    "sigmoid + ld_alpha": ("pairs", ("posttrain.dpo.ld_alpha=0.5",)),
    **{name: _loss(name) for name in ("hinge", "ipo", "nca_pair", "bco_pair", "sppo_hard", "apo_zero", "apo_down",
                                      "discopop", "sft", "simpo", "orpo")},
    **{name: _loss(name, SMOOTHED) for name in ("robust", "exo_pair", "sigmoid_norm")},
    "adapters off": ("pairs", LORA),
    "a reference that follows": ("pairs", ("posttrain.reference.sync_steps=1",)),
    **{name: _policy(f"loss_type={name}") for name in ("dapo", "bnpo", "grpo", "dr_grpo", "cispo", "sapo", "luspo")},
    "gspo": _policy("importance_sampling_level=sequence", "num_iterations=2"),
    "dapo + beta": _policy("beta=0.1"),
    "dapo + entropy": _policy("entropy_coef=0.01"),
    "Flow-DPO": ("media pairs", MEDIA_PAIRS),
    "Flow-DPO + pref_ftx": ("media pairs", (*MEDIA_PAIRS, *LORA, "posttrain.dpo.pref_ftx=0.5")),
    "Flow-GRPO": _flow("method=grpo"),
    "Flow-GRPO + beta": _flow("method=grpo", "grpo.beta=0.1"),
    "DanceGRPO": _flow("method=grpo", "flow.sde=dance", "flow.noise_level=0.3"),
    "Flow-CPS": _flow("method=grpo", "flow.sde=cps", "flow.noise_level=0.8"),
    "MixGRPO": _flow("method=grpo", "flow.window.size=2", "flow.window.iterations=1"),
    "GRPO-Guard": _flow("method=grpo", "grpo.ratio_norm=true", "grpo.num_iterations=2"),
    "DiffusionNFT": _flow("method=nft"),
    "DiffusionNFT + kl": _flow("method=nft", "nft.kl=0.1", "nft.old_decay=0.5"),
}  # fmt: skip
"""Name → kind of rows, overrides."""


@dataclass(frozen=True)
class Spread:
    """A plan: processes, those of them with samples of their own, micro-batches of a step on each, overrides."""

    ranks: int
    data_ranks: int
    accumulation: int
    words: tuple[str, ...] = ()


WHOLE = Spread(1, 1, 1)
PLANS = {
    "4 + 4": Spread(1, 1, 2),
    "FSDP 2": Spread(2, 2, 1),
    "FSDP 2 × 2": Spread(4, 4, 1, ("parallel.fully_shard_parallel_size=2",)),
    "TP 2": Spread(2, 1, 2, (TP,)),
    "CP 2": Spread(2, 1, 2, (ULYSSES,)),
}
REFUSED: dict[tuple[str, str], str] = {}
"""(method, plan) → words of the refusal."""

FAULTS = ("rank's own denominator", "gradients averaged over ranks")
SPOILT = ("sigmoid + pref_ftx", "dapo", "Flow-DPO", "Flow-GRPO", "DiffusionNFT")
"""Methods in which faults are planted, under `FSDP 2`."""


def cells() -> list[tuple[str, str]]:
    """Every (method, plan) that trains."""
    return [(method, plan) for plan in PLANS for method in METHODS if (method, plan) not in REFUSED]


@cache
def recorded(root: str, spread: Spread, fault: str | None = None) -> dict[str, list[Any]]:
    """Method → the steps of each rank."""
    methods = [name for name in METHODS if fault is None or name in SPOILT]
    runs = [
        (_yaml(root, rows), overrides(spread.data_ranks, spread.accumulation, *words, *spread.words))
        for rows, words in map(METHODS.__getitem__, methods)
    ]
    if spread.ranks == 1:
        return dict(zip(methods, ([each] for each in _all_steps(runs, fault)), strict=True))
    by_rank = run_ranks(spread.ranks, _all_steps, runs, fault, timeout_s=LIMIT_S)
    return {method: [found[at] for found in by_rank] for at, method in enumerate(methods)}


def _all_steps(runs: list[tuple[str, list[str]]], fault: str | None) -> list[Any]:
    with keeping_double(), mock.patch.object(families, "load_encoders", _encoders_in_double):
        return [train_steps(yaml, words, fault) for yaml, words in runs]


def _encoders_in_double(adapter: Any, device: Any) -> Any:
    encoders = load_encoders(adapter, device)
    for part in encoders.components.values():
        if isinstance(part, nn.Module):
            part.double()
    return encoders


def _yaml(root: str, rows: str) -> str:
    folder = Path(root) / rows.replace(" ", "_")
    return str(folder / "run.yaml" if (folder / "run.yaml").exists() else ROWS[rows](folder))
