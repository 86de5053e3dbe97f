"""Dotted keys read and change a configuration, through sections, mappings and sections that are null."""

from __future__ import annotations

import pytest

from mindspeed_mm.core.config_path import key_of, steps_of, value_at, with_value
from mindspeed_mm.fsdp.params.argument import Arguments


def test_a_key_is_read_through_sections_and_mappings() -> None:
    assert value_at(Arguments(), "training.lora.rank") == 8
    assert value_at({"a": {"b": 1}}, "a.b") == 1


def test_below_a_section_that_is_null_stands_the_given_answer() -> None:
    assert value_at(Arguments(), "training.quantization_plan.recipe_name") is None
    assert value_at(Arguments(), "training.quantization_plan.recipe_name", "absent") == "absent"


def test_one_key_is_changed_in_a_copy_and_the_others_stay() -> None:
    before = Arguments()
    after = with_value(before, "training.lora.rank", 4)
    assert (before.training.lora.rank, after.training.lora.rank) == (8, 4)
    assert after.training.lora.alpha == before.training.lora.alpha
    assert after.model is before.model


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(KeyError):
        value_at(Arguments(), "training.lora.size")
    with pytest.raises(KeyError):
        with_value(Arguments(), "training.size", 1)


def test_keys_of_entries_of_lists() -> None:
    key, steps = "posttrain.rewards[1].settings.url", ["posttrain", "rewards", 1, "settings", "url"]
    assert key_of(steps) == key
    assert steps_of(key) == steps
    assert steps_of("a.0") == ["a", "0"] != steps_of("a[0]")
