"""One rank of `benchmarks.communication`: trains two steps under each plan and writes what it sent.

`python -m benchmarks.communication_rank make FOLDER` makes the runs; `… count FOLDER OUT NAME…` counts, on as many
ranks as the environment says.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from mindspeed_mm.fsdp.utils.torchvision_guard import ensure_torchvision

ensure_torchvision()  # transformers imports torchvision, whose compiled part a CPU build of torch may refuse

import torch.distributed as dist  # noqa: E402

from benchmarks.communication_cases import CASES, MODELS, ROWS_A_STEP, Case  # noqa: E402
from benchmarks.communication_count import WireCount  # noqa: E402
from benchmarks.communication_formula import Decoder  # noqa: E402
from mindspeed_mm.fsdp.params.sizes.parallel import resolve_parallel_sizes  # noqa: E402
from mindspeed_mm.fsdp.train.configuration import load_with_plugins  # noqa: E402
from mindspeed_mm.fsdp.train.trainer import Trainer  # noqa: E402

STEPS = 2
TOKENS_A_ROW = 64


def make(
    folder: Path, shapes: Mapping[str, Decoder], tokens: int, training: Mapping[str, Any], param_dtype: str | None
) -> None:
    """Write a model folder, rows and a YAML for each shape.

    Args:
        folder: Gets one folder a model.
        shapes: Of the models.
        tokens: Of each row.
        training: Keys of that section.
        param_dtype: Of `fsdp_plan`.
    """
    from tests.helpers.tiny_models import make_tiny_qwen3, make_tiny_qwen3_moe
    from tests.helpers.tiny_run import make_tiny_run

    plan = {"param_dtype": param_dtype} if param_dtype else {}
    for name, shape in shapes.items():
        make_model = make_tiny_qwen3_moe if shape.experts else make_tiny_qwen3
        make_model(folder / name / "model", tie=shape.tied, **fields(shape))
        write_rows(folder / name, tokens)
        make_tiny_run(folder / name, parallel={"fsdp_plan": plan}, training={"adam_fused": False, **training})


def fields(shape: Decoder) -> dict[str, Any]:
    """As transformers calls them."""
    found = {
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.key_heads,
        "head_dim": shape.head_width,
        "vocab_size": shape.vocabulary,
    }
    if not shape.experts:
        return found | {"intermediate_size": shape.intermediate}
    counts = {"num_experts": shape.experts, "num_experts_per_tok": shape.chosen}
    return found | counts | {"moe_intermediate_size": shape.intermediate}


def write_rows(folder: Path, tokens: int) -> None:
    """Rows of `tokens` tokens each, all alike."""
    from transformers import AutoTokenizer

    def row(letters: int) -> list[dict[str, str]]:
        return [{"role": "user", "content": "Say it."}, {"role": "assistant", "content": "x" * letters}]

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    letters = 1 + tokens - len(tokenizer.apply_chat_template(row(1), tokenize=True, return_dict=False))
    lines = [json.dumps({"id": f"row{n}", "messages": row(letters), "images": []}) for n in range(4 * ROWS_A_STEP)]
    (folder / "rows.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


class Quiet(Trainer):
    """Neither logs nor saves."""

    def _build_hooks(self, *_args: Any, **_kwargs: Any) -> Any:
        return []


def count(folder: Path, case: Case) -> dict[str, Any]:
    """What this rank sent in the second step, and of which shape that was: in the first, groups say hello."""
    yaml = folder / case.model / "run.yaml"
    sizes = resolve_parallel_sizes(load_with_plugins(yaml, case.words).arguments.parallel, case.ranks)
    counted = WireCount()
    Quiet(load_with_plugins(yaml, [*case.words, case.rows(sizes.dp)]), hooks=[counted]).train()
    return counted.steps[-1]


def join(store: Path) -> int:
    """Meet the other ranks, which share one process group from first to last; returns this rank."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        "gloo", init_method=f"file://{store}.store", rank=rank, world_size=ranks, timeout=timedelta(seconds=300)
    )
    return rank


def leave() -> None:
    """Wait for the others and end this process: at a usual end, live gloo threads abort now and then."""
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def main(folder: Path, out: Path, names: list[str]) -> None:
    """Count under each plan."""
    rank = join(out)
    found = {name: count(folder, CASES[name]) for name in names}
    Path(f"{out}.{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    leave()


if __name__ == "__main__":
    if sys.argv[1] == "make":
        make(Path(sys.argv[2]), MODELS, TOKENS_A_ROW, {"train_iters": STEPS}, param_dtype="bf16")
    else:
        main(Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
