"""Bytes that a rank sends in an optimizer step under each plan, counted in a real step, over a formula of shapes.

Bytes do not depend on how busy the machine is. The formula is `benchmarks/communication_formula.py`; what counts as
sent stands there.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import processes
from benchmarks.communication_cases import CASES, MODELS, ZERO_2, Case
from benchmarks.communication_formula import Plan, Step, bytes_sent
from benchmarks.figures import Figure
from benchmarks.ranks import run_ranks
from mindspeed_mm.fsdp.params.loader import load_config
from mindspeed_mm.fsdp.params.sizes.parallel import resolve_parallel_sizes
from mindspeed_mm.fsdp.utils.torchvision_guard import prepare_for_transformers

CONVENTION = (
    "what a ring algorithm sends, n ranks: all-gather and reduce-scatter (n-1)/n of the whole tensor, all-reduce "
    "2(n-1)/n, all-to-all what leaves the rank, point to point the size; 'control' (counts of a step, losses, norm: "
    "outside of forward and backward passes) is apart and in no ratio"
)
TOLERANCE = 0.02
TIMEOUT_S = 400.0


def run(work: Path, names: Sequence[str] = tuple(CASES)) -> dict[str, Any]:
    """Measure."""
    folder = work / "communication"
    processes.run([sys.executable, "-m", "benchmarks.communication_rank", "make", str(folder)], timeout_s=120)
    rows: dict[str, dict[str, Any]] = {}
    for ranks in sorted({CASES[name].ranks for name in names}):
        own = [name for name in names if CASES[name].ranks == ranks]
        print(f"  {len(own)} plans on {ranks} ranks", flush=True)
        out = folder / f"sent{ranks}"
        run_ranks(["benchmarks.communication_rank", "count", str(folder), str(out), *own], ranks, TIMEOUT_S)
        found = [json.loads(Path(f"{out}.{rank}.json").read_text(encoding="utf-8")) for rank in range(ranks)]
        for name in own:
            rows[name] = row(CASES[name], folder, [on_rank[name] for on_rank in found])
    return {
        "convention": CONVENTION,
        "precision": "bf16 compute, gradients reduced in fp32",
        "models": {name: vars(shape) | {"parameters": shape.parameters} for name, shape in MODELS.items()},
        "rows": {name: rows[name] for name in names},
        "figures": [figure.to_dict() for name in names for figure in figures(name, rows[name])],
    }


def row(case: Case, folder: Path, on_ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What one plan sent, rank by rank and axis by axis, beside the formula."""
    arguments = load_config(folder / case.model / "run.yaml", case.words).arguments
    sizes = resolve_parallel_sizes(arguments.parallel, case.ranks)
    is_v = arguments.parallel.pp_plan.schedule == "zbv"
    ranks = []
    for rank, found in enumerate(on_ranks):
        plan = Plan(
            sizes,
            keeps_parameters=ZERO_2 in case.plan,
            sequence_parallel=bool(arguments.parallel.tp_plan.sequence_parallel),
            splits_embedding=_splits_embedding(),
            dispatcher=arguments.parallel.ep_plan.dispatcher,
            pipeline_rank=rank * sizes.pp // case.ranks,
            chunks=2 if is_v else arguments.parallel.pp_plan.virtual_stages,
            is_v=is_v,
        )
        sent = dict(found["sent"])
        control = sent.pop("control", 0)
        expected = grouped(bytes_sent(MODELS[case.model], plan, Step(**found["step"])), sent)
        ratios = [ratio_of(sent[group], expected[group]) for group in sent]
        ranks.append(
            {
                "step": found["step"],
                "sent": sent,
                "formula": expected,
                "ratio": max(ratios, key=lambda ratio: abs(ratio - 1)),
                "control": control,
                "loss": found["loss"],
            }
        )
    return {"model": case.model, "ranks": case.ranks, "plan": list(case.plan), "on_ranks": ranks}


def _splits_embedding() -> bool:
    """Whether the plan of tensor parallelism that transformers has for these models cuts the embedding."""
    prepare_for_transformers()
    from transformers import Qwen3Config, Qwen3Model  # after the guard

    with torch.device("meta"):
        model = Qwen3Model(Qwen3Config(num_hidden_layers=1))
    return "embedding_rowwise" in model._tp_plan.values()


def grouped(by_axis: Mapping[str, float], groups: Iterable[str]) -> dict[str, float]:
    """The formula's bytes by process group: axes of the same ranks share one (`fsdp+ring`).

    Raises:
        ValueError: An axis that should send has no group.
    """
    found = {group: sum(by_axis.get(axis, 0.0) for axis in group.split("+")) for group in groups}
    if lost := set(by_axis) - {axis for group in found for axis in group.split("+")}:
        raise ValueError(f"the formula has bytes along {', '.join(sorted(lost))}, and the job has no such groups")
    return found


def ratio_of(sent: float, expected: float) -> float:
    """1 where neither side has any."""
    return sent / expected if expected else (math.inf if sent else 1.0)


def table_of(result: Mapping[str, Any]) -> str:
    """The rows as a table in Markdown, for the docs."""
    lines = ["| plan | model | ranks | kB a rank | sent / formula |", "|---|---|---|---|---|"]
    for name, found in result["rows"].items():
        sent, ratio = (figure.value or 0.0 for figure in figures(name, found))
        lines.append(f"| {name} | {found['model']} | {found['ranks']} | {sent:,.1f} | {ratio:.4f} |")
    return "\n".join(lines)


def figures(name: str, found: dict[str, Any]) -> list[Figure]:
    """Bytes of the rank that sends most, and of the rank and axis that are furthest from the formula."""
    most = max(sum(rank["sent"].values()) for rank in found["on_ranks"])
    ratio = max((rank["ratio"] for rank in found["on_ranks"]), key=lambda each: abs(each - 1))
    return [
        Figure(f"{name}: sent by a rank", most / 1000, "kB a step"),
        Figure(f"{name}: sent / formula", ratio, "×", 1 + TOLERANCE, at_least=1 - TOLERANCE),
    ]
