"""The page on plans: its configurations are accepted on as many ranks as it says, its tables are those of the files and
formulas that it names."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from benchmarks.communication import table_of
from benchmarks.communication_formula import example
from mindspeed_mm.fsdp.params.loader import load_config
from mindspeed_mm.fsdp.params.sizes.parallel import resolve_parallel_sizes

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "parallelism.md").read_text(encoding="utf-8")
BASE = ROOT / "examples" / "digits" / "digits_tiny_config.yaml"
BLOCKS = re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.splitlines()[0][2:40])
def test_configuration_is_accepted_on_its_ranks(block: str, tmp_path: Path) -> None:
    ranks = int(re.search(r"on (\d+) ranks", block.splitlines()[0])[1])  # type: ignore[index]
    base, own = YAML().load(BASE), YAML().load(block)
    for section, keys in own.items():
        base[section] = {**(base.get(section) or {}), **keys}
    path = tmp_path / "run.yaml"
    YAML().dump(base, path)
    sizes = resolve_parallel_sizes(load_config(path).arguments.parallel, ranks)
    assert sizes.world == ranks


def test_every_axis_has_a_configuration() -> None:
    text = "".join(BLOCKS)
    for key in ("reshard_after_forward", "fully_shard_parallel_size", "tensor_parallel_size", "ring_attention_size",
                "ulysses_parallel_size", "pipeline_parallel_size", "expert_parallel_size", "encoder_plan"):  # fmt: skip
        assert f"{key}:" in text


def test_counted_bytes_are_those_of_the_results() -> None:
    found = json.loads((ROOT / "benchmarks" / "results" / "communication.json").read_text(encoding="utf-8"))
    assert table_of(found) in PAGE
    assert all(figure["met"] is not False for figure in found["figures"])


def test_example_is_that_of_the_formula() -> None:
    for name, axes in example().items():
        parts = ", ".join(f"{axis} {size:.1f}" for axis, size in axes.items())
        assert f"| {name.replace('30B-A3B', 'Qwen3-30B-A3B')} | {sum(axes.values()):.1f} | {parts} |" in PAGE
