"""What model.json, data.json and tools.json say, key by key."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.models.stepvideo.sizes import MOTION_SCORE
from mindspeed_mm.fsdp.params.argument import Arguments
from mindspeed_mm.provider.generator_json import WAN_SIZES
from mindspeed_mm.provider.model_sizes import LANGUAGE_SIZES
from mindspeed_mm.provider.parse import parse
from mindspeed_mm.provider.translate import Translated, translate

NEEDED = ["--lr", "1e-5", "--train-iters", "10", "--micro-batch-size", "1"]
VISION = "image_encoder.vision_encoder"
WHOLE_TOWER = ("model.visual",)
WITHOUT_PROJECTOR = ("model.visual.patch_embed", "model.visual.blocks.{*}")


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("hf").mkdir()
    Path("hf/config.json").write_text('{"model_type": "qwen2_5_vl", "text_config": {"num_hidden_layers": 8}}')
    write("data", {"dataset_param": {"preprocess_parameters": {"model_name_or_path": "hf"}}})


def write(name: str, content: dict[str, Any]) -> None:
    Path(f"{name}.json").write_text(json.dumps(content, indent=1))


def run(model: dict[str, Any], *words: str, world_size: int = 8, data: bool = True) -> Translated:
    write("model", model)
    files = ["--mm-model", "model.json", *(["--mm-data", "data.json"] if data else [])]
    return translate(parse([*NEEDED, *files, *words], {"WORLD_SIZE": str(world_size)}))


def vlm(decoder: dict[str, Any] | None = None, tower: Any = None, projector: Any = None) -> dict[str, Any]:
    return {
        "model_id": "qwen2_5vl",
        "text_decoder": {"num_layers": 8, **(decoder or {})},
        "image_encoder": {"vision_encoder": tower or {}, "vision_projector": projector or {}},
    }


def problem(model: dict[str, Any], *words: str) -> str:
    with pytest.raises(ConfigError) as raised:
        run(model, *words)
    return str(raised.value)


def test_the_folder_is_that_of_the_processor() -> None:
    config = run(vlm()).config
    assert config.arguments.model.model_name_or_path == "hf"
    assert str(config.origins["model.model_name_or_path"]).startswith("data.json:4:")


@pytest.mark.parametrize(
    ("tower", "projector", "decoder", "frozen"),
    [
        ({}, {}, {}, WITHOUT_PROJECTOR),
        ({"freeze": True}, {"freeze": True}, {}, WHOLE_TOWER),
        ({"freeze": False}, {"freeze": True}, {}, ("model.visual.merger",)),
        ({"freeze": False}, {}, {}, ()),
        ({"freeze": False}, {}, {"freeze": True}, ("model.language_model",)),
    ],
)
def test_frozen_parts(tower: Any, projector: Any, decoder: Any, frozen: tuple[str, ...]) -> None:
    assert run(vlm(decoder, tower, projector)).arguments.model.freeze == frozen


def test_a_model_of_transformers_freezes_what_it_says() -> None:
    model = {"model_id": "qwen3_vl", "init_from_hf_path": "hf", "image_encoder": {"vision_encoder": {}}}
    assert run(model, data=False).arguments.model.freeze == ()
    model["image_encoder"] = {"vision_encoder": {"freeze": True}}
    assert run(model, data=False).arguments.model.freeze == WITHOUT_PROJECTOR


def test_patterns_and_attention_of_the_whole_file() -> None:
    model = {"init_from_hf_path": "hf", "freeze": ["model.visual.*"], "attn_implementation": "sdpa"}
    arguments = run(model).arguments
    assert arguments.model.freeze == ("model.visual.*",)
    assert arguments.model.attn_implementation == "sdpa"


def test_frozen_parts_of_a_model_that_is_not_known() -> None:
    Path("hf/config.json").write_text('{"model_type": "other"}')
    assert "freeze: the parts of this model are not known by name" in problem({**vlm(), "model_id": "x"})


PP2 = ("--pipeline-model-parallel-size", "2", "--global-batch-size", "16")


@pytest.mark.parametrize(
    ("counts", "words", "points"),
    [
        ([3, 5], PP2, ("model.language_model.layers.3",)),
        ([0, 8], PP2, ("model.language_model.layers.0",)),
        ([8, 0], PP2, ("model.language_model.norm",)),
        (
            [[1, 2], [2, 3]],
            (*PP2, "--virtual-pipeline-model-parallel-size", "2"),
            tuple(f"model.language_model.layers.{start}" for start in (1, 3, 5)),
        ),
        ([8], (), ()),
    ],
)
def test_layers_of_stages(counts: Any, words: tuple[str, ...], points: tuple[str, ...]) -> None:
    arguments = run(vlm({"pipeline_num_layers": counts}), *words).arguments
    assert arguments.parallel.pp_plan.split_points == points


@pytest.mark.parametrize("chunks", [1, 2])
def test_a_tower_on_several_stages_is_cut_at_equal_cost(chunks: int) -> None:
    decoder, tower = ([3, 5], [16, 16]) if chunks == 1 else ([[0, 0], [4, 4]], [[16, 16], [0, 0]])
    model = vlm({"pipeline_num_layers": decoder}, {"pipeline_num_layers": tower})
    translated = run(model, *PP2, "--virtual-pipeline-model-parallel-size", str(chunks))
    assert translated.arguments.parallel.pp_plan.split_points == ()
    assert any("the vision tower lies on one stage here" in note for note in translated.notes)


@pytest.mark.parametrize(
    ("words", "pattern"),
    [
        (("--recompute-method", "uniform", "--recompute-num-layers", "1"), ()),
        (("--recompute-method", "block", "--recompute-num-layers", "8"), ()),
        (("--recompute-method", "block", "--recompute-num-layers", "2"), ("model.language_model.layers.{0-1}",)),
        ((*PP2, "--recompute-method", "block", "--recompute-num-layers", "1"), ("model.language_model.layers.{0,4}",)),
    ],
)
def test_recomputed_layers(words: tuple[str, ...], pattern: tuple[str, ...]) -> None:
    features = run(vlm(), "--recompute-granularity", "full", *words).arguments.features
    assert (features.recompute, features.recompute_plan.apply_modules) == (True, pattern)


def test_recomputation_in_the_file_goes_before_the_flags() -> None:
    model = vlm({"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 3})
    features = run(model, "--recompute-granularity", "selective").arguments.features
    assert features.recompute_plan.mode == "full"
    assert features.recompute_plan.apply_modules == ("model.language_model.layers.{0-2}",)
    tower = vlm(tower={"recompute_granularity": "full", "recompute_method": "uniform"})
    assert run(tower).arguments.features.recompute_plan.apply_modules == ("model.visual.blocks.{*}",)


def test_sizes_of_the_tower() -> None:
    words = ("--context-parallel-size", "2", "--context-parallel-algo", "ulysses_cp_algo")
    plan = run(vlm(tower={"context_parallel_size": 1}), *words).arguments.parallel.encoder_plan
    assert (plan.ring_attention_size, plan.ulysses_parallel_size) == (1, 1)
    plan = run(vlm(tower={"tensor_model_parallel_size": 1}), "--tensor-model-parallel-size", "2").arguments.parallel
    assert plan.encoder_plan.tensor_parallel_size == 1
    assert (
        run(vlm(tower={"context_parallel_size": 2}), *words).arguments.parallel.encoder_plan
        == type(plan.encoder_plan)()
    )
    assert "Write 1, or 2" in problem(vlm(tower={"context_parallel_size": 3}), *words)
    assert "2, but --context-parallel-size says 1" in problem(vlm({"context_parallel_size": 2}))


def test_the_loss_of_a_model_of_transformers() -> None:
    loss = {"compute_mode": "chunk", "chunk_size": 7, "loss_type": "default", "router_aux_loss_coef": 0.1}
    features = run({"init_from_hf_path": "hf", "loss_cfg": loss}, data=False).arguments.features
    assert (features.enable_chunk_loss, features.chunkloss_plan.chunk_size) == (True, 7)
    assert (features.loss_cfg.loss_type, features.loss_cfg.router_aux_loss_coef) == ("per_micro_batch_loss", 0.1)
    assert "'chunky' is not one of default, chunk, dynamic_chunk" in problem(
        {"init_from_hf_path": "hf", "loss_cfg": {"compute_mode": "chunky"}}
    )


def test_patches() -> None:
    translated = run({"patch": {"muon_optimizer": True, "clip_grad_async": True, "x": True}}, data=False)
    assert translated.arguments.training.optimizer == "muon"
    assert [note for note in translated.notes if "patch" in note] == [
        "model.json:5:8: patch.x has no effect: nothing is patched here."
    ]
    for given, decay in ((True, 0.99), ({"clip_grad_ema_decay": 0.9}, 0.9), ({"clip_grad_ema_decay": 0.0}, None)):
        translated = run({"patch": {"adaptive_clip_grad_norm": given}}, data=False)
        assert translated.arguments.training.clip_grad_ema_decay == decay
    refused = {"patch": {"layerwise_disaggregated_training": True}}
    assert "patch.layerwise_disaggregated_training is not built" in problem(refused)


@pytest.mark.parametrize("name", LANGUAGE_SIZES)
def test_every_size_of_the_language_model_is_compared(name: str) -> None:
    text = {"num_hidden_layers": 8, LANGUAGE_SIZES[name][-1]: 6}
    Path("hf/config.json").write_text(json.dumps({"model_type": "qwen2_5_vl", "text_config": text}))
    line = f"text_decoder.{name}  7, hf/config.json says 6"
    if name in ("rope_theta", "layernorm_epsilon"):
        assert any(line in note for note in run(vlm({name: 7})).notes)
    else:
        assert line in problem(vlm({name: 7}))


@pytest.mark.parametrize(
    ("name", "theirs"),
    [("num_layers", "depth"), ("hidden_size", "hidden_size"), ("num_attention_heads", "num_heads"),
     ("window_attn_size", "window_size")],
)  # fmt: skip
def test_every_size_of_the_tower_is_compared(name: str, theirs: str) -> None:
    Path("hf/config.json").write_text(json.dumps({"model_type": "qwen2_5_vl", "vision_config": {theirs: 6}}))
    assert f"{VISION}.{name}  7, hf/config.json says 6" in problem(vlm(tower={name: 7}))


@pytest.mark.parametrize("name", [name for name in WAN_SIZES if name != "hidden_size"])
def test_every_size_of_wan_is_compared(name: str) -> None:
    model = wan_folder()
    Path("wan/transformer/config.json").write_text(json.dumps({WAN_SIZES[name][0]: 6}))
    model["predictor"] = {"model_id": "wandit", name: 7}
    assert f"predictor.{name}  7, wan/transformer/config.json says 6" in problem(model)


def test_values_that_files_copy_are_noted() -> None:
    Path("hf/config.json").write_text(
        '{"model_type": "qwen2_5_vl", "text_config": {"num_hidden_layers": 8, "rms_norm_eps": 1e-5}}'
    )
    notes = run(vlm({"layernorm_epsilon": 1e-6})).notes
    assert "text_decoder.layernorm_epsilon  1e-06, hf/config.json says 1e-05; the folder's value counts." in notes[0]


def wan_folder() -> dict[str, Any]:
    Path("wan/transformer").mkdir(parents=True)
    sizes = {"num_layers": 2, "num_attention_heads": 3, "attention_head_dim": 4, "in_channels": 16}
    Path("wan/transformer/config.json").write_text(json.dumps(sizes))
    return {
        "predictor": {"model_id": "wandit", "num_layers": 2, "num_heads": 3, "hidden_size": 12, "in_dim": 16},
        "ae": {"from_pretrained": "./wan/vae/"},
        "text_encoder": [{"from_pretrained": "wan/text_encoder"}],
        "diffusion": {"model_id": "wan_flow_match_scheduler", "shift": 3},
    }


def test_a_generator() -> None:
    arguments = run(wan_folder(), "--load", "wan/transformer/", data=False).arguments
    assert (arguments.model.model_name_or_path, arguments.training.load) == ("wan", None)
    noise = arguments.training.diffusion
    assert (noise.timestep_density, noise.loss_weighting, noise.shift) == ("uniform", "bell", 3.0)


def test_the_norms_of_a_generator_see_whole_sequences() -> None:
    """They have other names than those of language models, which would match nothing."""
    found = run(wan_folder(), "--tensor-model-parallel-size", "2", "--sequence-parallel", data=False)
    assert found.arguments.parallel.tp_plan.sequence_parallel == ()
    assert any("--sequence-parallel has no effect on a generator" in note for note in found.notes)


def test_the_folder_around_files_of_components() -> None:
    model = {"predictor": {"model_id": "hunyuanvideo15dit"}, "ae": {"from_pretrained": "hv/vae/weights.safetensors"},
             "text_encoder": [{"from_pretrained": "hv/text_encoder/llm"}]}  # fmt: skip
    Path("f.yaml").write_text("sub_modules_to_wrap: ['predictor.double_blocks.{*}']\nignored_modules: [ae]\n")
    arguments = run(model, "--use-torch-fsdp2", "--fsdp2-config-path", "f.yaml", data=False).arguments
    assert arguments.model.model_name_or_path == "hv"
    plan = arguments.parallel.fsdp_plan
    assert (plan.apply_modules, plan.ignored_modules) == (("transformer_blocks.{*}",), ())


def test_sizes_and_bounds_of_a_generator() -> None:
    model = wan_folder()
    model["predictor"]["hidden_size"] = 13
    model["diffusion"]["max_timestep_boundary"] = 1.4
    text = problem(model)
    assert "predictor.hidden_size  13, wan/transformer/config.json says 12" in text
    assert "1.4 is not between 0 and 1" in text


@pytest.mark.parametrize(
    ("bounds", "levels", "frozen"),
    [
        ({"max_timestep_boundary": 0.417}, (0.8748, 1.0), ("transformer_2",)),
        ({"min_timestep_boundary": 0.417, "max_timestep_boundary": 1}, (0.0, 0.8748), ("transformer",)),
        ({"min_timestep_boundary": 0.358}, (0.0, 0.8997), ("transformer",)),
        ({"min_timestep_boundary": 0, "max_timestep_boundary": 1}, None, ()),
        ({"min_timestep_boundary": 0.2, "max_timestep_boundary": 0.4}, (0.8824, 0.9524), ()),
    ],
)
def test_one_expert_of_wan2_2_by_its_steps(
    bounds: dict[str, float], levels: tuple[float, float] | None, frozen: tuple[str, ...]
) -> None:
    """0.417 and 0.358 of the steps are 0.875 and 0.9 at shift 5, as the released folders have them."""
    model = wan_folder()
    shutil.copytree("wan/transformer", "wan/transformer_2")
    model["diffusion"] |= {**bounds, "shift": 5}
    arguments = run(model, data=False).arguments
    assert arguments.training.diffusion.sigma_range == levels
    assert arguments.model.freeze == frozen


def test_bounds_of_steps_without_a_shift() -> None:
    model = wan_folder()
    model["diffusion"] = {"model_id": "wan_flow_match_scheduler", "min_timestep_boundary": 0.4}
    assert "where a step lies depends on the shift" in problem(model)


def test_samples_of_a_generator() -> None:
    model = {**wan_folder(), "pipeline_config": {"input_size": [5, 16, 32]}, "prompt": "a cat", "fps": 8}
    model["diffusion"] |= {"num_inference_steps": 4, "guidance_scale": 2.5}
    found = run(model, data=False).arguments.inference.sampling
    assert (found.num_frames, found.height, found.width, found.fps) == (5, 16, 32, 8.0)
    assert (found.prompts, found.num_inference_steps, found.guidance_scale) == (("a cat",), 4, 2.5)


def step_video(**changes: Any) -> dict[str, Any]:
    sizes = {"num_attention_heads": 48, "attention_head_dim": 128, "num_layers": 48, "caption_channels": [6144, 1024]}
    Path("step/transformer").mkdir(parents=True, exist_ok=True)
    Path("step/transformer/config.json").write_text(json.dumps(sizes))
    predictor = {"model_id": "stepvideodit", "num_layers": 48, "num_heads": 48, "head_dim": 128}
    predictor |= {"channel_split": [64, 32, 32], "caption_channels": [6144, 1024], **changes}
    return {"predictor": predictor, "ae": {"from_pretrained": "step/vae/vae_v2.safetensors"}}


def test_step_video_by_its_files() -> None:
    """Sizes are the folder's, and how samples are drawn stands under the family's own names."""
    pipeline = {"input_size": [17, 32, 32], "guidance_scale": 4.0, "motion_score": MOTION_SCORE}
    steps = {"model_id": "flow_match_discrete_scheduler", "num_inference_timesteps": 30, "shift": 13.0}
    model = step_video() | {"pipeline_config": pipeline, "diffusion": steps}
    arguments = run(model, data=False).arguments
    found = arguments.inference.sampling
    assert arguments.model.model_name_or_path == "step" and arguments.training.diffusion.shift == 13.0
    assert (found.num_frames, found.num_inference_steps, found.guidance_scale) == (17, 30, 4.0)
    assert "predictor.num_layers  24, step/transformer/config.json says 48" in problem(step_video(num_layers=24))
    assert "heads of 128 are split [64, 32, 32]" in problem(step_video(channel_split=[32, 32, 64]))
    told = {"pipeline_config": {**pipeline, "motion_score": 2.0}}
    assert "samples of another score than 5 are not built" in problem(step_video() | told)


def media(kind: str) -> Arguments:
    write("data", {
        "dataset_param": {
            "dataset_type": kind,
            "basic_parameters": {"data_path": "clips.json", "data_folder": "clips"},
            "preprocess_parameters": {"num_frames": 5, "max_height": 16, "max_width": 32, "train_fps": 8},
        },
        "dataloader_param": {"sampler_type": "LengthGroupedSampler", "group_data": True},
    })  # fmt: skip
    return run(wan_folder()).arguments


def test_rows_of_generators() -> None:
    dataset: Any = media("t2v").data.dataset_param
    assert dataset.dataset_type == "generation"
    assert (dataset.basic_parameters.dataset, dataset.basic_parameters.dataset_dir) == ("clips.json", "clips")
    sizes = dataset.preprocess_parameters
    assert [sizes[name] for name in ("num_frames", "height", "width", "fps")] == [5, 16, 32, 8]


def test_rows_of_generators_by_our_names_and_what_is_left_out() -> None:
    sizes = {"height": 8, "width": 8, "train_pipeline": {}, "max_heigth": 9}
    basic = {"data_path": "rows.jsonl", "caption_column": "words", "val_rate": 0.5}
    dataset = {"dataset_type": "t2v", "basic_parameters": basic, "preprocess_parameters": sizes, "tokenizer_config": {}}
    write("data", {"dataset_param": dataset, "val_dataset_param": {}})
    model = wan_folder()
    translated = run(model)
    found: Any = translated.arguments.data.dataset_param
    assert (found.preprocess_parameters["height"], found.preprocess_parameters["width"]) == (8, 8)
    rows = found.basic_parameters
    assert (rows.dataset, rows["caption_column"], rows.val_rate) == ("rows.jsonl", "words", 0.5)
    assert (
        "data.json: preprocess_parameters.train_pipeline, preprocess_parameters.max_heigth, tokenizer_config, "
        "val_dataset_param have no effect: docs/generation.md says how media are prepared." in translated.notes
    )
    sizes["max_height"] = 16
    write("data", {"dataset_param": dataset})
    assert "16, but data.json:" in problem(model)


def test_rows_of_vace() -> None:
    basic = {"data_path": "data.txt", "data_storage_mode": "vace"}
    write("data", {"dataset_param": {"dataset_type": "vace", "basic_parameters": basic}})
    arguments = run({"ae": {"from_pretrained": "vace/vae"}}).arguments
    found = arguments.data.dataset_param.basic_parameters
    assert (found.dataset, found["data_storage_mode"], arguments.model.task) == ("data.txt", "combine", "vace")


def test_features_of_generators() -> None:
    dataset: Any = media("feature").data.dataset_param
    assert (dataset.basic_parameters.features_dir, dataset.basic_parameters.dataset) == ("clips", None)


def test_keys_of_mindspeed_mm_are_no_slips() -> None:
    model = vlm({"moe_ffn_hidden_size": 9, "recompute_mtp_layer": False, "gdn_implementation": "ascendc",
                 "causal_conv1d_implementation": "torch", "use_chunk_loss": True, "chunk_size": 512})  # fmt: skip
    arguments = run(model).arguments
    kernels = (arguments.model.gdn_implementation, arguments.model.causal_conv1d_implementation)
    assert kernels == ("ascendc", "eager")
    assert (arguments.features.enable_chunk_loss, arguments.features.chunkloss_plan.chunk_size) == (True, 512)


@pytest.mark.parametrize(
    ("switches", "frozen"),
    [
        ({"freeze_vision_model": True, "freeze_vision_projection": True}, WHOLE_TOWER),
        ({"freeze_vision_model": False, "freeze_vision_projection": True}, ("model.visual.merger",)),
        ({"freeze_vision_model": False, "freeze_language_model": True}, ("model.language_model",)),
    ],
)
def test_switches_that_freeze_parts(switches: dict[str, bool], frozen: tuple[str, ...]) -> None:
    model = {"text_decoder": {"model_id": "qwen3_5_moe"}, "image_encoder": {"vision_encoder": {}}, **switches}
    assert run(model).arguments.model.freeze == frozen


def test_heads_for_further_tokens() -> None:
    model = vlm({"mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.3})
    arguments = run(model).arguments.model
    assert (arguments.mtp_num_layers, arguments.mtp_loss_scaling_factor) == (1, 0.3)
    translated = run(model, "--tensor-model-parallel-size", "2")
    assert translated.arguments.model.mtp_num_layers == 0
    assert "mtp_num_layers 1 has no effect" in "".join(translated.notes)


def test_the_router_s_loss_of_the_decoder() -> None:
    for balancing, weight in (("aux_loss", 1e-3), ("none", 0.0), ("noaux_tc", 0.0)):
        decoder = {"moe_aux_loss_coeff": 1e-3, "moe_router_load_balancing_type": balancing}
        assert run(vlm(decoder)).arguments.features.loss_cfg.router_aux_loss_coef == weight


def test_slices_of_a_size_of_their_own() -> None:
    model = {"init_from_hf_path": "hf", "loss_cfg": {"compute_mode": "dynamic_chunk", "chunk_size": 2048}}
    features = run(model).arguments.features
    assert features.enable_dynamic_chunk_loss and features.chunkloss_plan.total_chunk_size == 2048


def test_switches_of_rows() -> None:
    basic = {"use_pmcc_data": False}
    dataset = {"attr": {"packing": True, "pretrain": False}, "basic_parameters": basic}
    write("data", {"dataset_param": dataset})
    words = ("--calculate-per-token-loss",)
    assert run(vlm(), *words).arguments.data.dataset_param.basic_parameters.packing
    dataset["attr"] = {"packing": False, "pretrain": True}
    write("data", {"dataset_param": dataset})
    found = run(vlm()).arguments.data.dataset_param.basic_parameters
    assert (found.packing, found.stage) == (False, "pretrain")
    basic["use_pmcc_data"] = True
    write("data", {"dataset_param": dataset})
    assert "turns that hold token ids in place of text are not read" in problem(vlm())


def test_sizes_of_media_that_hold_afterwards_are_told() -> None:
    preprocess = {"model_name_or_path": "hf", "image_max_pixels": 262144, "image_min_pixels": 0}
    write("data", {"dataset_param": {"preprocess_parameters": preprocess}})
    said = (
        "image_max_pixels 262144, image_min_pixels 0: these sizes also hold in inference, evaluation and the exported"
    )
    assert said in "".join(run(vlm()).notes)


def test_tools() -> None:
    write("tools", {"profile": {"enable": True, "ranks": [-1]}, "sorafeature": {"save_path": "f"}})
    translated = run(vlm(), "--mm-tool", "tools.json")
    assert translated.arguments.tools.profile.enable is True
    assert translated.tools_json["sorafeature"] == {"save_path": "f"}
    assert translated.model_json["model_id"] == "qwen2_5vl"
    assert translated.data_json["dataset_param"]["preprocess_parameters"] == {"model_name_or_path": "hf"}
