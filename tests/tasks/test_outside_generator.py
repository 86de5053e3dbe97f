"""A family that a plugin brings, in a folder that lacks an optional encoder: features, training, export, sampling."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from ruamel.yaml import YAML

from mindspeed_mm.fsdp.data.feature_store import open_features
from mindspeed_mm.fsdp.models.diffusion import find
from mindspeed_mm.fsdp.models.diffusion.find import find_adapter
from mindspeed_mm.fsdp.models.diffusion.live_encoding import CaptionLengths
from mindspeed_mm.fsdp.params.cards import transformer_ids
from mindspeed_mm.fsdp.utils.register import import_plugin, model_register
from tests.helpers.runs import lines, losses, mm, train
from tests.helpers.tiny_generator_run import make_tiny_generator_run
from tests.helpers.tiny_sd3 import T5_TOKENS, make_tiny_sd3

PLUGIN = "tests.helpers.sd3_plugin"


@pytest.fixture(scope="module", autouse=True)
def _no_sd3_of_our_own() -> Iterator[None]:
    """As if the family were one that is not built in; the plugin, which would go before it, is forgotten after that."""
    own = {name: key for name, key in transformer_ids().items() if name != "SD3Transformer2DModel"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(find, "transformer_ids", lambda: own)
        entries = dict(model_register.loaded())
        entries.pop(transformer_ids()["SD3Transformer2DModel"], None)
        patch.setattr(model_register, "_entries", entries)
        patch.delitem(sys.modules, PLUGIN, raising=False)
        import_plugin([PLUGIN])
        yield


@pytest.fixture(scope="module")
def yaml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sd3")
    make_tiny_sd3(folder / "model")
    return make_tiny_generator_run(folder, "flux", training={"plugin": [PLUGIN], "train_iters": 2})


@pytest.mark.edge("G6")
@pytest.mark.parametrize("written", [[None, None], None, "absent"], ids=["two nulls", "null", "not listed"])
def test_features_without_an_optional_encoder_are_those_of_the_whole_pipeline(
    yaml: Path, tmp_path: Path, written: object
) -> None:
    index_file = yaml.parent / "model" / "model_index.json"
    index = json.loads(index_file.read_text())
    changed = {name: entry for name, entry in index.items() if not name.endswith("_3")}
    if written != "absent":
        changed |= {"text_encoder_3": written, "tokenizer_3": written}
    index_file.write_text(json.dumps(changed))
    try:
        said = mm("extract", yaml, "--out", tmp_path / "features")
        assert said.code == 0, said.err
        store = open_features(tmp_path / "features", find_adapter(yaml.parent / "model"))
    finally:
        index_file.write_text(json.dumps(index))
    from diffusers import StableDiffusion3Pipeline

    whole = StableDiffusion3Pipeline.from_pretrained(yaml.parent / "model", text_encoder_3=None, tokenizer_3=None)
    for number, row in enumerate(lines(yaml.parent / "rows.jsonl")[:4]):
        caption = row["cap"] if isinstance(row["cap"], str) else row["cap"][0]
        with torch.no_grad():
            embeds, _, pooled, _ = whole.encode_prompt(
                caption, None, None, do_classifier_free_guidance=False, max_sequence_length=T5_TOKENS
            )
        found = store.read(number, 0)
        torch.testing.assert_close(found["prompt_embeds"], embeds[0], rtol=1e-5, atol=2e-6)
        torch.testing.assert_close(found["pooled_prompt_embeds"], pooled[0], rtol=1e-5, atol=2e-6)
        assert found["prompt_embeds"].shape == (77 + T5_TOKENS, 32)


@pytest.mark.edge("G6")
def test_it_is_checked_trained_raw_and_sampled(yaml: Path, tmp_path: Path) -> None:
    assert mm("check", yaml).code == 0
    train(yaml, tmp_path / "run")
    assert len(losses(tmp_path / "run")) == 2
    prompts = ("--prompt", "a red box", "--prompt", "x" * 100)
    said = mm("infer", tmp_path / "run", *prompts, "--size", "16x16", "--steps", 2, "--out", tmp_path / "out")
    assert said.code == 0, said.err
    assert "1 prompt is longer than what the text encoder reads" in said.err
    assert len(list((tmp_path / "out").glob("*.png"))) == 2


@pytest.mark.edge("G6")
def test_captions_are_measured_by_the_tokenizers_that_are_there(yaml: Path) -> None:
    adapter = find_adapter(yaml.parent / "model", "outside_sd3")
    assert adapter.caption_limits() == {"tokenizer": 77, "tokenizer_2": 77}
    short, long = CaptionLengths(adapter)(["a red box", "x" * 100])
    assert (short.is_cut, long.is_cut) == (False, True)
    assert (short.tokens, long.tokens, long.limit) == (9, 102, 77)


@pytest.fixture(scope="module")
def exported(yaml: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported")
    train(yaml, folder / "run")
    said = mm("export", folder / "run", folder / "model")
    assert said.code == 0, said.err
    return folder / "model"


@pytest.fixture
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has imported the plugin."""
    entries = {name: entry for name, entry in model_register.loaded().items() if name != "outside_sd3"}
    monkeypatch.setattr(model_register, "_entries", entries)
    monkeypatch.delitem(sys.modules, PLUGIN)


SAMPLE = ("--prompt", "a red box", "--size", "16x16", "--steps", 2)


@pytest.mark.edge("G7")
@pytest.mark.usefixtures("forgotten")
def test_an_exported_model_of_a_plugin_is_sampled_as_plain_diffusers_does(exported: Path, tmp_path: Path) -> None:
    refused = mm("infer", exported, *SAMPLE, "--out", tmp_path / "none")
    assert refused.code == 4
    assert "--plugin" in refused.err
    said = mm("infer", exported, "--plugin", PLUGIN, *SAMPLE, "--out", tmp_path / "out")
    assert said.code == 0, said.err
    (picture,) = (tmp_path / "out").glob("*.png")
    (entry,) = lines(tmp_path / "out" / "manifest.jsonl")
    from diffusers import StableDiffusion3Pipeline

    plain = StableDiffusion3Pipeline.from_pretrained(exported, text_encoder_3=None, tokenizer_3=None)
    noise = torch.randn(4, 8, 8, generator=torch.Generator().manual_seed(entry["noise_seed"]))[None]
    expected = plain(
        "a red box", negative_prompt="", height=16, width=16, num_inference_steps=2,
        latents=noise, max_sequence_length=T5_TOKENS, output_type="np",
    ).images[0]  # fmt: skip
    assert (np.asarray(Image.open(picture)) == (expected * 255).round()).all()


@pytest.mark.edge("G7")
@pytest.mark.usefixtures("forgotten")
def test_a_yaml_stands_for_the_runs_own(exported: Path, yaml: Path, tmp_path: Path) -> None:
    sampling = {"prompts": ["a red box", "two blue lines"], "height": 16, "width": 16, "num_inference_steps": 1}
    config = YAML().load(yaml.read_text())
    config["inference"] = {"sampling": sampling}
    with (tmp_path / "infer.yaml").open("w") as file:
        YAML().dump(config, file)
    said = mm("infer", exported, "--config", tmp_path / "infer.yaml", "--out", tmp_path / "out")
    assert said.code == 0, said.err
    assert [entry["prompt"] for entry in lines(tmp_path / "out" / "manifest.jsonl")] == sampling["prompts"]


@pytest.mark.edge("G7")
def test_a_plugin_that_cannot_be_imported_is_named_by_its_option(exported: Path, tmp_path: Path) -> None:
    said = mm("infer", exported, "--plugin", "tests.helpers.nowhere", *SAMPLE, "--out", tmp_path / "out")
    assert said.code == 2
    assert "--plugin" in said.err
    assert "tests.helpers.nowhere" in said.err
