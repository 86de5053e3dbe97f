"""The example of rewards: its rows are the reading rows, and its YAML passes every rule."""

import importlib.util
import json
from pathlib import Path

from mindspeed_mm.fsdp.params.loader import load_config

EXAMPLE = Path(__file__).parents[2] / "examples" / "digits_grpo"


def test_prompts_are_the_reading_rows(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("make_prompts", EXAMPLE / "make_prompts.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    rows = [{"id": f"{task}-{n}", "task": task} for n in range(3) for task in ("naming", "reading")]
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert module.make_prompts(tmp_path) == {"reading_train.jsonl": 3, "reading_test.jsonl": 3}
    kept = [json.loads(line) for line in (tmp_path / "reading_train.jsonl").read_text().splitlines()]
    assert {row["task"] for row in kept} == {"reading"}


def test_the_yaml_is_a_run() -> None:
    arguments = load_config(EXAMPLE / "digits_grpo_config.yaml").arguments
    assert arguments.posttrain.method == "grpo"
    assert arguments.training.micro_batch_size == 24 * arguments.posttrain.grpo.num_generations
