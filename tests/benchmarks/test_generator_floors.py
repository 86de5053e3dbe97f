"""The floors of generators do what our own code does: the same loss of the same batch, the same features of the same
media."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from benchmarks import generators, raw_media
from benchmarks.diffusion_step import with_samples
from benchmarks.extraction import UnequalWorkError, check_means
from mindspeed_mm.fsdp.loss.denoising import DenoisingObjective
from mindspeed_mm.fsdp.models.diffusion.components import load_encoders
from mindspeed_mm.fsdp.models.diffusion.find import find_adapter
from mindspeed_mm.fsdp.params.diffusion_args import DiffusionArguments

TINY = {"attention_head_dim": 8, "num_attention_heads": 2}
TRAINED = {
    "flux": replace(
        generators.FLUX,
        transformer={**TINY, "num_layers": 1, "num_single_layers": 1, "axes_dims_rope": (4, 2, 2)},
    ),
    "wan": replace(generators.WAN, transformer={**TINY, "num_layers": 1, "ffn_dim": 16, "patch_size": (1, 4, 4)}),
    "cogvideox": replace(
        generators.COGVIDEOX,
        transformer={**generators.COGVIDEOX.transformer, "num_layers": 1, "attention_head_dim": 16},
    ),
    "ltx2": replace(generators.LTX2, transformer={"num_layers": 1}),
}
LATENTS = {"flux": (2, 3, 8, 8), "wan": (2, 3, 5, 16, 16), "cogvideox": (2, 4, 2, 8, 8), "ltx2": (2, 8, 2, 4, 4)}
OTHERS = {
    "ltx2": {
        "audio_latents": (2, 2, 6, 4), "audio_prompt_embeds": (2, 8, 16), "prompt_embeds": (2, 8, 16),
    },
}  # fmt: skip


@pytest.mark.parametrize("family", TRAINED)
def test_the_bare_loop_has_our_loss(tmp_path: Path, family: str) -> None:
    from benchmarks import bare_diffusers_loop

    generators.write_model(TRAINED[family], tmp_path)
    adapter = find_adapter(tmp_path)
    assert family not in generators.TOKENIZERS or adapter.text_tokens == generators.TEXT_TOKENS
    objective = DenoisingObjective(adapter, DiffusionArguments(), seed=1)
    batch = {"sample_ids": ["a", "b"], "epochs": [0, 0], "latents": torch.randn(LATENTS[family])}
    batch |= {"prompt_embeds": torch.randn(2, 8, 32), "pooled_prompt_embeds": torch.randn(2, 24)}
    batch |= {name: torch.randn(shape) for name, shape in OTHERS.get(family, {}).items()}
    batch |= {"prompt_mask": torch.ones(2, 8, dtype=torch.int64), "fps": [generators.CLIP_FPS] * 2}
    prepared = objective.prepare(batch)
    ready = {name.lstrip("_"): value for name, value in prepared.items() if isinstance(value, torch.Tensor)}
    model, loss_of, tokens = getattr(bare_diffusers_loop, family)(tmp_path, batch["latents"])
    model.train()
    loss = objective.terms(model, prepared)["loss"] / 2
    torch.testing.assert_close(loss_of(ready), loss, rtol=1e-6, atol=0)
    assert loss_of(ready | {"time": ready["time"] * 0.99}).item() != pytest.approx(loss.item(), rel=1e-5)
    assert 2 * tokens == objective.tokens(prepared).real


@pytest.mark.parametrize("kind", [raw_media.PICTURES, raw_media.CLIPS], ids=lambda kind: kind.name)
def test_the_bare_encoders_give_our_features(
    tmp_path: Path, kind: raw_media.Kind, capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarks import bare_encoders

    frames = kind.sizes.get("num_frames", 1)
    small = replace(kind, stored=(frames, 24, 32), sizes={**kind.sizes, "height": 16, "width": 16})
    raw_media.main(small, tmp_path, 3)
    bare_encoders.main(kind.family, tmp_path / "model", tmp_path / "inputs.safetensors", 2)
    bare = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [batch["samples"] for batch in bare["batches"]] == [2, 1]

    adapter = find_adapter(tmp_path / "model")
    pipeline = load_encoders(adapter, torch.device("cpu"))
    captions = [json.loads(line)["cap"] for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    latents = adapter.encode_media(pipeline, load_file(tmp_path / "inputs.safetensors")["pixels"])
    text = adapter.pad_text(adapter.encode_text(pipeline, captions))["prompt_embeds"]
    means = {"latents": bare_encoders.means_of(latents), "text": bare_encoders.means_of(text)}
    check_means(means, bare["means"])
    with pytest.raises(UnequalWorkError, match="row 1"):
        check_means(means | {"text": [*means["text"][1:], means["text"][0]]}, bare["means"])


def test_samples_of_a_step_follow_from_those_before() -> None:
    lines = [{"consumed_samples": 64, "loss": 2.0}, {"consumed_samples": 96, "loss": 1.0}]
    assert [line["samples"] for line in with_samples(lines)] == [64, 32]
