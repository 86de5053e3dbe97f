"""Runs of BAGEL by the commands: saved, resumed, exported, asked; its VAE by hand; released names; launches of the
documents."""

from __future__ import annotations

import contextlib
import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file

from mindspeed_mm import pretrain_omni
from mindspeed_mm.cli.mm_convert import run as convert
from mindspeed_mm.core.errors import ModelFolderError
from mindspeed_mm.fsdp.models.bagel.configuration_bagel import BagelConfig
from mindspeed_mm.fsdp.models.bagel.modeling_bagel import BagelForConditionalGeneration
from mindspeed_mm.fsdp.models.diffusion.picture_vae import PictureVAE
from mindspeed_mm.fsdp.params.cards import families
from tests.helpers.runs import differing, mm, newest, tensors, train
from tests.helpers.tiny_bagel import (
    KEEP_ALL,
    PATCH,
    run_of,
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A YAML with its model and rows."""
    return run_of(tmp_path_factory.mktemp("bagel"))


# --- runs -------------------------------------------------------------------------------------------------------------

ONE_SET = "training.lora.target_modules=[q_proj_moe_gen, o_proj_moe_gen, 'language_model.*mlp_moe_gen.down_proj']"
LORA = ["training.lora.enable=true", "training.lora.rank=2", "training.lr=0.05", ONE_SET]


def drawn(folder: Path, out: Path, *words: object) -> np.ndarray:
    said = mm("infer", folder, "--prompt", "Draw.", "--draw", out, "--size", "8x12", "--steps", 2, *words)
    assert said.code == 0, said.err
    return np.asarray(Image.open(out))


@pytest.mark.slow
def test_a_run_resumes_to_the_bit_and_is_exported_as_released(run: Path, tmp_path: Path) -> None:
    """The understanding half is frozen by the card's patterns; the exported folder has the released names and its VAE,
    draws like the run, and edits."""
    (card,) = (card for card in families() if card.name == "bagel")
    words = [f"model.freeze=[{', '.join(map(repr, [*card.freeze['understanding'], *card.freeze['tower']]))}]"]
    train(run, tmp_path / "whole", *words)
    train(run, tmp_path / "broken", *words, "training.train_iters=1")
    train(run, tmp_path / "broken", *words)
    assert differing(tensors(tmp_path / "whole"), tensors(tmp_path / "broken")) == []
    said = mm("export", tmp_path / "broken", tmp_path / "hf")
    assert said.code == 0, said.err
    before = load_file(run.parent / "model" / "ema.safetensors")
    after = load_file(tmp_path / "hf" / "model.safetensors")
    assert {name: each.shape for name, each in before.items()} == {name: each.shape for name, each in after.items()}
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    of_pictures = {"llm2vae", "vae2llm", "time_embedder", "connector"}
    assert changed and all("_moe_gen" in name or name.split(".")[0] in of_pictures for name in changed)
    assert any("_moe_gen" in name for name in changed) and {"llm2vae.weight", "vae2llm.bias"} <= changed
    assert (tmp_path / "hf" / "ae.safetensors").read_bytes() == (run.parent / "model" / "ae.safetensors").read_bytes()
    whole = drawn(tmp_path / "hf", tmp_path / "a.png")
    assert whole.shape == (8, 12, 3)
    assert np.array_equal(whole, drawn(tmp_path / "broken", tmp_path / "b.png", "--checkpoint", "newest"))
    assert not np.array_equal(whole, drawn(tmp_path / "broken", tmp_path / "e.png", "--checkpoint", 1))
    assert not np.array_equal(whole, drawn(run.parent / "model", tmp_path / "c.png"))
    picture = run.parent / "rows" / "1.png"
    edited = mm("infer", tmp_path / "broken", "--image", picture, "--prompt", "Turn.", "--draw", tmp_path / "d.png",
                "--steps", 2, "--json")  # fmt: skip
    assert edited.code == 0 and json.loads(edited.out)["width"] == 12, edited.err  # as large as what is edited
    said = mm("infer", tmp_path / "hf", "--image", picture, "--prompt", "Which?", "--max-new-tokens", 3, "--json")
    assert said.code == 0 and set(json.loads(said.out)) == {"text", "finished"}, said.err


def test_adapters_of_one_set_leave_the_other_alone(run: Path, tmp_path: Path) -> None:
    train(run, tmp_path / "run", *LORA)
    said = mm("export", tmp_path / "run", tmp_path / "merged", "--merge")
    assert said.code == 0, said.err
    before = load_file(run.parent / "model" / "ema.safetensors")
    after = load_file(tmp_path / "merged" / "model.safetensors")
    changed = {name.split("layers.")[-1][2:] for name in before if not torch.equal(before[name], after[name])}
    expected = {"self_attn.q_proj_moe_gen", "self_attn.o_proj_moe_gen", "mlp_moe_gen.down_proj"}
    assert changed == {f"{name}.weight" for name in expected}


GRPO = ["posttrain.method=grpo", "posttrain.grpo.num_generations=2", "posttrain.rewards=[{name: exact_match}]",
        "data.dataset_param.basic_parameters.stage=prompt"]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["parallel.tensor_parallel_size=2"], "not built for models that answer and draw"),
        (["parallel.pipeline_parallel_size=2", "training.gradient_accumulation_steps=2"], "cannot be cut into stages"),
        (["posttrain.method=dpo", "data.dataset_param.basic_parameters.stage=rm"], "for these rows"),
        (GRPO, "'grpo' is not in this version for a unified model"),
        (["features.loss_cfg.loss_type=raw"], "models that answer and draw"),
        (["training.diffusion.shift=resolution"], "a shift of generators"),
        (["training.diffusion.caption_dropout=0.1"], "text_cond_dropout_prob"),
        (["data.dataset_param.preprocess_parameters.vae_max_image_size=64"], "places for"),
        (["data.dataset_param.basic_parameters.train_on_prompt=true"], "for these rows"),
        (["data.dataset_param.basic_parameters.vit_cond_dropout_prob=1.5"], "is not a share"),
    ],
)
def test_what_it_cannot_do_is_refused(run: Path, words: list[str], says: str) -> None:
    said = mm("check", run, *words, "--nproc", 2)
    assert said.code != 0 and says in said.out + said.err and "Traceback" not in said.err, said.out + said.err


def test_weights_of_two_terms_are_for_such_models_alone(run: Path, tmp_path: Path) -> None:
    from tests.helpers.tiny_run import make_tiny_run

    said = mm("check", make_tiny_run(tmp_path), "features.loss_cfg.text_loss_weight=1")
    assert said.code != 0 and "models that answer and draw by denoising" in said.out + said.err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--prompt", "a", "--steps", 2], "nothing is drawn"),
        (["--prompt", "a", "--draw", "a.png", "--temperature", 1], "the answer is a picture"),
        (["--prompt", "a", "--draw", "a.png", "--size", "8x13"], "no size of its pictures"),
        (["--prompt", "a", "--audio", "a.wav"], "--audio  is for language models"),
        (["--data", "rows.jsonl"], "--data needs --out"),
        (["--prompt", "a", "--image", "none.png"], "no such file"),
        (["--prompt", "a", "--lora", "x"], "is not built for"),
        (["--prompt", "a", "--frames", 4], "this model is a model that answers and draws"),
    ],
)
def test_questions_that_make_no_sense_are_refused(run: Path, words: list[Any], says: str) -> None:
    said = mm("infer", run.parent / "model", *words)
    assert said.code != 0 and says in said.err and "Traceback" not in said.err, said.err


@pytest.mark.parametrize("words", [("chat",), ("evaluate", "--data", "ROWS", "--out", "OUT")])
def test_other_commands_name_the_one_that_asks(run: Path, tmp_path: Path, words: tuple[str, ...]) -> None:
    verb, *more = words
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}))
    named = {"ROWS": rows, "OUT": tmp_path / "out"}
    said = mm(verb, run.parent / "model", *(named.get(word, word) for word in more))
    assert said.code != 0 and "mm infer MODEL --prompt TEXT" in said.err and "Traceback" not in said.err, said.err


# --- the VAE ----------------------------------------------------------------------------------------------------------


def flux_block(state: dict[str, torch.Tensor], name: str, x: torch.Tensor) -> torch.Tensor:
    y = conv(state, f"{name}.conv1", F.silu(grouped(state, f"{name}.norm1", x)))
    return x + conv(state, f"{name}.conv2", F.silu(grouped(state, f"{name}.norm2", y)))


def conv(state: dict[str, torch.Tensor], name: str, x: torch.Tensor, padding: int = 1, stride: int = 1) -> torch.Tensor:
    return F.conv2d(x, state[f"{name}.weight"], state[f"{name}.bias"], stride, padding)


def grouped(state: dict[str, torch.Tensor], name: str, x: torch.Tensor) -> torch.Tensor:
    return F.group_norm(x, 32, state[f"{name}.weight"], state[f"{name}.bias"], 1e-6)


def flux_middle(state: dict[str, torch.Tensor], name: str, x: torch.Tensor) -> torch.Tensor:
    x = flux_block(state, f"{name}.mid.block_1", x)
    y = grouped(state, f"{name}.mid.attn_1.norm", x)
    q, k, v = (conv(state, f"{name}.mid.attn_1.{each}", y, 0)[0].flatten(1).T for each in "qkv")
    y = ((q @ k.T / math.sqrt(q.shape[1])).softmax(-1) @ v).T.view_as(x)
    return flux_block(state, f"{name}.mid.block_2", x + conv(state, f"{name}.mid.attn_1.proj_out", y, 0))


def test_the_vae_is_that_of_flux_by_hand(run: Path) -> None:
    """Latents are drawn from the posterior, and (z − 0.1159) · 0.3611; decoding inverts that."""
    folder = run.parent / "model"
    vae = PictureVAE(folder, 4, 2, torch.device("cpu"), torch.float64)
    state = {name: each.double() for name, each in load_file(folder / "ae.safetensors").items()}
    pixels = torch.randint(0, 256, (3, 8, 12), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    x = flux_block(state, "encoder.down.0.block.0", conv(state, "encoder.conv_in", pixels.double()[None] / 127.5 - 1))
    x = conv(state, "encoder.down.0.downsample.conv", F.pad(x, (0, 1, 0, 1)), 0, 2)
    x = flux_middle(state, "encoder", flux_block(state, "encoder.down.1.block.0", x))
    mean, log_variance = conv(state, "encoder.conv_out", F.silu(grouped(state, "encoder.norm_out", x))).chunk(2, dim=1)
    noise = torch.randn(mean.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    expected = (mean + (log_variance / 2).exp() * noise - 0.1159) * 0.3611
    torch.testing.assert_close(vae.encode(pixels, 9), expected[0], rtol=1e-9, atol=1e-9)
    x = flux_middle(state, "decoder", conv(state, "decoder.conv_in", expected / 0.3611 + 0.1159))
    for level in (1, 0):
        for number in range(2):
            x = flux_block(state, f"decoder.up.{level}.block.{number}", x)
        if level:
            x = conv(state, "decoder.up.1.upsample.conv", F.interpolate(x, scale_factor=2.0))
    shown = conv(state, "decoder.conv_out", F.silu(grouped(state, "decoder.norm_out", x)))[0] / 2 + 0.5
    difference = vae.decode(expected[0]).int() - (shown.clamp(0, 1) * 255).int()
    assert difference.abs().max() <= 1


def test_a_folder_without_its_vae_is_refused(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run.parent / "model", tmp_path / "model")
    (tmp_path / "model" / "ae.safetensors").unlink()
    said = mm("train", run, f"model.model_name_or_path={tmp_path / 'model'}")
    assert said.code != 0 and "has no VAE: neither ae.safetensors nor vae/config.json" in said.err, said.err
    with pytest.raises(ModelFolderError, match="makes latents of 4 channels and 2 pixels"):
        PictureVAE(run.parent / "model", 16, 8, torch.device("cpu"), torch.float32)


# --- released names, and MindSpeed-MM's -------------------------------------------------------------------------------


def test_names_and_shapes_are_the_released_ones() -> None:
    """What the record has, without what only a whole model would tell: 1,223 tensors."""
    record = json.loads((Path(__file__).parents[2] / "released" / "bagel-7b-mot.json").read_text(encoding="utf-8"))
    with torch.device("meta"):
        model = BagelForConditionalGeneration(BagelConfig.from_dict(record["config"]))
    found: dict[tuple[str, tuple[int, ...]], int] = {}
    for name, tensor in model.state_dict().items():
        key = (re.sub(r"layers\.\d+\.", "layers.N.", name), tuple(tensor.shape))
        found[key] = found.get(key, 0) + 1
    assert found == {(each["key"], tuple(each["shape"])): each["n"] for each in record["layout"]}
    assert sum(found.values()) == 1223
    assert 14.6e9 < sum(parameter.numel() for parameter in model.parameters()) < 14.7e9


_TOWER, _BLOCKS = "vit_model.vision_model", "image_encoder.encoder.blocks"
_LAYER = "layers.1.self_attn.k_norm_moe_gen.weight"
THEIRS = {
    "connector.fc1.bias": "image_encoder.projector.linear_fc1.bias",
    "language_model.lm_head.weight": "mllm.lm_head.weight",
    f"language_model.model.{_LAYER}": f"mllm.decoder.{_LAYER}",
    "time_embedder.mlp.2.bias": "mllm.time_embedder.time_embed.2.bias",
    f"{_TOWER}.encoder.layers.1.layer_norm2.bias": f"{_BLOCKS}.1.norm2.bias",
    f"{_TOWER}.encoder.layers.0.self_attn.out_proj.bias": f"{_BLOCKS}.0.attn.out_proj.bias",
    f"{_TOWER}.embeddings.patch_embedding.bias": "image_encoder.encoder.patch_embed.patch_embedding.bias",
    "vit_pos_embed.pos_embed": "mllm.vit_pos_embed.pos_embed",
    "latent_pos_embed.pos_embed": "latent_pos_embed.pos_embed",
}
"""Released name → MindSpeed-MM's, as its BagelConverter has them."""


def test_the_converter_writes_mindspeed_mms_names_and_back(run: Path, tmp_path: Path) -> None:
    folder = run.parent / "model"
    convert(["BagelConverter", "hf_to_mm", f"--cfg.source_path={folder}", f"--cfg.target_path={tmp_path / 'mm'}"])
    stored = torch.load(tmp_path / "mm/release/mp_rank_00/model_optim_rng.pt", weights_only=False)["model"]
    before = load_file(folder / "ema.safetensors")
    assert len(stored) == len(before)
    for released, own in THEIRS.items():
        assert torch.equal(stored[own], before[released]), own
    convert(["BagelConverter", "mm_to_hf", f"--cfg.source_path={tmp_path / 'mm'}",
             f"--cfg.target_path={tmp_path / 'hf'}", f"--cfg.hf_dir={folder}"])  # fmt: skip
    after = load_file(tmp_path / "hf" / "model.safetensors")
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


# --- the documents' launch --------------------------------------------------------------------------------------------


def test_a_launch_of_the_documents_trains(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """model.json, data.json and fsdp2_config.yaml with the keys of MindSpeed-MM's example, and its flags."""
    root = run.parent
    sizes = {"max_image_size": 16, "min_image_size": 4}
    sets = {
        "available_data": ["vlm_sft"],
        "vlm_sft": {
            "dataset_names": ["all"],
            "all": {"data_dir": str(root / "rows"), "jsonl_path": str(root / "rows" / "rows.jsonl")},
            "image_transform_args": {"image_stride": PATCH, **sizes, "max_pixels": 2007040},
            "is_mandatory": True, "num_used_data": [4], "weight": 1,
        },
        "t2i_pretrain": {"image_transform_args": {"image_stride": 4, **sizes}},
        "model_path": str(root / "model"), **KEEP_ALL, "use_flex": False,
    }  # fmt: skip
    packed = {"expected_num_tokens": 100, "max_num_tokens_per_sample": 100, "max_num_tokens": 120}
    rows = {"dataset_type": "bagel", "preprocess_parameters": {}, "basic_parameters": sets, "packed_parameters": packed}
    loader = {"dataloader_mode": "base", "drop_last": True, "batch_size": 1, "collate_param": {"model_name": "bagel"}}
    model = {
        "model_id": "bagel",
        "mllm": {"model_id": "qwen2MoT", "freeze_und": True, "layer_module": "Qwen2MoTDecoderLayer"},
        "image_encoder": {"vision_encoder": {"model_id": "SigLip", "freeze": True}, "vision_projector": {}},
        "ae": {"model_id": "flux_vae", "from_pretrained": str(root / "model/ae.safetensors"), "freeze": True,
               "timestep_shift": 1.0},
        "visual_und": True,
        "visual_gen": True,
    }  # fmt: skip
    layer = "mindspeed_mm.models.omni.mllms.bagel_qwen2_mot.Qwen2MoTDecoderLayer"
    fsdp2 = {"sharding_size": 1, "sub_modules_to_wrap": [layer], "param_dtype": "fp32", "reduce_dtype": "fp32",
             "recompute_modules": [layer]}  # fmt: skip
    (tmp_path / "data.json").write_text(json.dumps({"dataset_param": rows, "dataloader_param": loader}))
    (tmp_path / "model.json").write_text(json.dumps(model))
    (tmp_path / "fsdp2.yaml").write_text(json.dumps(fsdp2))
    files = {name: str(tmp_path / name) for name in ("data.json", "model.json", "fsdp2.yaml", "saved")}
    flags = f"""--mm-data {files["data.json"]} --mm-model {files["model.json"]} --use-torch-fsdp2
        --fsdp2-config-path {files["fsdp2.yaml"]} --micro-batch-size 1 --global-batch-size 1 --seq-length 64 --lr 1e-3
        --train-iters 2 --tokenizer-type NullTokenizer --vocab-size 1 --untie-embeddings-and-output-weights
        --num-workers 0 --ckpt-format torch_dist --save {files["saved"]} --save-interval 2"""
    said = mm("config", "--from-flags", *flags.split())
    assert said.code == 0 and "text_loss_weight: 1.0" in said.out and "_moe_gen" not in said.out, said.out + said.err
    monkeypatch.setattr("sys.argv", ["pretrain_omni.py", *flags.split()])
    with contextlib.suppress(SystemExit):
        pretrain_omni.main()
    assert newest(tmp_path / "saved") == 2
