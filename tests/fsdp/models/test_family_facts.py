"""A family that is a table does what a family that writes every method out does; and what its fields mean."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from mindspeed_mm.fsdp.models.diffusion.adapter import DiffusionAdapter
from mindspeed_mm.fsdp.models.diffusion.components import load_encoders
from mindspeed_mm.fsdp.models.diffusion.find import find_adapter
from mindspeed_mm.fsdp.models.diffusion.latents import (
    BY_BUFFERS,
    BY_SETTINGS,
    LTX2_VAE,
    LatentScale,
    LatentSizes,
    by_blocks,
    by_settings,
    pack,
    unpack,
)
from mindspeed_mm.fsdp.models.diffusion.text_rows import EMBEDS, MASK, MASKED, POOLED, UNGUIDED, CaptionRows
from mindspeed_mm.fsdp.models.sd3.modeling_sd3 import StableDiffusion3Adapter
from mindspeed_mm.fsdp.params.diffusion_args import SamplingArguments
from mindspeed_mm.fsdp.utils.register import model_register
from tests.helpers.tiny_sd3 import T5_TOKENS, make_tiny_sd3


class TableSD3(StableDiffusion3Adapter):
    """The built-in family with the plugin's length of captions."""

    most_text_tokens = T5_TOKENS


@pytest.fixture
def outside_sd3(monkeypatch: pytest.MonkeyPatch) -> type[DiffusionAdapter]:
    """A plugin's family, which to import would register for the whole process."""
    monkeypatch.setattr(model_register, "_entries", dict(model_register.loaded()))
    monkeypatch.delitem(sys.modules, "tests.helpers.sd3_plugin", raising=False)
    found: type[DiffusionAdapter] = importlib.import_module("tests.helpers.sd3_plugin").OutsideSD3
    monkeypatch.delitem(sys.modules, "tests.helpers.sd3_plugin")
    return found


@torch.no_grad()
def test_a_table_says_what_every_method_written_out_says(tmp_path: Path, outside_sd3: type[DiffusionAdapter]) -> None:
    folder = make_tiny_sd3(tmp_path / "model")
    table, written = TableSD3(folder), outside_sd3(folder)
    encoders = load_encoders(table, torch.device("cpu"))
    pixels = torch.randint(0, 256, (2, 3, 1, 16, 24), dtype=torch.uint8)
    latents = table.encode_media(encoders, pixels)
    torch.testing.assert_close(latents, written.encode_media(encoders, pixels), rtol=0, atol=1e-6)
    texts = [each.pad_text(each.encode_text(encoders, ["a boat", ""])) for each in (table, written)]
    sampling = SamplingArguments(guidance_scale=4.0, negative_prompt="grey")
    sigma = torch.tensor([0.25, 0.75])
    pairs = [
        texts,
        [each.inputs(latents, sigma, text, 1.0) for each, text in zip((table, written), texts, strict=True)],
    ]
    for ours, theirs in pairs:
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    ours, theirs = (each.pipeline_arguments(sampling, ["a", "b"], latents) for each in (table, written))
    assert all(torch.equal(ours[k], v) if isinstance(v, torch.Tensor) else ours[k] == v for k, v in theirs.items())
    assert replace(table.geometry, heights=(0, None), widths=(0, None)) == written.geometry
    assert {need.setting: need.value for need in table.requirements()} == {
        "in_channels": 4, "joint_attention_dim": None, "pooled_projection_dim": 32,
    }  # fmt: skip


SIZES: dict[str, tuple[LatentSizes, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "nothing is known": (
        LatentSizes(16), {}, {},
        {"spatial_ratio": 8, "temporal_ratio": 1, "patch": (1, 2, 2), "latent_channels": 16, "spatial_step": 0},
    ),
    "blocks, a step and a table of rows and columns": (
        LatentSizes(16, step=24, positions=("axes_lens", (300, 512, 512))),
        {"block_out_channels": [1, 2]}, {"axes_lens": [9, 5, 7], "patch_size": 4, "in_channels": 3},
        {
            "spatial_ratio": 2, "patch": (1, 4, 4), "latent_channels": 3, "spatial_step": 24, "heights": (0, 40),
            "widths": (0, 56), "most_frames": None,
        },
    ),
    "ratios of a video's VAE, one number of positions": (
        LatentSizes(16, ("vae.z_dim",), by_settings(8, 4), is_video=True, positions=("rope_max_seq_len", 1024)),
        {"scale_factor_spatial": 16, "z_dim": 48}, {"patch_size": [2, 1, 3], "rope_max_seq_len": 10},
        {
            "spatial_ratio": 16, "temporal_ratio": 4, "patch": (2, 1, 3), "latent_channels": 48,
            "heights": (0, 160), "widths": (0, 480), "most_frames": 77,
        },
    ),
    "channels of whole tokens, whatever patch_size says": (
        LatentSizes(64, ("transformer.out_channels", "transformer.in_channels"), packs=True),
        {}, {"patch_size": 1, "in_channels": 96, "out_channels": None}, {"patch": (1, 2, 2), "latent_channels": 24},
    ),
    "positions folded before they are latents": (
        LatentSizes(128, patch=1, packs=True, folded=2), {}, {}, {"spatial_ratio": 16, "latent_channels": 128},
    ),
    "a VAE that mirrors a position at its border": (
        LatentSizes(128, ratios=by_blocks(blocks=6, frames=8), patch=1, vae_class=LTX2_VAE), {}, {},
        {"spatial_ratio": 32, "temporal_ratio": 8, "heights": (64, None), "widths": (64, None)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SIZES)
def test_sizes_follow_from_the_configurations(case: str) -> None:
    sizes, vae, transformer, expected = SIZES[case]
    geometry = sizes.geometry(vae, transformer)
    assert {name: getattr(geometry, name) for name in expected} == expected


def test_captions_are_split_and_joined() -> None:
    embeds, mask = torch.arange(24.0).view(2, 4, 3), torch.tensor([[1, 1, 0, 0], [0, 1, 1, 1]])
    pooled = torch.ones(2, 5)
    kept = CaptionRows((EMBEDS, "", POOLED)).split([embeds, None, pooled, None])
    assert [{key: tuple(value.shape) for key, value in each.items()} for each in kept] == [
        {EMBEDS: (4, 3), POOLED: (5,)}
    ] * 2
    rows = CaptionRows((EMBEDS, MASK), MASKED)
    own = rows.split([embeds, mask])
    assert [each[EMBEDS].tolist() for each in own] == [embeds[0, :2].tolist(), embeds[1, 1:].tolist()]
    assert [len(each[EMBEDS]) for each in rows.split([embeds, None])] == [4, 4]
    batch = rows.joined(own)
    assert batch[EMBEDS].shape == (2, 8, 3) and batch[MASK].sum(dim=1).tolist() == [2, 3]
    assert torch.equal(CaptionRows().joined(kept)[POOLED], pooled)
    assert UNGUIDED == {"do_classifier_free_guidance": False}


SCALES = {
    "one factor": (LatentScale(), {"scaling_factor": 0.5, "shift_factor": 1.0}, {}),
    "settings": (BY_SETTINGS, {"latents_mean": [1.0, 2.0], "latents_std": [2.0, 4.0]}, {}),
    "buffers": (
        BY_BUFFERS, {"scaling_factor": 2.0},
        {"latents_mean": torch.tensor([1.0, 2.0]), "latents_std": torch.tensor([4.0, 8.0])},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SCALES)
def test_scaling_is_undone(name: str) -> None:
    scale, config, buffers = SCALES[name]
    vae: Any = SimpleNamespace(config=_Config(config), **buffers)
    latents = torch.tensor([[[[3.0]], [[6.0]]]])
    expected = {"one factor": [1.0, 2.5]}.get(name, [1.0, 1.0])
    assert scale.apply(vae, latents).flatten().tolist() == expected
    assert torch.equal(scale.undo(vae, scale.apply(vae, latents)), latents)


class _Config(dict[str, Any]):
    """As diffusers has it: a dict whose entries are attributes, too."""

    __getattr__ = dict.__getitem__


@pytest.mark.parametrize(("shape", "patch"), [((2, 3, 4, 6), (1, 2, 2)), ((2, 3, 4, 6, 8), (2, 3, 4))])
def test_packing_is_undone_for_pictures_and_clips(shape: tuple[int, ...], patch: tuple[int, int, int]) -> None:
    latents = torch.randn(shape)
    tokens = pack(latents, patch)
    assert torch.equal(unpack(tokens, shape, patch), latents)
    first = latents[0].reshape(3, -1, *shape[-2:])[:, : patch[0], : patch[1], : patch[2]]
    assert torch.equal(tokens[0, 0], first.flatten())


class _Clips(DiffusionAdapter):
    """A first frame is given in `i2v`; two tokens a frame."""

    pipelines = {"t2v": "Some", "i2v": "Other"}
    more_tasks = {"Some": ("i2v",)}
    sizes = LatentSizes(4, patch=2, is_video=True)
    starts_with_frame = frozenset({"i2v"})
    zeros = ("empty",)


@pytest.mark.parametrize("task", ["t2v", "i2v"])
def test_a_frame_that_is_given_has_time_zero(task: str, tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text('{"_class_name": "Some"}')
    adapter = _Clips(tmp_path, task=task)
    given = adapter.given_latents({"latents": torch.zeros(1, 4, 3, 2, 4)})
    times = adapter.token_times(torch.tensor([5.0]), (1, 4, 3, 2, 4)).tolist()
    if task == "t2v":
        assert given is None and times == [[5.0] * 6]
    else:
        assert given is not None and given.flatten().tolist() == [True, False, False]
        assert times == [[0.0, 0.0, 5.0, 5.0, 5.0, 5.0]]


def test_tables_and_zeros_are_set_from_scratch() -> None:
    module = nn.Module()
    for name in ("scale_shift_table", "audio_scale_shift_table", "empty", "other"):
        module.register_parameter(name, nn.Parameter(torch.full((6, 400), torch.nan), requires_grad=False))
    module.register_parameter("absent", None)
    _Clips(Path()).init_weights(module)
    assert module.empty.eq(0).all() and module.other.isnan().all()
    assert module.scale_shift_table.std().item() == pytest.approx(400**-0.5, rel=0.1)
    assert module.audio_scale_shift_table.std().item() == pytest.approx(400**-0.5, rel=0.1)


def test_a_plugin_without_tables_keeps_its_own_methods(tmp_path: Path, outside_sd3: type[DiffusionAdapter]) -> None:
    adapter = find_adapter(make_tiny_sd3(tmp_path / "model"), "outside_sd3")
    assert type(adapter) is outside_sd3 and adapter.requirements() == []
