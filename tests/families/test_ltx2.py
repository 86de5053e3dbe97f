"""LTX-2, which learns pictures and sound together: features, loss, samples, exports and adapters against diffusers' own
classes, the spectrum against transformers' and two ranks against one process."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import soundfile
import torch
from PIL import Image
from ruamel.yaml import YAML
from safetensors.torch import load_file

from mindspeed_mm.core.media_geometry import MediaSize
from mindspeed_mm.core.seeds import derive_seed
from mindspeed_mm.fsdp.loss import denoising
from mindspeed_mm.fsdp.models.diffusion.find import find_adapter
from mindspeed_mm.fsdp.models.ltx2.modeling_ltx2 import LTX2Adapter, log_mel
from mindspeed_mm.fsdp.params.diffusion_args import DiffusionArguments
from mindspeed_mm.tasks.verify.precision import keeping_double
from tests.helpers.distributed import run_ranks
from tests.helpers.parity import compare_steps
from tests.helpers.pipeline_probe import drawn_time, plain_pipeline
from tests.helpers.planned_steps import train_steps
from tests.helpers.runs import lines, losses, mm, tensors, train, watched_steps
from tests.helpers.tiny_generator_run import generator_config
from tests.helpers.tiny_language_models import WIDTH
from tests.helpers.tiny_sounds import sound_bytes
from tests.helpers.tiny_video_families import make_tiny_ltx2

SEED, SIDE, FRAMES, RATE = 7, 64, 9, 16000
CAPTIONS = ("a red box", "two blue lines", "a seven moving left", "grain, large and round")
GIF_MS = (120, 120, 100, 100)
"""How long each clip shows a picture: two of them are faster, and their sound is shorter."""
FEATURES = "data.dataset_param.basic_parameters.features_dir="
FP64 = ("parallel.fsdp_plan.param_dtype=fp64", "training.adam_fused=false", "training.ema.enable=false")
CASES = ("ltx2", "ltx2_3")


def make_run(name: str, folder: Path, task: str | None = None) -> Path:
    """Model, four captioned clips with sound beside them, and the YAML."""
    make_tiny_ltx2(folder / "model", is_2_3=name == "ltx2_3")
    draw, rows = np.random.default_rng(3), []
    for index, caption in enumerate(CAPTIONS):
        pixels = draw.integers(0, 255, (FRAMES, SIDE, SIDE), dtype=np.uint8)
        first, *others = [Image.fromarray(frame) for frame in pixels]
        first.save(folder / f"{index}.gif", save_all=True, append_images=others, duration=GIF_MS[index], loop=0)
        wave = 0.3 * draw.uniform(-1, 1, (int(1.4 * RATE), 2))
        (folder / f"{index}.wav").write_bytes(sound_bytes(wave, RATE))
        rows.append({"path": f"{index}.gif", "cap": caption, "audio": f"{index}.wav"})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    average = {"enable": True, "decay": 0.5, "warmup": False}
    config = generator_config(
        folder,
        {"height": SIDE, "width": SIDE, "num_frames": FRAMES},
        model={} if task is None else {"task": task},
        training={
            "train_iters": 2, "seed": SEED, "ema": average, "diffusion": {}, "gradient_accumulation_steps": 2,
        },
    )  # fmt: skip
    with (folder / "run.yaml").open("w") as file:
        YAML().dump(config, file)
    return folder / "run.yaml"


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_family_equals_its_pipeline(name: str, tmp_path: Path) -> None:
    yaml = make_run(name, tmp_path)
    said = mm("check", yaml)
    assert said.code == 0 and "could not be predicted" not in said.err + said.out, said.err
    check_losses(yaml, tmp_path)
    check_export(tmp_path)
    check_samples(tmp_path)
    check_adapters(yaml, tmp_path)


def check_losses(yaml: Path, folder: Path) -> None:
    """Of a step on raw media and of one on features in fp64: equal to each other, and to what is computed by hand."""
    raw: list[dict[str, Any]] = []
    seen: list[dict[str, Any]] = []
    said = mm("extract", yaml, "--out", folder / "features")
    assert said.code == 0, said.err
    with watched_steps(lambda _, batches: raw.extend(batches)):
        train(yaml, folder / "raw", "training.train_iters=1")
    with keeping_double(), watched_steps(lambda _, batches: seen.extend(batches)):
        train(yaml, folder / "fp64", "training.train_iters=1", FEATURES + str(folder / "features"), *FP64)
    assert losses(folder / "fp64")[1] == pytest.approx(losses(folder / "raw")[1], rel=2e-5)
    pipeline = plain_pipeline(folder / "model")
    by_id = {sample: (batch, row) for batch in raw for row, sample in enumerate(batch["sample_ids"])}
    expected = []
    for batch in seen:
        for row, sample in enumerate(batch["sample_ids"]):
            check_features(pipeline, batch, row, *by_id[sample])
            with keeping_double():
                expected.append(loss_by_hand(pipeline, batch, row))
    assert len(expected) == 4 and {rate for batch in seen for rate in batch["fps"]} == {1000 / 120, 10.0}
    assert losses(folder / "fp64")[1] == pytest.approx(float(np.mean(expected)), rel=1e-9), expected


@torch.no_grad()
def check_features(pipeline: Any, made: dict[str, Any], row: int, raw: dict[str, Any], at: int) -> None:
    """Latents of pictures and sound, and both text features."""
    from transformers.audio_utils import mel_filter_bank, spectrogram, window_function

    vae, heard = pipeline.vae, pipeline.audio_vae
    pixels = 2 * (raw["pixels"][at : at + 1].float() / 255) - 1
    latents = pipeline._normalize_latents(
        vae.encode(pixels).latent_dist.mode(), vae.latents_mean, vae.latents_std, vae.config.scaling_factor
    )
    torch.testing.assert_close(made["latents"][row], latents[0], rtol=1e-4, atol=1e-5)

    filters = mel_filter_bank(513, heard.config.mel_bins, 0.0, RATE / 2, RATE, norm="slaney", mel_scale="slaney")
    window = window_function(1024, "hann")
    mel = [
        spectrogram(wave, window, 1024, 160, power=1.0, mel_filters=filters, mel_floor=1e-5, log_mel="log").T
        for wave in raw["sound"][at].double().numpy()
    ]
    count = round(FRAMES / raw["fps"][at] * 25)
    assert made["audio_latents"].shape[2] == count and len(mel[0]) == 4 * count + 1
    found = heard.encode(torch.from_numpy(np.stack(mel))[None].float()).latent_dist.mode()[:, :, :count]
    packed = pipeline._normalize_audio_latents(
        pipeline._pack_audio_latents(found), heard.latents_mean, heard.latents_std
    )
    torch.testing.assert_close(made["audio_latents"][row].transpose(0, 1).flatten(1), packed[0], rtol=1e-3, atol=1e-4)

    embeds, mask, _, _ = pipeline.encode_prompt(raw["captions"][at], do_classifier_free_guidance=False)
    video, audio, mask = pipeline.connectors(embeds[:, -32:], mask[:, -32:])
    assert mask.all()
    torch.testing.assert_close(made["prompt_embeds"][row], video[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(made["audio_prompt_embeds"][row], audio[0], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def loss_by_hand(
    pipeline: Any, batch: dict[str, Any], row: int, has_first: bool = False, is_alone: bool = False
) -> float:
    """Both flows at one noise level, each with noise of its own; the means of their squared errors are added, as in
    Lightricks' training. A first frame has no noise and time 0, and nothing is learned of it. Pictures that are alone
    see nothing of the sound, and are all that is learned."""
    from diffusers.pipelines.ltx2.pipeline_ltx2 import calculate_shift

    transformer = pipeline.transformer.double()
    sample, x = batch["sample_ids"][row], batch["latents"][row : row + 1].double()
    heard = batch["audio_latents"][row : row + 1].double()
    seed = derive_seed(SEED, batch["epochs"][row], sample)
    chance = np.random.Generator(np.random.Philox(key=seed))
    chance.random()  # whether the caption is dropped
    config = pipeline.scheduler.config
    mu = calculate_shift(
        x[0, 0].numel(), config.base_image_seq_len, config.max_image_seq_len, config.base_shift, config.max_shift
    )
    sigma = drawn_time(chance, pipeline.scheduler, mu)

    def drawn(seed: int, like: torch.Tensor) -> torch.Tensor:
        return torch.randn(like.shape[1:], generator=torch.Generator().manual_seed(seed % 2**63))[None].double()

    noise, hiss = drawn(seed, x), drawn(derive_seed(seed, "audio_latents"), heard)
    assert not torch.equal(noise.flatten()[:8], hiss.flatten()[:8])
    time = torch.tensor([1000 * sigma], dtype=torch.float64)
    frames, height, width = x.shape[2:]
    coords = transformer.rope.prepare_video_coords(1, frames, height, width, x.device, fps=batch["fps"][row])
    text = {key: batch[key][row : row + 1].double() for key in ("prompt_embeds", "audio_prompt_embeds")}
    seen, of_tokens = (1 - sigma) * x + sigma * noise, time
    if has_first:
        seen[:, :, 0] = x[:, :, 0]
        of_tokens = torch.full((1, frames, height * width), 1000 * sigma, dtype=torch.float64)
        of_tokens[:, 0] = 0
    video, audio = transformer(
        hidden_states=pipeline._pack_latents(seen),
        audio_hidden_states=pipeline._pack_audio_latents((1 - sigma) * heard + sigma * hiss),
        encoder_hidden_states=text["prompt_embeds"],
        audio_encoder_hidden_states=text["audio_prompt_embeds"],
        timestep=of_tokens.flatten(1) if has_first else time,
        audio_timestep=time,
        sigma=time,
        video_coords=coords,
        audio_num_frames=heard.shape[2],
        use_cross_timestep=True,
        isolate_modalities=is_alone,
        return_dict=False,
    )
    learned = slice(height * width if has_first else 0, None)
    of_video = (video - pipeline._pack_latents(noise - x))[:, learned].square().mean()
    if is_alone:
        return float(of_video)
    of_audio = (audio - pipeline._pack_audio_latents(hiss - heard)).square().mean()
    return float(of_video + of_audio)


def made_up_batch(name: str, folder: Path) -> dict[str, Any]:
    """Makes the model, and features of two samples."""
    make_tiny_ltx2(folder, is_2_3=name == "ltx2_3")
    draw = torch.Generator().manual_seed(1)
    widths = (24, 16) if name == "ltx2_3" else (WIDTH, WIDTH)
    made = {
        "latents": (2, 8, 2, 2, 2), "audio_latents": (2, 2, 5, 4), "prompt_embeds": (2, 8, widths[0]),
        "audio_prompt_embeds": (2, 8, widths[1]),
    }  # fmt: skip
    batch: dict[str, Any] = {key: torch.randn(shape, generator=draw).double() for key, shape in made.items()}
    return batch | {"prompt_mask": torch.ones(2, 8), "sample_ids": ["a", "b"], "epochs": [0, 0], "fps": [12.0, 30.0]}


def objective_and_hand(folder: Path, task: str = "t2av", name: str = "ltx2") -> tuple[float, float]:
    """The loss of a batch of made-up features in fp64, by the objective and by hand."""
    batch = made_up_batch(name, folder)
    adapter, pipeline = find_adapter(folder, task=task), plain_pipeline(folder)
    objective = denoising.DenoisingObjective(adapter, DiffusionArguments(), seed=SEED, compute_dtype=torch.float64)
    is_alone = task in ("t2v", "i2v")
    with keeping_double(), torch.no_grad():
        hand = [loss_by_hand(pipeline, batch, row, task in ("i2av", "i2v"), is_alone) for row in range(2)]
        given = {key: value for key, value in batch.items() if not (is_alone and key == "audio_latents")}
        terms = objective.terms(pipeline.transformer, objective.prepare(given))
    return float(terms["loss"]) / 2, float(np.mean(hand))


@pytest.mark.edge("BN12")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("task", ["t2av", "i2av", "t2v", "i2v"])
def test_the_loss_is_the_sum_of_what_is_learned(task: str, name: str, tmp_path: Path) -> None:
    ours, by_hand = objective_and_hand(tmp_path, task, name)
    assert ours == pytest.approx(by_hand, rel=1e-12)


@pytest.mark.edge("BN12")
def test_what_the_pipeline_makes_of_a_first_frame(tmp_path: Path) -> None:
    """Why a loss with the first frame out of diffusers' pipeline is another: the pipeline compresses the picture as
    H.264, and leaves the VAE's `scaling_factor` (1 unless its configuration has another) out of its latents alone."""
    from diffusers import LTX2ImageToVideoPipeline
    from diffusers.pipelines.ltx2.utils import apply_image_conditioning_crf, resolve_default_image_crf

    make_tiny_ltx2(tmp_path, is_2_3=True)
    adapter, plain = find_adapter(tmp_path, task="i2v"), plain_pipeline(tmp_path)
    pipeline, vae = LTX2ImageToVideoPipeline(**plain.components), plain.vae
    picture = np.random.default_rng(5).integers(0, 255, (SIDE, SIDE, 3), dtype=np.uint8)
    compressed = apply_image_conditioning_crf(picture, 33)
    given: list[torch.Tensor] = []
    watch = pipeline.transformer.register_forward_pre_hook(
        lambda _, __, inputs: given.append(inputs["hidden_states"]), with_kwargs=True
    )
    for crf in (0, None):
        pipeline(
            image=Image.fromarray(picture), prompt="a", height=SIDE, width=SIDE, num_frames=FRAMES, image_crf=crf,
            num_inference_steps=2, guidance_scale=1.0, stg_scale=0.0, audio_stg_scale=0.0, modality_scale=1.0,
            audio_guidance_scale=1.0, audio_modality_scale=1.0, max_sequence_length=32, output_type="latent",
        )  # fmt: skip
    watch.remove()
    assert resolve_default_image_crf(pipeline.text_encoder) == 33
    assert vae.config.scaling_factor == 0.9
    shown = [torch.from_numpy(each).permute(2, 0, 1)[None, :, None] for each in (picture, compressed)]
    for pixels, tokens in zip(shown, given[::2], strict=True):
        ours = pipeline._pack_latents(adapter.encode_media(pipeline, pixels))
        torch.testing.assert_close(ours, 0.9 * tokens[:, : ours.shape[1]], rtol=1e-4, atol=1e-5)
    assert (given[0] - given[2])[:, :4].abs().max() > 1e-3


def without_rates(inputs: Callable[..., Any]) -> Callable[..., Any]:
    """Fault: all clips are as fast as each other."""
    return lambda self, noisy, sigma, batch, guidance: inputs(
        self, noisy, sigma, {**batch, "fps": [24.0] * 2}, guidance
    )


def with_one_noise(_: Callable[..., Any]) -> Callable[..., Any]:
    """Fault: the sound has the seed of the pictures."""
    return lambda draws, key, shape: torch.stack([denoising.noise_of(draw.seed, shape) for draw in draws])


def with_silence(predictions: Callable[..., Any]) -> Callable[..., Any]:
    """Fault: what is said of the sound is not listened to."""
    return lambda self, output, shapes: predictions(self, (output[0], torch.zeros_like(output[1])), shapes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("owner", "name", "fault"),
    [
        (LTX2Adapter, "inputs", without_rates),
        (LTX2Adapter, "predictions", with_silence),
        (denoising.DenoisingObjective, "_noise", with_one_noise),
    ],
)
def test_a_fault_is_seen(owner: Any, name: str, fault: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = fault(getattr(owner, name))
    monkeypatch.setattr(owner, name, staticmethod(changed) if name == "_noise" else changed)
    ours, by_hand = objective_and_hand(tmp_path)
    assert ours != pytest.approx(by_hand, rel=1e-3)


def test_the_spectrum_is_that_of_transformers() -> None:
    """In fp64, for a tone and for noise."""
    from transformers.audio_utils import mel_filter_bank, spectrogram, window_function

    draw = np.random.default_rng(0)
    wave = np.stack([np.sin(np.arange(4000) / 7), draw.uniform(-1, 1, 4000)])
    filters = mel_filter_bank(513, 64, 0.0, 8000.0, RATE, norm="slaney", mel_scale="slaney")
    window = window_function(1024, "hann")
    expected = [
        spectrogram(each, window, 1024, 160, power=1.0, mel_filters=filters, mel_floor=1e-5, log_mel="log", dtype=float)
        for each in wave
    ]
    made = log_mel(torch.from_numpy(wave), RATE, 160, 64)
    assert made.shape == (2, 26, 64)
    np.testing.assert_allclose(made.numpy(), np.stack(expected).transpose(0, 2, 1), rtol=1e-6, atol=1e-6)


def check_export(folder: Path) -> None:
    """The averaged weights are exported."""
    train(folder / "run.yaml", folder / "run", FEATURES + str(folder / "features"))
    said = mm("export", folder / "run", folder / "exported")
    assert said.code == 0, said.err
    weights, trained = load_file(next((folder / "exported/transformer").glob("*.safetensors"))), tensors(folder / "run")
    averages = {key.removeprefix("ema."): value for key, value in trained.items() if key.startswith("ema.")}
    assert averages and all(torch.equal(weights[key], value) for key, value in averages.items())
    moved = {key for key, value in averages.items() if not torch.equal(value, trained[f"model.{key}"])}
    assert any("audio" in key for key in moved) and any("audio" not in key for key in moved)


@pytest.mark.slow
def test_a_first_frame_is_followed_as_by_the_pipeline(tmp_path: Path) -> None:
    make_tiny_ltx2(tmp_path / "exported")
    picture = np.random.default_rng(5).integers(0, 255, (SIDE, SIDE, 3), dtype=np.uint8)
    Image.fromarray(picture).save(tmp_path / "first.png")
    check_samples(tmp_path, tmp_path / "first.png")


def check_samples(folder: Path, picture: Path | None = None) -> None:
    """`mm infer` writes what the plain pipeline makes of the same noise: pictures, and sound in the mp4 and a file."""
    words = ["--steps", 3, "--guidance-scale", 3.0, "--size", f"{SIDE}x{SIDE}", "--frames", FRAMES, "--fps", 10]
    words += ["--task", "i2av", "--image", picture] if picture else []
    said = mm("infer", folder / "exported", "--prompt", CAPTIONS[0], *words, "--out", folder / "samples")
    assert said.code == 0, said.err
    (entry,) = lines(folder / "samples/manifest.jsonl")
    from diffusers import LTX2ImageToVideoPipeline

    adapter, pipeline = find_adapter(folder / "exported"), plain_pipeline(folder / "exported")
    seed, shapes = entry["noise_seed"], adapter.further_shapes(FRAMES, 10.0)
    assert shapes == {"audio_latents": (2, 22, 4)}
    noise = denoising.noise_of(seed, adapter.geometry.latent_shape(MediaSize(FRAMES, SIDE, SIDE)))[None]
    hiss = denoising.noise_of(derive_seed(seed, "audio_latents"), shapes["audio_latents"])[None]
    vae, heard = pipeline.vae, pipeline.audio_vae
    packed = pipeline._pack_audio_latents(hiss)
    plain = pipeline._denormalize_audio_latents(packed, heard.latents_mean, heard.latents_std)
    if picture:
        pipeline = LTX2ImageToVideoPipeline(**pipeline.components)
        begun = {"image": Image.open(picture), "generator": torch.Generator().manual_seed(seed)}
    else:
        latents = pipeline._denormalize_latents(noise, vae.latents_mean, vae.latents_std, vae.config.scaling_factor)
        begun = {"latents": latents}
    video, sound = pipeline(
        prompt=CAPTIONS[0],
        negative_prompt="",
        **begun,
        audio_latents=pipeline._unpack_audio_latents(plain, 22, 4),
        height=SIDE, width=SIDE, num_frames=FRAMES, frame_rate=10.0, num_inference_steps=3, guidance_scale=3.0,
        audio_guidance_scale=3.0, stg_scale=0.0, audio_stg_scale=0.0, modality_scale=1.0, audio_modality_scale=1.0,
        guidance_rescale=0.0, audio_guidance_rescale=0.0, max_sequence_length=32, output_type="np", return_dict=False,
    )  # fmt: skip
    file = folder / "samples" / entry["file"]
    written, rate = soundfile.read(io.BytesIO(file.with_suffix(".wav").read_bytes()), always_2d=True)
    assert rate == 8000 and entry["sound"] == file.with_suffix(".wav").name
    np.testing.assert_allclose(written.T, sound[0].clip(-1, 1).numpy(), atol=2e-4)
    assert np.abs(written).max() > 0
    with av.open(str(file)) as container:
        frames = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
        assert container.streams.audio[0].rate == 8000 and container.streams.audio[0].layout.name == "stereo"
    assert frames.shape == (FRAMES, SIDE, SIDE, 3) and entry["frames"] == FRAMES
    assert np.abs(frames.mean(axis=(1, 2)) / 255 - video[0].mean(axis=(1, 2))).max() < 0.02


def check_adapters(yaml: Path, folder: Path) -> None:
    """Trained adapters load beside the weights in diffusers, and say there what the merged folder says."""
    words = ("training.lora.enable=true", "training.lr=0.05", FEATURES + str(folder / "features"))
    train(yaml, folder / "adapters", *words, "training.ema.enable=false")
    for option, out in ((), "lora"), (("--merge",), "merged"):
        said = mm("export", folder / "adapters", folder / out, *option)
        assert said.code == 0, said.err
    beside, merged, base = (plain_pipeline(folder / each) for each in ("model", "merged", "model"))
    beside.load_lora_weights(folder / "lora")
    draw = torch.Generator().manual_seed(1)
    config = base.transformer.config
    widths = (24, 16) if not config.use_prompt_embeddings else (config.caption_channels,) * 2
    given = {
        "hidden_states": torch.randn(1, 8, 8, generator=draw),
        "audio_hidden_states": torch.randn(1, 6, 8, generator=draw),
        "encoder_hidden_states": torch.randn(1, 5, widths[0], generator=draw),
        "audio_encoder_hidden_states": torch.randn(1, 5, widths[1], generator=draw),
        "timestep": torch.tensor([500.0]), "sigma": torch.tensor([500.0]), "num_frames": 2, "height": 2, "width": 2,
        "audio_num_frames": 6, "return_dict": False,
    }  # fmt: skip
    with torch.no_grad():
        said_by = [each.transformer(**given) for each in (beside, merged, base)]
    for of_beside, of_merged, of_base in zip(*said_by, strict=True):
        torch.testing.assert_close(of_beside, of_merged, rtol=1e-3, atol=1e-4)
        assert (of_beside - of_base).abs().max() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("task", ["t2av", "t2v"])
def test_two_ranks_equal_one_process(task: str, tmp_path: Path) -> None:
    """FSDP2: loss, gradients and weights of two steps, in fp64."""
    yaml = with_features(make_run("ltx2", tmp_path, task))
    expected = steps_of(*yaml, 2)
    for measured in run_ranks(2, steps_of, *yaml, 1):
        compare_steps(expected, measured, 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "task"), [("ltx2", "t2av"), ("ltx2_3", "i2av"), ("ltx2", "t2v")])
def test_two_stages_equal_one_process(name: str, task: str, tmp_path: Path) -> None:
    """Pictures and sound travel from stage to stage."""
    yaml = with_features(make_run(name, tmp_path, task))
    expected = steps_of(*yaml, 2, ("training.gradient_accumulation_steps=1",))
    stages = ("parallel.pipeline_parallel_size=2", "training.gradient_accumulation_steps=2")
    for measured in run_ranks(2, steps_of, *yaml, 1, stages):
        compare_steps(expected, measured, 1e-6)


def with_features(yaml: Path) -> tuple[str, str]:
    """The YAML, and the folder of its features."""
    said = mm("extract", yaml, "--out", yaml.parent / "features")
    assert said.code == 0, said.err
    return str(yaml), str(yaml.parent / "features")


def steps_of(yaml: str, features: str, micro_batch_size: int, words: tuple[str, ...] = ()) -> Any:
    given = [*FP64, FEATURES + features, f"training.micro_batch_size={micro_batch_size}", *words]
    with keeping_double():
        return train_steps(yaml, given)


def test_a_clip_without_sound_is_refused_at_the_start(tmp_path: Path) -> None:
    yaml = make_run("ltx2", tmp_path)
    rows = lines(tmp_path / "rows.jsonl")
    del rows[1]["audio"]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for words in (("data", "check", yaml), ("train", yaml)):
        said = mm(*words)
        assert said.code != 0
        assert "rows.jsonl:2" in said.out + said.err and "is not a sound but a GIF picture" in said.out + said.err
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("task", ["t2v", "i2v"])
def test_pictures_alone(task: str, tmp_path: Path) -> None:
    """Clips without sound will do, and what would look at sound learns nothing; `i2v` is given the first frame."""
    yaml = make_run("ltx2", tmp_path, task)
    rows = [{key: value for key, value in row.items() if key != "audio"} for row in lines(tmp_path / "rows.jsonl")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    step, *_ = steps_of(*with_features(yaml), 2)
    asked = mm("train", yaml, f"training.save={tmp_path / 'with'}", "model.task=t2av")
    assert asked.code != 0 and "is not a sound but a GIF picture" in asked.err
    moved = {name for name, gradient in step["gradients"].items() if gradient is not None and gradient.abs().max() > 0}
    assert moved and not any("audio" in name for name in moved)


@pytest.mark.slow
def test_a_plan_that_it_cannot_have_is_refused(tmp_path: Path) -> None:
    said = mm("check", make_run("ltx2", tmp_path), "parallel.ring_attention_size=2", "--nproc", 2)
    assert said.code != 0
    assert "two sequences that look at each other" in said.err + said.out
