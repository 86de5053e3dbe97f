"""Components that scripts of MindSpeed-MM build of model.json's sections compute what diffusers and transformers do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mindspeed_mm.checkpoint.common.config import ConvertGeneratorConfig
from mindspeed_mm.checkpoint.original.converters import WanConverter
from mindspeed_mm.core.errors import ConfigError, ModelFolderError
from mindspeed_mm.fsdp.train.provider.json_section import JsonSection
from mindspeed_mm.fsdp.utils.torchvision_guard import prepare_for_transformers
from mindspeed_mm.models.ae import AEModel
from mindspeed_mm.models.ae.base import AEModel as OfBase
from mindspeed_mm.models.diffusion import DiffusionModel
from mindspeed_mm.models.predictor import PredictModel
from mindspeed_mm.models.text_encoder import TextEncoder, Tokenizer
from tests.helpers.tiny_generators import make_tiny_wan

prepare_for_transformers()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wan in diffusers' layout."""
    return make_tiny_wan(tmp_path_factory.mktemp("wan"))


# --- the autoencoder --------------------------------------------------------------------------------------------------


def ae(folder: Path, **changes: Any) -> AEModel:
    section = {"model_id": "wan_video_vae", "from_pretrained": str(folder / "vae"), "dtype": "fp32"}
    section |= {"norm_mode": "channel_specified_shift_scale", "do_sample": False}
    return AEModel(JsonSection(section | changes))


def test_latents_are_those_of_diffusers(folder: Path) -> None:
    from diffusers import AutoencoderKLWan

    vae = AutoencoderKLWan.from_pretrained(folder / "vae")
    clip = torch.rand(1, 3, 5, 16, 16) * 2 - 1
    with torch.no_grad():
        mode = vae.encode(clip).latent_dist.mode()
        mean, std = (
            torch.tensor(values)[:, None, None, None] for values in (vae.config.latents_mean, vae.config.latents_std)
        )
        latents, conditions = ae(folder).encode(clip)
        torch.testing.assert_close(latents, (mode - mean) / std)
        assert conditions is None
        plain = ae(folder, norm_latents=False)
        assert torch.equal(plain.encode(clip)[0], mode)
        assert torch.equal(plain.decode(mode), vae.decode(mode).sample)
        torch.manual_seed(3)
        drawn = ae(folder, norm_latents=False, do_sample=True).encode(clip)[0]
        torch.manual_seed(3)
        assert torch.equal(drawn, vae.encode(clip).latent_dist.sample())
        (first, second), conditions = plain.encode([clip, clip])
        assert torch.equal(first, mode) and torch.equal(second, mode) and conditions == {}
    assert OfBase is AEModel and plain.get_model().model_name == "AutoencoderKLWan"
    with pytest.raises(NotImplementedError, match="encode or decode"):
        plain(clip)


def test_one_scale_of_all_channels(tmp_path: Path) -> None:
    from diffusers import AutoencoderKL

    vae = AutoencoderKL(
        norm_num_groups=4, block_out_channels=(8,), latent_channels=4, scaling_factor=0.5, shift_factor=0.25
    )
    vae.save_pretrained(tmp_path)
    made = AEModel({"model_id": "AutoencoderKL", "from_pretrained": str(tmp_path), "do_sample": False})
    pictures = torch.rand(2, 3, 8, 8)
    with torch.no_grad():
        expected = (vae.encode(pictures).latent_dist.mode() - 0.25) * 0.5
        torch.testing.assert_close(made.encode(pictures)[0], expected)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_id": "wfvae"}, "'wfvae' is not built as a part"),
        ({"model_id": None}, "is not given"),
        ({"norm_mode": "none"}, "'none' is not known"),
        ({"dtype": "int3"}, "'int3' is not a type of weights"),
        ({"i2v_processor": {"processor_id": "wan_i2v_processor"}}, "image to video"),
        ({"enable_tiling": True, "tiling_param": {"tile_size": [34, 34]}}, "tiles of this form are not built"),
    ],
)
def test_autoencoders_that_are_not_built(folder: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ae(folder, **changes)


def test_keys_without_effect_are_reported(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ae(folder, vae_cp_size=1)
    assert "note: ae of model.json: vae_cp_size: no effect here" in capsys.readouterr().err


# --- text encoders ----------------------------------------------------------------------------------------------------


def text_section(folder: Path, **changes: Any) -> dict[str, Any]:
    return {
        "model_id": "UMT5",
        "hub_backend": "hf",
        "from_pretrained": str(folder / "text_encoder"),
        "dtype": "fp32",
    } | changes


def test_features_are_those_of_transformers(folder: Path) -> None:
    from transformers import UMT5EncoderModel

    model = UMT5EncoderModel.from_pretrained(folder / "text_encoder").eval()
    tokenizer = Tokenizer(
        {"autotokenizer_name": "AutoTokenizer", "hub_backend": "hf", "from_pretrained": str(folder / "tokenizer")}
    )
    told = tokenizer.get_tokenizer()(
        ["a red box", "a cat"], padding="max_length", max_length=8, truncation=True, return_tensors="pt"
    )
    ids, mask = told["input_ids"], told["attention_mask"]
    encoder = TextEncoder(JsonSection(text_section(folder))).eval()
    with torch.no_grad():
        expected = model(input_ids=ids, attention_mask=mask, output_hidden_states=True)
        features, kept = encoder.encode(ids[:, None], mask[:, None])
        assert torch.equal(features[:, 0], expected.last_hidden_state) and torch.equal(kept[:, 0], mask)
        unmasked = TextEncoder(text_section(folder, use_attention_mask=False)).eval()
        assert torch.equal(unmasked.encode(ids, mask)[0], model(input_ids=ids).last_hidden_state)
        skipping = text_section(folder, output_key="hidden_states", hidden_state_skip_layer=1)
        both = TextEncoder([text_section(folder), skipping]).eval()
        (first, second), masks = both.encode([ids, ids], [mask, mask])
        assert torch.equal(first, expected.last_hidden_state) and torch.equal(second, expected.hidden_states[-2])
        assert len(masks) == 2
        steps, _ = both.encode([[ids, ids], [ids[:1], ids[:1]]], [[mask, mask], [mask[:1], mask[:1]]], offload_cpu=True)
        assert torch.equal(steps[0][1], second) and steps[1][0].shape[0] == 1
        dropped = TextEncoder(text_section(folder, ucg_rate=1.0)).eval()
        assert not dropped.encode(ids, mask)[0].any()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_id": "Hunyuan15MLLmModel"}, "'Hunyuan15MLLmModel' is not built as a part"),
        ({"output_key": "logits"}, "'logits' is not known"),
        ({"hidden_state_skip_layer": 2}, "go together"),
    ],
)
def test_text_encoders_that_are_not_built(folder: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        TextEncoder(text_section(folder, **changes))


def test_inputs_of_an_encoder_that_are_not_given(folder: Path) -> None:
    encoder = TextEncoder(text_section(folder, using_kwargs=["images"]))
    with pytest.raises(ValueError, match=r"images: text_encoder\.using_kwargs names it"):
        encoder.encode(torch.ones(1, 2, dtype=torch.long), torch.ones(1, 2))


@pytest.mark.parametrize(
    ("name", "error", "said"),
    [
        ("hunyuanMLLmTokenizer", ConfigError, "not built as a part"),
        ("AutoTokenizer", ModelFolderError, "does not exist"),
    ],
)
def test_tokenizers_that_cannot_be_had(tmp_path: Path, name: str, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        Tokenizer({"autotokenizer_name": name, "from_pretrained": str(tmp_path / "none")})


# --- the transformer --------------------------------------------------------------------------------------------------


def sizes(folder: Path, **changes: Any) -> dict[str, Any]:
    from diffusers import WanTransformer3DModel

    config = WanTransformer3DModel.load_config(folder / "transformer")
    section = {
        "model_id": "wandit",
        "num_layers": config["num_layers"],
        "num_heads": config["num_attention_heads"],
        "hidden_size": config["num_attention_heads"] * config["attention_head_dim"],
        "ffn_dim": config["ffn_dim"],
        "in_dim": config["in_channels"],
        "out_dim": config["out_channels"],
        "text_dim": config["text_dim"],
        "freq_dim": config["freq_dim"],
        "max_seq_len": config["rope_max_seq_len"],
        "patch_size": list(config["patch_size"]),
        "cross_attn_norm": config["cross_attn_norm"],
    }
    return section | changes


def noisy(config: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(2, config.in_channels, 3, 4, 4), torch.tensor([500.0, 20.0]), torch.randn(2, 5, config.text_dim)


@pytest.mark.parametrize("layout", ["mm", "diffusers"])
def test_the_velocity_is_that_of_diffusers(folder: Path, tmp_path: Path, layout: str) -> None:
    """The weights in MindSpeed-MM's files, or in diffusers' folder; tokens behind the mask count as nothing."""
    from diffusers import WanTransformer3DModel

    source = folder / "transformer"
    if layout == "mm":
        WanConverter().hf_to_mm(ConvertGeneratorConfig(source_path=source, target_path=tmp_path / "mm"))
        source = tmp_path / "mm"
    model = WanTransformer3DModel.from_pretrained(folder / "transformer").eval()
    predictor = PredictModel(JsonSection(sizes(folder, from_pretrained=str(source), dtype="fp32"))).get_model().eval()
    x, time, text = noisy(model.config)
    given = text.clone()
    with torch.no_grad():
        found = predictor(x, time, text[:, None], torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]))
        text[0, 3:] = 0
        assert torch.equal(found, model(x, time, text, return_dict=False)[0])
        assert torch.equal(predictor(x, time[:1], given), model(x, time[:1].expand(2), given, return_dict=False)[0])
        first = predictor.separated_timestep = True
        by_token = torch.cat([torch.zeros(2, 4), time[:, None].expand(2, 8)], dim=1)
        assert first and torch.equal(predictor(x, time, given), model(x, by_token, given, return_dict=False)[0])


def test_a_transformer_of_sizes_alone_is_new(folder: Path) -> None:
    predictor = PredictModel(sizes(folder, dtype="bf16")).get_model()
    assert predictor.dtype == torch.bfloat16
    x, time, text = noisy(predictor.transformer.config)
    assert predictor(x, time, text).shape == x.shape


def test_the_condition_of_an_image_is_joined(tmp_path: Path) -> None:
    folder = make_tiny_wan(tmp_path, task="i2v")
    from diffusers import WanTransformer3DModel

    model = WanTransformer3DModel.from_pretrained(folder / "transformer").eval()
    config = model.config
    section = sizes(folder, model_type="i2v", from_pretrained=str(folder / "transformer"))
    section["img_dim"] = config.image_dim
    predictor = PredictModel(section).get_model().eval()
    x, time, text = (
        torch.randn(1, config.out_channels, 3, 4, 4),
        torch.tensor([500.0]),
        torch.randn(1, 5, config.text_dim),
    )
    frames = torch.randn(1, config.in_channels - config.out_channels, 3, 4, 4)
    image = torch.randn(1, 257, config.image_dim)
    with torch.no_grad():
        found = predictor(x, time, text, i2v_clip_feature=image, i2v_vae_feature=frames)
        both = torch.cat([x, frames], dim=1)
        expected = model(both, time, text, encoder_hidden_states_image=image, return_dict=False)[0]
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)  # fp32, in another order
        with pytest.raises(ValueError, match="i2v_clip_feature is not given"):
            predictor(x, time, text)


def test_parts_that_are_not_built_name_what_is(folder: Path) -> None:
    with pytest.raises(ConfigError, match="'vace' is not built as a part") as caught:
        PredictModel({"model_id": "vace"})
    assert "SoRAModel" in caught.value.problems[0].way_out
    with pytest.raises(ConfigError, match="belong to the model's family") as caught:
        DiffusionModel({"model_id": "wan_flow_match_scheduler"})
    assert "training.diffusion" in caught.value.problems[0].way_out
    with pytest.raises(ConfigError, match="the weights have other sizes") as caught:
        PredictModel(sizes(folder, num_layers=7, from_pretrained=str(folder / "transformer")))
    assert caught.value.problems[0].key == "predictor.num_layers"


@pytest.mark.parametrize("kind", [AEModel, TextEncoder, PredictModel])
def test_what_is_no_section_is_told(kind: type[Any]) -> None:
    for given in (None, 3, "vae"):
        with pytest.raises(ConfigError, match=r"is not a section of model\.json"):
            kind(given)


def test_a_folder_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(ModelFolderError, match=r"ae\.from_pretrained.*does not exist"):
        ae(tmp_path / "nowhere")
