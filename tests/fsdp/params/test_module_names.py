"""Module patterns of files that were written for a model's own code."""

from pathlib import Path

from mindspeed_mm.fsdp.params.loader import load_config


def patterns(model: dict[str, object], *names: str) -> tuple[str, ...]:
    config = {"model": model, "parallel": {"fsdp_plan": {"apply_modules": list(names)}}}
    return load_config(config).arguments.parallel.fsdp_plan.apply_modules


def test_names_become_those_here() -> None:
    given = (
        "vision_tower.encoder.blocks.{*}",
        "vision_tower",
        "language_model.model.layers.{0,2}",
        "model.mm_projector",
    )
    assert patterns({"model_id": "kimi_k25"}, *given) == (
        "model.vision_tower.layers.{*}",
        "model.vision_tower",
        "model.language_model.layers.{0,2}",
        "model.mm_projector",
    )
    assert patterns({}, *given) == given


def test_the_name_of_the_output_head_and_names_without_brackets_are_settled(tmp_path: Path) -> None:
    text = "model: {model_id: qwen3_asr, freeze: thinker.audio_tower}\n"
    (tmp_path / "run.yaml").write_text(text + "features: {chunkloss_plan: {apply_module: thinker.lm_head}}\n")
    arguments = load_config(tmp_path / "run.yaml").arguments
    assert arguments.model.freeze == ("model.audio_tower",)
    assert arguments.features.chunkloss_plan.apply_module == "lm_head"


def test_heads_that_are_left_out_need_no_wrapping() -> None:
    assert patterns({}, "model.layers.{*}", "mtp", "mtp.layers.{*}", "mtpx") == ("model.layers.{*}", "mtpx")
    assert patterns({"mtp_num_layers": 1}, "mtp") == ("mtp",)
