"""Words of other tools are answered with ours, before any comparison of spelling."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from mindspeed_mm.fsdp.params.other_tools import (
    SHORT,
    TOOLS,
    rows_of,
    suggested_keys,
    suggested_sentences,
    words_of,
)
from mindspeed_mm.fsdp.params.schema_walk import walk_fields
from mindspeed_mm.tasks.importing import importing  # registers the conversions
from mindspeed_mm.tasks.importing.draft import CONVERSIONS, DEFAULTS
from tests.helpers.runs import mm

ROOT = Path(__file__).parents[3]
CARDS = (ROOT / "mindspeed_mm/fsdp/data/datasets").glob("*/card.yaml")
OF_CARDS = {
    f"data.dataset_param.{key}"
    for card in CARDS
    for key in re.findall(r"^  ((?:basic|preprocess)_parameters\.\w+):", card.read_text(), re.MULTILINE)
}
KEYS = {key for key, _ in walk_fields()} | OF_CARDS
PEERS = [line.split("\t") for line in (ROOT / "tests/tasks/importing/peer_keys.tsv").read_text().splitlines()[1:]]
"""Tool, setting, number of its own example files that have it: two or more."""


@pytest.mark.edge("BU5")
def test_every_word_leads_to_a_key_of_the_schema() -> None:
    assert {word: key for word, key in suggested_keys().items() if key not in KEYS} == {}
    assert not suggested_sentences().keys() & suggested_keys().keys()
    assert len(suggested_keys()) > 300 and len(suggested_sentences()) > 300


@pytest.mark.parametrize("tool", ["common", *TOOLS])
def test_the_table_is_whole(tool: str) -> None:
    words = [word for row in rows_of(tool) for word in row.words]
    assert [word for word, count in Counter(words).items() if count > 1] == []
    for row in rows_of(tool):
        assert row.ours is None or row.ours in KEYS or row.ours in importing.Arguments.model_fields, row
        assert row.kind == "translated" or row.note or tool == "common", row
        assert row.ours is not None or row.kind != "translated", row
        known = row.how in ("", "idle", "no", "with") or row.how.startswith(("map ", "=")) or row.how in CONVERSIONS
        assert known, row
        assert not row.default.startswith("@") or row.default[1:] in DEFAULTS, row
        assert not row.note.endswith("."), row


@pytest.mark.parametrize("tool", TOOLS)
def test_notes_name_keys_that_exist(tool: str) -> None:
    for row in rows_of(tool):
        for key in re.findall(
            r"\b(?:training|posttrain|model|features|parallel)(?:\.\w+)+|\b(?:basic|preprocess)_parameters\.\w+",
            row.note,
        ):
            full = f"data.dataset_param.{key}" if key.startswith(("basic_", "preprocess_")) else key
            assert full in KEYS or key in ("model.layers", "parallel.fsdp_plan"), (row.words[0], key)


def test_every_setting_of_two_example_files_is_in_the_table() -> None:
    assert len(PEERS) > 1500 and {tool for tool, _, _ in PEERS} == set(TOOLS) - {"diffusers"}
    assert [(tool, key) for tool, key, _ in PEERS if key not in words_of(tool)] == []


@pytest.mark.parametrize("tool", sorted({tool for tool, _, _ in PEERS}))
def test_at_most_a_tenth_of_a_tools_settings_is_not_supported(tool: str) -> None:
    keys = [key for name, key, _ in PEERS if name == tool]
    refused = [key for key in keys if words_of(tool)[key].kind == "unsupported"]
    assert len(refused) <= 0.1 * len(keys), refused


def test_short_names_stand_for_sections() -> None:
    assert all(key in KEYS for key in SHORT.values())


@pytest.mark.edge("BU5")
@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("gradient_checkpointing", "features.recompute"),
        ("deepspeed", "parallel.fully_shard_parallel_size"),
        ("warmup_steps", "lr_warmup_ratio"),
        ("do_train", "m train trains"),
        ("learning_rate", "'lr'"),
        ("lora_rank", "training.lora.rank"),
        ("bf16", "parallel.fsdp_plan.param_dtype"),
        ("blocks_to_swap", "features.enable_weight_offload"),
        ("cache_latents_to_disk", "m extract encodes"),
        ("plot_loss", "m report draws"),
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
        ("saves_per_epoch", "training.save_interval"),
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
        ("--network_dim", "training.lora.rank=VALUE"),
    ],
)
def test_an_option_of_another_tool(option: str, told: str) -> None:
    said = mm("train", "run.yaml", option, "1")
    assert said.code == 2 and told in said.err and "--help'" not in said.err, said.err
