"""Words of other tools are answered with ours, before any comparison of spelling."""

from __future__ import annotations

from pathlib import Path

import pytest

from mindspeed_mm.fsdp.params.other_tools import COMMANDS, OTHER_TOOLS
from mindspeed_mm.fsdp.params.schema_walk import walk_fields
from tests.helpers.runs import mm

KEYS = dict(walk_fields())


@pytest.mark.edge("BU5")
def test_every_word_leads_to_a_key_of_the_schema() -> None:
    assert {word: key for word, key in OTHER_TOOLS.items() if key not in KEYS} == {}
    assert not COMMANDS.keys() & OTHER_TOOLS.keys()


@pytest.mark.edge("BU5")
@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("gradient_checkpointing", "features.recompute"),
        ("deepspeed", "parallel.fully_shard_parallel_size"),
        ("warmup_steps", "lr_warmup_ratio"),
        ("do_train", "mm train trains"),
        ("learning_rate", "'lr'"),
        ("lora_rank", "training.lora.rank"),
        ("bf16", "parallel.fsdp_plan.param_dtype"),
    ],
)
def test_a_key_of_another_tool_in_a_yaml(word: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(f"training:\n  {word}: 1\n")
    said = mm("check", "--config-only", tmp_path / "run.yaml")
    assert said.code == 2 and told in said.out, said.out


@pytest.mark.edge("BU5")
@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("learning_rate", "training.lr"),
        ("cosine", "a value of training.lr_decay_style"),
        ("deepspeed", "parallel.fully_shard_parallel_size"),
        ("do_train", "mm train trains"),
        ("per_device_train_batch_size", "training.micro_batch_size"),
    ],
)
def test_schema_is_asked_in_words_of_others(word: str, told: str) -> None:
    said = mm("schema", word)
    assert said.code == 2 and told in said.err, said.err


@pytest.mark.edge("BU5")
@pytest.mark.parametrize(
    ("option", "told"),
    [
        ("--lr", "training.lr=VALUE"),
        ("--learning-rate", "training.lr=VALUE"),
        ("--learning_rate", "training.lr=VALUE"),
        ("--num-train-epochs", "training.train_epochs=VALUE"),
        ("--nproc_per_node", "mm train --nproc N"),
    ],
)
def test_an_option_of_another_tool(option: str, told: str) -> None:
    said = mm("train", "run.yaml", option, "1")
    assert said.code == 2 and told in said.err and "--help'" not in said.err, said.err
