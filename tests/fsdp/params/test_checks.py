"""Rules between keys, and features that this version does not have."""

from typing import Any

import pytest

from mindspeed_mm.fsdp.params.argument import Arguments
from mindspeed_mm.fsdp.params.rules.all import check_cross_section
from mindspeed_mm.fsdp.params.rules.unbuilt import unbuilt_features
from mindspeed_mm.fsdp.params.schema_walk import pattern_keys, walk_fields


def nested(key: str, value: Any) -> dict[str, Any]:
    for name in reversed(key.split(".")):
        value = {name: value}
    return value


def merged(*trees: dict[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for tree in trees:
        for name, value in tree.items():
            both = isinstance(value, dict) and isinstance(result.get(name), dict)
            result[name] = merged(result[name], value) if both else value
    return result


def arguments(values: dict[str, Any]) -> Arguments:
    return Arguments.model_validate(merged(*(nested(key, value) for key, value in values.items())))


BASIC = "data.dataset_param.basic_parameters"


SWITCHED = {
    "training.lora": {"rank": 4},
    "training.ema": {"decay": 0.9},
}


def test_every_section_with_a_switch_is_among_those_that_are_tried() -> None:
    switches = {key.removesuffix(".enable") for key, _ in walk_fields() if key.endswith(".enable")}
    assert set(SWITCHED) == {section for section in switches if section.startswith("training.")}


@pytest.mark.parametrize("section", SWITCHED)
def test_keys_beside_a_forgotten_switch_are_refused(section: str) -> None:
    """`training.lora: {rank: 4}` trained the whole model, and nothing said so."""
    key, value = next(iter(SWITCHED[section].items()))
    (problem,) = check_cross_section(arguments({f"{section}.{key}": value}))
    assert problem.key == f"{section}.{key}" and f"{section}.enable: true" in problem.way_out
    for switch in (True, False):
        assert check_cross_section(arguments({f"{section}.{key}": value, f"{section}.enable": switch})) == []
    assert check_cross_section(arguments({section: {}})) == []


@pytest.mark.edge("N2")
@pytest.mark.parametrize(
    ("values", "key", "message"),
    [
        ({"model.freeze": ["*"]}, "model.freeze", "nothing is left to train"),
        ({"model.freeze": ["*"], "training.lora.enable": True}, "model.freeze", "training.lora.enable"),
        ({"model.train_from_scratch": True, "training.lora.enable": True}, "model.train_from_scratch", "lora.enable"),
        ({"model.freeze": ["layers.{3-1}"]}, "model.freeze", "{3-1}"),
        ({"parallel.fsdp_plan.apply_modules": ["a.{"]}, "parallel.fsdp_plan.apply_modules", "brace"),
        ({"training.lr": 1e-5, "training.lr_min": 1e-4}, "training.lr_min", "above training.lr"),
        ({"training.lr": 1e-5, "training.lr_start": 1e-4}, "training.lr_start", "above training.lr"),
        ({"training.lr_decay_style": "wsd", "training.lr_warmup_ratio": 0.1}, "training.lr_decay_ratio", "all steps"),
        ({"training.lr_scaling_plan": [{"match": "("}]}, "training.lr_scaling_plan[0].match", "regular expression"),
        (
            {"model.train_from_scratch": True, "training.load": "x", "training.load_format": "hf"},
            "model.train_from_scratch",
            "training.load",
        ),
        (
            {"data.dataset_param.preprocess_parameters": {"image_min_pixels": 9, "image_max_pixels": 8}},
            "data.dataset_param.preprocess_parameters.image_min_pixels",
            "image_max_pixels, 8",
        ),
        (
            {f"{BASIC}.train_on_prompt": True, f"{BASIC}.mask_history": True},
            f"{BASIC}.train_on_prompt",
            "mask_history",
        ),
        ({f"{BASIC}.val_dataset": "a", f"{BASIC}.val_rate": 0.1}, f"{BASIC}.val_dataset", "val_rate"),
        ({"training.val_interval": 5}, "training.val_interval", "no rows for validation"),
        (
            {"data.dataloader_param": {"prefetch_factor": 2, "num_workers": 0}},
            "data.dataloader_param.prefetch_factor",
            "num_workers is 0",
        ),
        (
            {"tools.profile": {"enable": True, "static_param": {"start_step": 5, "end_step": 5}}},
            "tools.profile.static_param.end_step",
            "start_step, 5",
        ),
        (
            {"tools.memory_profile": {"enable": True, "start_step": 5, "end_step": 5}},
            "tools.memory_profile.end_step",
            "start_step, 5",
        ),
        ({"parallel.recompute": True}, "parallel.recompute", "features.recompute"),
    ],
)
def test_a_broken_rule_names_both_keys(values: dict[str, Any], key: str, message: str) -> None:
    (problem,) = check_cross_section(arguments(values))
    assert problem.key == key
    assert message in problem.what


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"model.freeze": ["model.*"], "training.lora.enable": True},
        {"training.val_interval": 5, f"{BASIC}.val_rate": 0.1},
        {"training.lr_decay_style": "wsd", "training.lr_warmup_ratio": 0.1, "training.lr_decay_ratio": 0.2},
        {"parallel.recompute": True, "features.recompute": True},
        {"model.train_from_scratch": True, "training.load": "runs/mine"},
    ],
)
def test_rules_that_hold_say_nothing(values: dict[str, Any]) -> None:
    assert check_cross_section(arguments(values)) == []


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"training.lr_decay_style": "wsd", "training.save_async": True, "training.on_nonfinite": "skip"},
        {"parallel.fsdp_plan": {"reshard_after_forward": 2, "cpu_offload": True, "param_dtype": "bf16"}},
        {"features.loss_cfg.loss_type": "per_sample_loss", "data.dataset_param.attr.formatting": "alpaca"},
        {"features.recompute": True, "features.recompute_plan": {"apply_modules": ["a"], "use_reentrant": True}},
        {"features.chunkloss_plan.chunk_size": 2},
        {"data.dataset_param": {"dataset_type": "mine", "basic_parameters": {"packing": True}}},
        {"training.lora": {"enable": True, "init_lora_weights": "gaussian", "modules_to_save": ["lm_head"]}},
        {"training.lora": {"enable": False, "init_lora_weights": "pissa", "use_dora": True}},
    ],
)
def test_built_features_are_not_refused(values: dict[str, Any]) -> None:
    assert unbuilt_features(arguments(values)) == []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model.checkpoint_path", "somewhere"),
        ("posttrain.rollout.weight_sync", "nccl"),
    ],
)
def test_using_a_feature_that_is_not_built_is_one_error_that_names_the_key(key: str, value: Any) -> None:
    (problem,) = unbuilt_features(arguments({key: value}))
    assert problem.key == key
    assert "This version takes" in problem.way_out


def test_a_malformed_pattern_is_named_under_every_key_that_holds_patterns() -> None:
    for key in pattern_keys():
        problems = check_cross_section(arguments({key: ["layers.{3-1}"]}))
        assert [p.key for p in problems if "{3-1}" in p.what] == [key]
