"""What post-training cannot do is said before anything is built."""

from __future__ import annotations

from typing import Any

import pytest

from mindspeed_mm.fsdp.params.argument import Arguments
from mindspeed_mm.fsdp.params.rules.posttrain import needs_reference, posttrain_problems, reference_kind

LORA = {"training": {"lora": {"enable": True}}}
PP = {"parallel": {"pipeline_parallel_size": 2}}
SAVED = {"training": {"save": "runs/a"}}
SERVED = {"backend": "vllm", "base_url": "http://a"}
REWARDS = {"rewards": [{"name": "exact_match"}]}


def lora(**keys: Any) -> dict[str, Any]:
    return {"training": {"lora": {"enable": True, **keys}}}


def tree(posttrain: dict[str, Any], others: dict[str, Any] | None = None) -> Arguments:
    others = others or {}
    training = {"micro_batch_size": 8, **others.get("training", {})}
    given = {"model": {"model_name_or_path": "model"}, "posttrain": posttrain, **others, "training": training}
    return Arguments.model_validate(given)


PAIRS: list[tuple[dict[str, Any], dict[str, Any], str, str]] = [
    ({"reference": {"kind": "adapters_off"}}, {}, "reference.kind", "frozen"),
    ({"reference": {"kind": "adapters_off"}}, lora(init_lora_weights="pissa_niter_4"), "reference.kind", "stored"),
    ({"reference": {"kind": "adapters_off"}}, lora(modules_to_save=["lm_head"]), "reference.kind", "frozen"),
    ({"reference": {"kind": "adapters_off"}}, lora(pretrained_lora_path="a"), "reference.kind", "stored"),
    ({"reference": {"kind": "adapters_off"}}, {**LORA, **PP}, "reference.kind", "mm posttrain reference"),
    ({"reference": {"kind": "frozen"}}, PP, "reference.kind", "mm posttrain reference"),
    ({"reference": {"kind": "adapters_off", "sync_steps": 4}}, LORA, "reference.sync_steps", "kind: frozen"),
    ({"reference": {"kind": "stored", "model_name_or_path": "a"}}, {}, "reference.model_name_or_path", "kind: frozen"),
    ({"reference": {"kind": "frozen", "path": "a"}}, {}, "reference.path", "kind: stored"),
    ({"dpo": {"loss_type": ["sigmoid", "sft"], "loss_weights": [1]}}, {}, "dpo.loss_weights", "one for each"),
    ({"dpo": {"loss_weights": [0]}}, {}, "dpo.loss_weights", "above 0"),
    ({"reference": {"sync_steps": 2, "model_name_or_path": "a"}}, {}, "reference.sync_steps", "one of them"),
    ({"reference": {"sync_steps": 2}}, {"training": {"ema": {"enable": True}}}, "reference.sync_steps", "one of them"),
    ({"dpo": {"loss_type": "ipo", "label_smoothing": 0.1}}, {}, "dpo.label_smoothing", "sigmoid"),
    ({"dpo": {"loss_type": "ipo", "simpo_gamma": 2.0}}, {}, "dpo.simpo_gamma", "use simpo"),
    ({"dpo": {"discopop_tau": 1.0}}, {}, "dpo.discopop_tau", "use discopop"),
]
SAMPLES: list[tuple[dict[str, Any], dict[str, Any], str, str]] = [
    ({"rewards": []}, {}, "rewards", "exact_match"),
    ({"rewards": []}, {"data": {"dataset_param": {"dataset_type": "generation_prompts"}}}, "rewards", "jpeg_size"),
    ({"rewards": [{"name": "json"}, {"name": "json"}]}, {}, "rewards", "weight"),
    ({"rewards": [{"name": "json", "weight": 0}]}, {}, "rewards", "another weight"),
    ({"grpo": {"num_generations": 1}}, {}, "grpo.num_generations", "2"),
    (
        {"grpo": {"num_generations": 3}},
        {"parallel": {"data_parallel_size": 2}, "training": {"micro_batch_size": 4}},
        "grpo.num_generations",
        "multiple",
    ),
    ({}, PP, "rollout.backend", "tensor_parallel_size"),
    (
        {},
        {
            "data": {"dataset_param": {"basic_parameters": {"val_rate": 0.1}}},
            "training": {"val_interval": 5},
        },
        "val_interval",
        "mm evaluate",
    ),
    ({"reference": {"kind": "stored"}, "grpo": {"beta": 0.1}}, {}, "reference.kind", "auto"),
    ({"method": "nft", "nft": {"kl": 0}}, {"training": {"ema": {"enable": True}}}, "ema.enable", "old_decay: 0"),
    ({"method": "nft", "nft": {"kl": 0}, "flow": {"guidance_scale": 3}}, {}, "flow.guidance_scale", "grpo"),
    ({"flow": {"noise_level": 0}}, {}, "flow.noise_level", "nft"),
    ({"flow": {"window": {"size": 11}}}, {}, "flow.window.size", "Lower"),
    ({"rollout": {"temperature": 0}}, {}, "rollout.temperature", "1"),
    ({"rollout": {"ahead": 1}}, {}, "rollout.ahead", "server"),
    ({"rollout": SERVED | {"ahead": 2}}, SAVED, "rollout.ahead", "Set it to 1"),
    ({"rollout": SERVED | {"ahead": 1, "correction": "none"}}, SAVED, "rollout.ahead", "token_truncate"),
    ({"rollout": {"backend": "vllm"}}, SAVED, "rollout.base_url", "address"),
    ({"rollout": {"backend": "vllm", "base_url": "a:80"}}, SAVED, "rollout.base_url", "http"),
    ({"rollout": {"backend": "sglang", "base_url": "http://a"}}, {}, "save", "folder"),
    (
        {"rollout": SERVED},
        {"training": {"save": "runs/a", "lora": {"enable": True, "quantize": "nf4"}}},
        "rollout.backend",
        "transformers",
    ),
    ({"rollout": {"base_url": "http://a"}}, {}, "rollout.base_url", "backend"),
    ({"rollout": SERVED}, {**SAVED, "model": {}}, "model_name_or_path", "starts from"),
]
DISTILLED: list[tuple[dict[str, Any], dict[str, Any], str, str]] = [
    ({"reference": {"sync_steps": 2}}, {}, "reference.sync_steps", "Leave"),
    ({"reference": {"kind": "stored"}}, {}, "reference.kind", "auto"),
    ({"dmd": {"score_range": [0.5, 0.2]}}, {}, "dmd.score_range", "smaller one first"),
    ({"dmd": {"guidance_scale": 1, "negative_prompt": "blurred"}}, {}, "dmd.negative_prompt", "guidance_scale"),
    ({"dmd": {"context_noise": 100}}, {}, "dmd.context_noise", "num_frame_per_block"),
    ({"dmd": {"beta1_critic": 0.0}}, {"training": {"optimizer": "lion"}}, "dmd.beta1_critic", "use adamw or"),
    ({"dmd": {"beta2_critic": 0.9}}, {"training": {"optimizer": "lion"}}, "dmd.beta2_critic", "use adamw or"),
    ({"dmd": {"same_step_across_blocks": False}}, {}, "dmd.same_step_across_blocks", "num_frame_per_block"),
    ({}, {"training": {"diffusion": {"caption_dropout": 0.1}}}, "diffusion.caption_dropout", "Leave"),
    ({}, {"training": {"diffusion": {"loss_weighting": "bell"}}}, "diffusion.loss_weighting", "Leave"),
    ({}, {"model": {"model_name_or_path": "model", "train_from_scratch": True}}, "train_from_scratch", "teacher"),
    (
        {},
        {"data": {"dataset_param": {"basic_parameters": {"val_rate": 0.1}}}, "training": {"val_interval": 5}},
        "val_interval",
        "training.sampling",
    ),
    ({}, {"parallel": {"tensor_parallel_size": 2}}, "tensor_parallel_size", "1"),
    ({}, {"parallel": {"ulysses_parallel_size": 2}}, "ulysses_parallel_size", "1"),
    ({}, {"parallel": {"fsdp_plan": {"param_dtype": "fp16"}}}, "fsdp_plan.param_dtype", "bf16"),
    ({}, {"features": {"enable_gradient_offload": True}}, "enable_gradient_offload", "Leave"),
    ({"dmd": {"num_frame_per_block": 3}}, {"features": {"compile": True}}, "compile", "num_frame_per_block"),
]


@pytest.mark.parametrize(
    ("posttrain", "others", "key", "words"),
    [({"method": "dpo", **p}, *rest) for p, *rest in PAIRS]
    + [({"method": "grpo", **REWARDS, **p}, *rest) for p, *rest in SAMPLES]
    + [({"method": "dmd", **p}, *rest) for p, *rest in DISTILLED],
)
def test_refusals(posttrain: dict[str, Any], others: dict[str, Any], key: str, words: str) -> None:
    (problem,) = posttrain_problems(tree(posttrain, others))
    assert problem.key.endswith(f".{key}") and words in problem.way_out
    assert not list(posttrain_problems(tree({**posttrain, "method": None}, others)))


@pytest.mark.parametrize(
    ("key", "others"),
    [
        ("training.lora.dropout", lora(dropout=0.1)),
        ("features.loss_cfg.z_loss_coef", {"features": {"loss_cfg": {"z_loss_coef": 1e-4}}}),
        ("features.loss_cfg.loss_type", {"features": {"loss_cfg": {"loss_type": "raw"}}}),
        ("model.mtp_num_layers", {"model": {"mtp_num_layers": 1}}),
        (
            "data.dataset_param.basic_parameters.packing",
            {"data": {"dataset_param": {"basic_parameters": {"packing": True}}}},
        ),
    ],
)
def test_what_supervised_training_has_alone(key: str, others: dict[str, Any]) -> None:
    (problem,) = posttrain_problems(tree({"method": "dpo"}, others))
    assert problem.key == key


MEDIA = {"data": {"dataset_param": {"dataset_type": "generation", "basic_parameters": {"stage": "rm"}}}}


@pytest.mark.parametrize(
    ("dpo", "others", "key"),
    [
        ({"loss_type": "ipo"}, MEDIA, "dpo.loss_type"),
        ({"ld_alpha": 0.5}, MEDIA, "dpo.ld_alpha"),
        ({"label_smoothing": 0.1}, MEDIA, "dpo.label_smoothing"),
        ({"weight_alpha": 1.0}, MEDIA, "dpo.histogram_path"),
        ({"histogram_path": "a.json"}, MEDIA, "dpo.histogram_path"),
        ({"timestep_weight": "sigma"}, {}, "dpo.timestep_weight"),
        ({"weight_beta": 1.0}, {}, "dpo.weight_beta"),
    ],
)
def test_settings_of_pairs_of_media_and_of_answers(dpo: dict[str, Any], others: dict[str, Any], key: str) -> None:
    (problem,) = posttrain_problems(tree({"method": "dpo", "dpo": dpo}, others))
    assert problem.key == f"posttrain.{key}"


def test_errors_of_generators_cannot_be_stored() -> None:
    (problem,) = posttrain_problems(tree({"method": "dpo", "reference": {"kind": "stored"}}, MEDIA))
    assert problem.key == "posttrain.reference.kind" and "other noise" in problem.what


@pytest.mark.parametrize(
    ("posttrain", "others", "kind"),
    [
        ({}, LORA, "adapters_off"),
        ({}, lora(init_lora_weights="pissa"), "frozen"),
        ({}, {}, "frozen"),
        ({}, {**LORA, **PP}, "stored"),
        ({"reference": {"model_name_or_path": "a"}}, LORA, "frozen"),
        ({"reference": {"sync_steps": 2}}, LORA, "frozen"),
        ({"dpo": {"loss_type": ["simpo", "sft"]}}, LORA, None),
        ({"dpo": {"loss_type": ["simpo", "sigmoid"]}}, LORA, "adapters_off"),
    ],
)
def test_the_reference_that_is_chosen(posttrain: dict[str, Any], others: dict[str, Any], kind: str | None) -> None:
    arguments = tree({"method": "dpo", **posttrain}, others)
    assert reference_kind(arguments) == kind
    assert not list(posttrain_problems(arguments))


@pytest.mark.parametrize(
    ("posttrain", "needed"),
    [
        ({"method": None}, False),
        ({"method": "grpo"}, False),
        ({"method": "grpo", "grpo": {"beta": 0.04}}, True),
        ({"method": "nft"}, True),
        ({"method": "nft", "nft": {"kl": 0}}, False),
        ({"method": "dmd"}, True),
    ],
)
def test_methods_that_need_a_reference(posttrain: dict[str, Any], needed: bool) -> None:
    assert needs_reference(tree(posttrain).posttrain) is needed


def test_weights_of_losses_do_not_unlearn() -> None:
    assert not list(posttrain_problems(tree({"method": "dpo", "dpo": {"loss_weights": [0], "pref_ftx": 1}})))
    with pytest.raises(ValueError, match="loss_weights"):
        tree({"method": "dpo", "dpo": {"loss_weights": [-1]}})


@pytest.mark.parametrize("steps", [[], [750, 500], [1000, 1000], [1000, 0], [1000, 0.5], 4])
def test_levels_that_do_not_fall(steps: Any) -> None:
    with pytest.raises(ValueError, match="denoising_step_list"):
        tree({"method": "dmd", "dmd": {"denoising_step_list": steps}})


def test_a_loss_that_nobody_knows() -> None:
    with pytest.raises(ValueError, match="'sigmo' is not one of sigmoid, hinge"):
        tree({"method": "dpo", "dpo": {"loss_type": "sigmo"}})
