"""Text and picture encoders of a generator in 4 and 8 bits: in extraction, on raw media and in sampling, with the
numbers that the bits stand for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mindspeed_mm.fsdp.data.feature_store import open_features
from mindspeed_mm.fsdp.models.behaviour.quantized_linear import packings_of, rounded
from mindspeed_mm.fsdp.models.diffusion.components import load_encoders
from mindspeed_mm.fsdp.models.diffusion.find import find_adapter
from tests.helpers.runs import losses, mm, train
from tests.helpers.tiny_generator_run import make_tiny_generator_run

CPU = torch.device("cpu")
FEATURES = "data.dataset_param.basic_parameters.features_dir="
FAMILIES = ("flux", pytest.param("t2v", marks=pytest.mark.slow), pytest.param("i2v", marks=pytest.mark.slow))
"""CLIP and T5; UMT5; and CLIP's eyes beside it."""


def encoders_of(folder: Path, kind: str | None) -> tuple[Any, Any]:
    adapter = find_adapter(folder)
    adapter.quantize_encoders = kind
    return adapter, load_encoders(adapter, CPU)


def encoder_parts(pipeline: Any) -> dict[str, nn.Module]:
    named = ((name, part) for name, part in pipeline.components.items() if isinstance(part, nn.Module))
    return {name: part for name, part in named if name.startswith(("text_encoder", "image_encoder"))}


@pytest.mark.parametrize("kind", ["nf4", "int8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_features_are_those_of_the_numbers_that_bits_stand_for(family: str, kind: str, tmp_path: Path) -> None:
    folder = make_tiny_generator_run(tmp_path, family).parent / "model"
    adapter, packed = encoders_of(folder, kind)
    _, plain = encoders_of(folder, None)
    before = adapter.encode_text(plain, ["a red box"])[0]
    for name, part in encoder_parts(plain).items():
        packings = packings_of(packed.components[name])
        fitting = {f"{key}.weight": each for key, each in part.named_modules() if type(each) is nn.Linear}
        if kind == "nf4":  # the tiny CLIP's features make no whole blocks everywhere
            fitting = {key: each for key, each in fitting.items() if each.in_features % 8 == 0}
        assert packings.keys() == fitting.keys() and packings
        kept = dict(packed.components[name].named_parameters())
        for key, packing in packings.items():
            assert kept[key].dtype == torch.int8 and kept[key].nbytes < 0.55 * fitting[key].weight.nbytes
            fitting[key].weight.data = rounded(fitting[key].weight.data, packing)
    expected, found = (adapter.encode_text(pipeline, ["a red box"])[0] for pipeline in (plain, packed))
    for key, value in found.items():
        torch.testing.assert_close(value, expected[key], rtol=1e-5, atol=1e-6)
    assert any(not torch.allclose(found[key], before[key], rtol=1e-4) for key in found)


def test_raw_media_and_features_are_the_same_run_and_sets_are_not_mixed(tmp_path: Path) -> None:
    yaml, quantised = make_tiny_generator_run(tmp_path, "flux"), "model.quantize_encoders=nf4"
    steps = "training.train_iters=2"
    for words, name in (((quantised,), "nf4"), ((), "plain")):
        said = mm("extract", yaml, *words, "--out", tmp_path / name)
        assert said.code == 0, said.err
    assert "encode text and picture encoders in nf4" in train(yaml, tmp_path / "raw", quantised, steps)
    train(yaml, tmp_path / "stored", quantised, steps, FEATURES + str(tmp_path / "nf4"))
    assert "encode" not in train(yaml, tmp_path / "exact", steps)
    assert "which stay loaded in nf4 beside the model" in mm("check", yaml, quantised).out
    assert losses(tmp_path / "raw") == pytest.approx(losses(tmp_path / "stored"), rel=1e-5)
    assert losses(tmp_path / "raw") != pytest.approx(losses(tmp_path / "exact"), rel=1e-5)

    said = mm("extract", yaml, "--out", tmp_path / "nf4")
    assert said.code == 4
    assert "dtype  as stored, encoders in nf4 then, not set now" in said.err
    adapter = find_adapter(tmp_path / "model")
    first, second = (open_features(tmp_path / name, adapter).read(0, 0) for name in ("nf4", "plain"))
    assert torch.equal(first["latents"], second["latents"])
    assert not torch.equal(first["prompt_embeds"], second["prompt_embeds"])
    said = mm(
        "infer", tmp_path / "raw", "--prompt", "a red box", "--size", "16x16", "--steps", 1, "--out", tmp_path / "out"
    )
    assert said.code == 0, said.err
