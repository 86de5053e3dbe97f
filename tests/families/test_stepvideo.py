"""Step-Video: transformer, VAE and text encoder against their formulas in fp64, released names, losses, samples,
adapters, and every plan against one process."""

from __future__ import annotations

import itertools
import json
import math
import re
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import av
import numpy as np
import pytest
import torch
from ruamel.yaml import YAML
from safetensors.torch import load_file
from torch import nn

from mindspeed_mm.core.errors import ConfigError, MachineError
from mindspeed_mm.core.media_geometry import MediaSize
from mindspeed_mm.core.seeds import derive_seed
from mindspeed_mm.fsdp.loss.denoising import noise_of
from mindspeed_mm.fsdp.models.diffusion.find import find_adapter
from mindspeed_mm.fsdp.plan.outline import build_outline
from mindspeed_mm.fsdp.tools.memory_model.simulation import NOTE
from mindspeed_mm.fsdp.train.configuration import load_with_plugins
from mindspeed_mm.fsdp.train.memory.forecast import forecast
from mindspeed_mm.tasks.verify.precision import keeping_double
from tests.helpers import reference_stepvideo as reference
from tests.helpers.distributed import run_ranks
from tests.helpers.measured_memory import measured
from tests.helpers.parity import compare_steps
from tests.helpers.planned_steps import train_steps
from tests.helpers.runs import differing, losses, mm, tensors, train, watched_steps
from tests.helpers.tiny_generator_run import generator_config, make_clips
from tests.helpers.tiny_stepvideo import HEAD_DIM, STEP_LLM, TRANSFORMER, VAE, make_tiny_stepvideo

RELEASED = Path(__file__).parents[1] / "released/stepvideo/t2v.json"
FP64 = ("parallel.fsdp_plan.param_dtype=fp64", "training.adam_fused=false")
SIDE, SEED = 32, 7
TASKS = ("t2v", "i2v")
GROUPS = VAE["norm_num_groups"]


def seeded_double(model: Any) -> Any:
    """With weights that hide nothing: diffusers begins norms at one and biases at zero."""
    chance = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        parameter.data = 0.3 * torch.randn(parameter.shape, generator=chance, dtype=torch.float64)
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            parameter.data += 2  # attention that is far from even
    return model.double().eval()


def own(model: nn.Module, start: str = "") -> dict[str, torch.Tensor]:
    return {
        name.removeprefix(start): each.detach() for name, each in model.state_dict().items() if name.startswith(start)
    }


# --- the models -------------------------------------------------------------------------------------------------------


def transformer_difference(task: str) -> float:
    """Of two samples, one of which has a shorter caption, as a share of the largest number."""
    from mindspeed_mm.fsdp.models.stepvideo.transformer import StepVideoModel

    torch.manual_seed(0)
    model = seeded_double(StepVideoModel(**TRANSFORMER, use_additional_conditions=task == "i2v"))
    x, words, clip = torch.randn(2, 3, 4, 2, 3).double(), torch.randn(2, 6, 16).double(), torch.randn(2, 5, 12).double()
    times, mask = torch.tensor([0.25, 0.8125]).double(), torch.tensor([[1] * 6, [1] * 4 + [0] * 2])
    given: dict[str, Any] = {}
    first = torch.randn(2, 4, 2, 3).double() if task == "i2v" else [None, None]
    if task == "i2v":
        behind = torch.zeros_like(x)
        behind[:, 0] = first
        given = {"condition_hidden_states": behind, "motion_score": torch.full((2,), 5.0).double()}
    with torch.no_grad():
        (said,) = model(x, times, words, mask, clip, return_dict=False, **given)
    worst = 0.0
    for row in range(2):
        expected = reference.transformer_reference(
            own(model), HEAD_DIM, x[row], float(times[row]), words[row][mask[row].bool()], clip[row], first[row]
        )
        worst = max(worst, float((said[row] - expected).abs().max() / expected.abs().max()))
    return worst


@pytest.mark.parametrize("task", TASKS)
def test_the_transformer_is_that_of_the_formula(task: str) -> None:
    assert transformer_difference(task) < 1e-4  # features of times of 0 … 1000 are fp32


def axes_exchanged(tables: Any) -> Any:
    """Fault: height and time turn each other's features."""
    return lambda grid, head_dim, device: tables((grid[1], grid[0], grid[2]), head_dim, device)


@pytest.mark.parametrize("fault", ["axes", "mask", "clip behind"])
def test_a_fault_of_the_transformer_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from mindspeed_mm.fsdp.models.stepvideo import transformer

    if fault == "axes":
        monkeypatch.setattr(transformer, "rotary_tables", axes_exchanged(transformer.rotary_tables))
    elif fault == "mask":
        real = transformer.StepVideoAttnProcessor.__call__
        unmasked = lambda self, attention, q, k, v, attention_mask=None: real(self, attention, q, k, v)  # noqa: E731
        monkeypatch.setattr(transformer.StepVideoAttnProcessor, "__call__", unmasked)
    else:
        joined = torch.cat

        def turned(parts: Any, dim: int = 0) -> torch.Tensor:
            return joined(list(parts)[::-1] if dim == 1 and parts[0].is_floating_point() else parts, dim=dim)

        monkeypatch.setattr(torch, "cat", turned)
    assert transformer_difference("t2v") > 1e-2


def test_modulated_norms_keep_tokens_alone() -> None:
    """Their gradients read nothing else that is as large; a planted fault, modulation behind the norm, keeps more."""
    from mindspeed_mm.fsdp.models.diffusion.modulation import modulated

    norm, tokens, of_sample = nn.LayerNorm(8), torch.randn(2, 5, 8, requires_grad=True), torch.randn(2, 2, 1, 8)
    scale, shift = of_sample.requires_grad_()

    def large_ones(formula: Any) -> set[int]:
        kept: list[torch.Tensor] = []

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            kept.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            formula(norm, tokens, scale, shift)
        return {each.untyped_storage().data_ptr() for each in kept if each.numel() >= tokens[0].numel()}

    assert large_ones(modulated) == {tokens.untyped_storage().data_ptr()}
    assert len(large_ones(lambda norm, x, scale, shift: norm(x) * (1 + scale) + shift)) == 2


def vae_differences() -> tuple[float, float]:
    """Of encoding and of decoding two groups of frames."""
    from mindspeed_mm.fsdp.models.stepvideo.vae import StepVideoVAE

    vae = seeded_double(StepVideoVAE(**VAE))
    chance = torch.Generator().manual_seed(5)
    pixels = torch.rand(1, 3, 34, SIDE, SIDE, generator=chance).double() * 2 - 1
    with torch.no_grad():
        posterior = vae.encode(pixels).latent_dist
        whole = [reference.encoder_reference(own(vae, "encoder."), each, GROUPS) for each in pixels[0].split(17, dim=1)]
        encoded = float((posterior.parameters[0] - torch.cat(whole, dim=1)).abs().max())
        latents = torch.randn(1, 4, 6, 1, 2, generator=chance).double()
        expected = reference.decoded_reference(own(vae, "decoder."), latents[0], GROUPS)
        decoded = float((vae.decode(latents).sample[0] - expected).abs().max())
    assert expected.abs().max() > 0.1 and posterior.mean.shape == (1, 4, 6, 2, 2) and expected.shape == (3, 34, 16, 32)
    return encoded, decoded


def test_the_vae_is_that_of_the_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    from mindspeed_mm.fsdp.models.stepvideo import vae

    assert max(vae_differences()) < 1e-9
    picture, clip = seeded_double(vae.StepVideoVAE(**VAE)), torch.rand(1, 3, 1, SIDE, SIDE).double()
    with torch.no_grad():
        latents = picture.encode(clip).latent_dist.mode()
        assert latents.shape == (1, 4, 1, 2, 2) and picture.decode(latents).sample.shape == clip.shape
    monkeypatch.setattr(vae, "GROUP_LATENTS", 2)  # a planted fault: groups that begin elsewhere
    with pytest.raises((AssertionError, RuntimeError)):
        vae_differences()


def test_a_group_knows_nothing_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: groups of 17 frames are shifted by one."""
    from mindspeed_mm.fsdp.models.stepvideo import vae

    model = seeded_double(vae.StepVideoVAE(**VAE))
    pixels = torch.rand(1, 3, 34, SIDE, SIDE).double()

    def first_of_each(changed: int) -> tuple[bool, bool]:
        other = pixels.clone()
        other[:, :, changed] += 0.5
        with torch.no_grad():
            now, then = (model.encode(each).latent_dist.mode()[:, :, :6] for each in (other, pixels))
        moved = (now - then).abs().amax((0, 1, 3, 4)) > 1e-12
        return bool(moved[:3].any()), bool(moved[3:].any())

    assert first_of_each(16) == (True, False) and first_of_each(17) == (False, True)
    monkeypatch.setattr(vae, "GROUP_FRAMES", 18)
    with pytest.raises((AssertionError, RuntimeError)):  # 16 frames are no group
        assert first_of_each(17) == (False, True)


def test_step_llm_is_that_of_the_formula() -> None:
    from mindspeed_mm.fsdp.models.stepvideo.step_llm import StepLLMConfig, StepLLMModel

    sizes = {**STEP_LLM, "hidden_size": 24, "num_attention_heads": 6}  # six heads: slopes of two kinds
    model = seeded_double(StepLLMModel(StepLLMConfig(**sizes, padded_vocab_size=20)))
    ids = [[1, 5, 7, 19, 3, 2], [1, 8, 2, 2, 2, 2]]
    with torch.no_grad():
        said = model(torch.tensor(ids)).last_hidden_state
    for row, length in ((0, 6), (1, 3)):  # what stands behind a caption changes nothing of it
        expected = reference.step_llm_reference(own(model), 6, 2, ids[row][:length])
        torch.testing.assert_close(said[row, :length], expected, rtol=1e-6, atol=1e-6)


def test_the_tokenizer_puts_captions_between_its_marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What SentencePiece makes of a caption is cut so that both marks fit; without the package it is said."""
    from mindspeed_mm.fsdp.models.stepvideo.step_llm import StepChatTokenizer

    words = SimpleNamespace(encode=lambda text: [ord(letter) for letter in text])
    package = SimpleNamespace(SentencePieceProcessor=lambda model_file: words)
    monkeypatch.setitem(sys.modules, "sentencepiece", package)
    tokenizer = StepChatTokenizer.from_pretrained(str(tmp_path))
    assert tokenizer(text=["ab", ""])["input_ids"] == [[1, 97, 98, 2], [1, 2]]
    assert tokenizer(text=["abc"], max_length=4)["input_ids"] == [[1, 97, 98, 2]]
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(MachineError, match=r"the package sentencepiece is not installed\. pip install sentencepiece"):
        StepChatTokenizer.from_pretrained(str(tmp_path))


@pytest.mark.parametrize("task", TASKS)
def test_released_names_and_shapes_are_those_of_the_classes(task: str) -> None:
    from mindspeed_mm.fsdp.models.stepvideo.step_llm import StepLLMConfig, StepLLMModel
    from mindspeed_mm.fsdp.models.stepvideo.transformer import StepVideoModel
    from mindspeed_mm.fsdp.models.stepvideo.vae import StepVideoVAE

    record = json.loads(RELEASED.read_text(encoding="utf-8"))
    expected = record["transformer"] | (record["ti2v"] if task == "i2v" else {})
    with torch.device("meta"):
        model = StepVideoModel(use_additional_conditions=task == "i2v")
        assert shapes_of(model) == (expected, record["layers"])
        if task == "t2v":
            assert shapes_of(StepLLMModel(StepLLMConfig())) == (record["step_llm"], record["layers"])
            stored = {name.replace("decoder.conv_out.conv.", "decoder.conv_out."): shape for name, shape in
                      shapes_of(StepVideoVAE())[0].items()}  # fmt: skip
            assert stored == record["vae_v2.safetensors"]


def shapes_of(model: nn.Module) -> tuple[dict[str, list[int]], int]:
    """Name, without the number of the layer → shape; and how many layers there are."""
    found: dict[str, list[int]] = {}
    layers = set()
    for name, tensor in model.state_dict().items():
        number = re.search(r"(?:transformer_blocks|transformer\.layers)\.(\d+)\.", name)
        if number:
            layers.add(number[1])
            name = name.replace(f".{number[1]}.", ".{n}.", 1)
        assert found.setdefault(name, list(tensor.shape)) == list(tensor.shape)
    return found, len(layers)


# --- training and sampling --------------------------------------------------------------------------------------------


def make_run(folder: Path, task: str) -> Path:
    """Model, four clips of 34 frames and the YAML."""
    make_tiny_stepvideo(folder / "model", use_additional_conditions=task == "i2v")
    make_clips(folder, count=4, frames=34, size=SIDE)
    sizes = {"height": SIDE, "width": SIDE, "num_frames": 34}
    training = {"train_iters": 2, "seed": SEED, "diffusion": {}}
    with (folder / "run.yaml").open("w") as file:
        YAML().dump(generator_config(folder, sizes, training=training), file)
    return folder / "run.yaml"


FEATURES = "data.dataset_param.basic_parameters.features_dir="


@pytest.mark.parametrize("task", [pytest.param("t2v", marks=pytest.mark.slow), "i2v"])
def test_losses_are_those_of_the_formula(task: str, tmp_path: Path) -> None:
    """Raw media and features, in fp64: a step equals the reference's mean over the samples. What is learned is exported
    under the released names."""
    yaml = make_run(tmp_path, task)
    said = mm("extract", yaml, "--out", tmp_path / "features")
    assert said.code == 0, said.err
    seen: list[dict[str, Any]] = []
    with keeping_double(), watched_steps(lambda _, batches: seen.extend(batches)):
        train(yaml, tmp_path / "run", FEATURES + str(tmp_path / "features"), *FP64)
        train(yaml, tmp_path / "raw", *FP64, "training.train_iters=1")
    expected = losses_by_hand(tmp_path / "model", seen[0])
    assert losses(tmp_path / "run")[1] == pytest.approx(np.mean(expected), rel=1e-5)
    assert losses(tmp_path / "raw")[1] == pytest.approx(losses(tmp_path / "run")[1], rel=2e-5)
    assert losses(tmp_path / "run")[2] != losses(tmp_path / "run")[1]
    turned = losses_by_hand(tmp_path / "model", seen[0], time_is_sigma=True)  # a planted fault: time the other way
    assert losses(tmp_path / "run")[1] != pytest.approx(np.mean(turned), rel=1e-3)
    said = mm("export", tmp_path / "run", tmp_path / "exported")
    assert said.code == 0, said.err
    exported, before, trained = stored(tmp_path / "exported"), stored(tmp_path / "model"), tensors(tmp_path / "run")
    assert exported.keys() == before.keys()
    assert all(torch.equal(each, trained[f"model.{name}"].to(each.dtype)) for name, each in exported.items())
    assert not any(torch.equal(each, before[name]) for name, each in exported.items() if name.endswith("wqkv.weight"))
    assert "mm.infer(" in (tmp_path / "exported/README.md").read_text()


def losses_by_hand(model: Path, batch: dict[str, Any], time_is_sigma: bool = False) -> list[float]:
    weights = {name: each.double() for name, each in stored(model).items()}
    found = []
    for row, sample in enumerate(batch["sample_ids"]):
        chance = np.random.Generator(np.random.Philox(key=derive_seed(SEED, batch["epochs"][row], sample)))
        chance.random()  # whether the caption is dropped
        level = 1 / (1 + np.exp(-chance.normal(0.0, 1.0)))
        sigma = 13 * level / (1 + 12 * level)
        x = batch["latents"][row].double()
        noise = noise_of(derive_seed(SEED, batch["epochs"][row], sample), tuple(x.shape)).double()
        noisy = (1 - sigma) * x + sigma * noise
        words = batch["prompt_embeds"][row][batch["prompt_mask"][row].bool()].double()
        first = batch["condition_latents"][row, :, 0].double() if "condition_latents" in batch else None
        said = reference.transformer_reference(
            weights, HEAD_DIM, noisy.transpose(0, 1), sigma if time_is_sigma else 1 - sigma, words,
            batch["clip_embeds"][row].double(), first,
        )  # fmt: skip
        found.append(float((said.transpose(0, 1) - (x - noise)).square().mean()))
    return found


def stored(model: Path) -> dict[str, torch.Tensor]:
    return load_file(model / "transformer/diffusion_pytorch_model.safetensors")


@pytest.mark.parametrize("task", TASKS)
def test_samples_are_those_of_a_loop_by_hand(task: str, tmp_path: Path) -> None:
    """The pipeline's latents: Euler steps over shifted levels with guidance, in which the caption's tokens are what the
    tokenizer makes of it."""
    from PIL import Image

    from mindspeed_mm.fsdp.models.diffusion.components import load_encoders, load_pipeline
    from mindspeed_mm.tasks.draw.loading import load_transformer

    make_tiny_stepvideo(tmp_path / "model", use_additional_conditions=task == "i2v")
    adapter = find_adapter(tmp_path / "model")
    assert adapter.task == task
    encoders = load_encoders(adapter, torch.device("cpu"))
    pipeline = load_pipeline(adapter, load_transformer(adapter, adapter.transformer_folder), encoders)
    start = torch.randn(1, 4, 3, 2, 2, generator=torch.Generator().manual_seed(1))
    picture = Image.fromarray(np.random.default_rng(2).integers(0, 255, (SIDE, SIDE, 3), dtype=np.uint8))
    arguments = {"image": picture} if task == "i2v" else {}
    (made,) = pipeline(
        prompt=["a red box"], negative_prompt=["grain"], height=SIDE, width=SIDE, num_frames=17, latents=start,
        num_inference_steps=4, guidance_scale=3.0, output_type="latent", return_dict=False, **arguments,
    )  # fmt: skip
    weights = {name: each.double() for name, each in stored(tmp_path / "model").items()}
    features = adapter.encode_text(pipeline, ["a red box", "grain"])
    assert [len(each["prompt_embeds"]) for each in features] == [len("a red box") + 2, len("grain") + 2]
    first = None
    if task == "i2v":
        pixels = torch.from_numpy(np.asarray(picture)).permute(2, 0, 1)[None, :, None] / 127.5 - 1
        first = encoders.vae.encode(pixels).latent_dist.mode()[0, :, 0].double()
    x, levels = start[0].double(), [13 * s / (1 + 12 * s) for s in (1.0, 0.75, 0.5, 0.25, 0.0)]
    for now, then in itertools.pairwise(levels):
        said = []
        for each in features:
            words, clip = each["prompt_embeds"].double(), each["clip_embeds"].double()
            said.append(
                reference.transformer_reference(weights, HEAD_DIM, x.transpose(0, 1), 1 - now, words, clip, first)
            )
        x = x + (now - then) * (said[1] + 3.0 * (said[0] - said[1])).transpose(0, 1)
    torch.testing.assert_close(made[0].double(), x, rtol=1e-4, atol=1e-4)
    if task == "t2v":
        several = partial(
            pipeline, prompt=["a red box", "a cup"], height=SIDE, width=SIDE, num_frames=17,
            latents=start.repeat(2, 1, 1, 1, 1), num_inference_steps=4, guidance_scale=3.0, output_type="latent",
            return_dict=False,
        )  # fmt: skip
        (alike,) = several(negative_prompt="grain")  # of all prompts
        torch.testing.assert_close(alike[0], made[0], rtol=1e-4, atol=1e-4)
        with pytest.raises(ValueError, match="3 texts for 2 prompts"):
            several(negative_prompt=["grain"] * 3)


LORA = ("training.lora.enable=true", "training.lora.rank=4")


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_adapters_go_on(task: str, tmp_path: Path) -> None:
    """A LoRA of two steps is that of one step, resumed."""
    yaml = make_run(tmp_path, task)
    train(yaml, tmp_path / "whole", *LORA)
    train(yaml, tmp_path / "parts", *LORA, "training.train_iters=1")
    train(yaml, tmp_path / "parts", *LORA)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert differing(tensors(tmp_path / "parts"), tensors(tmp_path / "whole")) == []


@pytest.mark.parametrize("task", [pytest.param("t2v"), pytest.param("i2v", marks=pytest.mark.slow)])
def test_adapters_train_and_are_applied(task: str, tmp_path: Path) -> None:
    """The export of a LoRA is applied, merged and drawn with."""
    yaml = make_run(tmp_path, task)
    train(yaml, tmp_path / "run", *LORA)
    for words in (("export", tmp_path / "run", tmp_path / "lora"),
                  ("merge", tmp_path / "model", tmp_path / "lora", "--out", tmp_path / "merged")):  # fmt: skip
        said = mm(*words)
        assert said.code == 0, said.err
    merged, before = stored(tmp_path / "merged"), stored(tmp_path / "model")
    changed = {
        name.partition(".")[2].partition(".")[2] for name in before if not torch.equal(before[name], merged[name])
    }
    assert merged.keys() == before.keys() and changed == {
        f"{layer}.weight" for layer in ("attn1.wqkv", "attn1.wo", "attn2.wq", "attn2.wkv", "attn2.wo")
    }
    assert "mm.infer(" in (tmp_path / "lora/README.md").read_text()
    picture = ("--image", tmp_path / "first.png") if task == "i2v" else ()
    if picture:
        from PIL import Image

        Image.new("RGB", (SIDE, SIDE), "red").save(tmp_path / "first.png")
    size = ("--size", f"{SIDE}x{SIDE}", "--frames", 17, "--steps", 2, "--prompt", "a red box", *picture)
    drawn = []
    for number, words in enumerate(((tmp_path / "model", "--lora", tmp_path / "lora"), (tmp_path / "merged",))):
        said = mm("infer", *words, *size, "--out", tmp_path / f"samples{number}")
        assert said.code == 0, said.err
        drawn.append(next((tmp_path / f"samples{number}").glob("*.mp4")))
    beside, merged_in = map(frames_of, drawn)
    assert beside.shape == (17, SIDE, SIDE, 3) and np.abs(beside - merged_in).mean() < 1


def frames_of(clip: Path) -> np.ndarray:
    with av.open(str(clip)) as opened:
        return np.stack([frame.to_ndarray(format="rgb24").astype(float) for frame in opened.decode(video=0)])


@pytest.mark.slow
def test_preference_pairs_train(tmp_path: Path) -> None:
    """Before anything is learned both sides are as far from the reference: ln 2."""
    yaml = make_run(tmp_path, "t2v")
    pairs = [{"file": f"clips/{n}.gif", "file_rejected": f"clips/{n + 1}.gif", "captions": "a"} for n in (0, 2)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    words = ("posttrain.method=dpo", "data.dataset_param.basic_parameters.stage=rm", "training.micro_batch_size=1")
    train(yaml, tmp_path / "run", *words)
    assert losses(tmp_path / "run")[1] == pytest.approx(math.log(2), rel=1e-5)
    assert losses(tmp_path / "run")[2] < math.log(2)


PLANS = {
    "fsdp": (2, ("training.micro_batch_size=1",)),
    "ulysses": (2, ("parallel.ulysses_parallel_size=2",)),
    "ring": (2, ("parallel.ring_attention_size=2",)),
    "tensor": (2, ("parallel.tensor_parallel_size=2",)),
    "pipeline": (
        2,
        ("parallel.pipeline_parallel_size=2", "training.micro_batch_size=1", "training.gradient_accumulation_steps=2"),
    ),
}


def steps_of(yaml: str, words: tuple[str, ...]) -> Any:
    with keeping_double():
        return train_steps(yaml, [*FP64, *words])


@pytest.mark.parametrize(
    ("plan", "task"),
    [("tensor", "i2v"), *[pytest.param(plan, task, marks=pytest.mark.slow) for plan in PLANS for task in TASKS]],
)
def test_a_plan_trains_like_one_process(plan: str, task: str, tmp_path: Path) -> None:
    yaml, (ranks, words) = str(make_run(tmp_path, task)), PLANS[plan]
    expected = steps_of(yaml, ())
    for found in run_ranks(ranks, steps_of, yaml, words):
        compare_steps(expected, found, 1e-6)


TENSOR = PLANS["tensor"][1]


def test_ranks_divide_what_makes_the_modulation_and_the_caption(tmp_path: Path) -> None:
    """Parameters around the blocks are a hundredth of the released model, and a forecast counts each rank's part."""
    yaml = make_run(tmp_path, "i2v")
    arguments = load_with_plugins(yaml, list(TENSOR)).arguments
    outline = build_outline(arguments)
    weights = dict(outline.model.named_parameters())
    whole = sum(tensor.nbytes for name, tensor in weights.items() if not is_divided(name))
    divided = sum(tensor.nbytes for name, tensor in weights.items() if is_divided(name))
    clips: dict[str, Any] = {"pixels": torch.empty(2, 3, 34, SIDE, SIDE, device="meta"), "captions": ["a", "b"]}
    clips |= {"sample_ids": ["0", "1"], "epochs": [0, 0], "fps": [25.0, 25.0]}
    predicted = forecast(arguments, clips, world_size=2)
    assert predicted.parameters == whole + divided // 2
    assert NOTE not in predicted.approximations and not predicted.misfit


def is_divided(name: str) -> bool:
    """Whether ranks have a part each: by the tensor-parallel layers of MindSpeed-MM's `step_video_dit.py`, and by the
    pairs of layers that make features of the caption, of times and of motion."""
    pairs = ("caption_projection", "adaln_single.emb.timestep_embedder", "adaln_single.emb.motion_score_embedder")
    if name.startswith(pairs):
        return not name.endswith("linear_2.bias")
    in_block = ("wqkv.weight", "wq.weight", "wkv.weight", "wo.weight", "proj.weight", "net.2.weight")
    return name.startswith("adaln_single.linear.") or (
        name.startswith("transformer_blocks.") and name.endswith(in_block)
    )


@pytest.mark.slow
def test_memory_of_tensor_ranks_is_as_forecast(tmp_path: Path) -> None:
    for predicted, found in run_ranks(2, memory_of_rank, str(make_run(tmp_path, "i2v"))):
        assert predicted == found


def memory_of_rank(yaml: str) -> tuple[tuple[int, int], tuple[int, int]]:
    """Bytes of parameters and of the optimizer's state: by the forecast, and held."""
    real = measured(Path(yaml), TENSOR)
    predicted = forecast(load_with_plugins(Path(yaml), TENSOR).arguments, real.batches[-1], world_size=2)
    return (predicted.parameters, predicted.optimizer), (real.parameter_bytes, real.state_bytes)


# --- what is refused --------------------------------------------------------------------------------------------------


def test_frames_come_in_groups_of_17(tmp_path: Path) -> None:
    make_tiny_stepvideo(tmp_path / "model")
    geometry = find_adapter(tmp_path / "model").geometry
    for frames, latents in ((1, 1), (17, 3), (34, 6), (204, 36)):
        shape = geometry.latent_shape(MediaSize(frames, SIDE, SIDE))
        assert shape == (4, latents, 2, 2) and geometry.frames(shape) == frames
    for frames, nearest in ((5, 1), (16, 17), (33, 34), (35, 34)):
        assert geometry.nearest(MediaSize(frames, SIDE, SIDE)).frames == nearest
        with pytest.raises(ConfigError, match=r"frames must be 1 or 17k"):
            geometry.check(MediaSize(frames, SIDE, SIDE))


def test_a_released_folder_says_how_it_becomes_one_that_encodes(tmp_path: Path) -> None:
    yaml = make_run(tmp_path, "t2v")
    index = {"_class_name": "StepVideoPipeline", "transformer": ["stepvideo.modules.model", "StepVideoModel"]}
    index |= {"scheduler": ["stepvideo.diffusion.scheduler", "FlowMatchDiscreteScheduler"]}
    (tmp_path / "model/model_index.json").write_text(json.dumps(index))
    said = mm("check", yaml)
    assert said.code != 0 and "mm-convert StepVideoConverter source_to_hf" in said.err + said.out


def test_a_folder_is_for_its_own_task(tmp_path: Path) -> None:
    make_tiny_stepvideo(tmp_path / "model")
    with pytest.raises(ConfigError, match=r"'i2v' is not what this transformer is for"):
        find_adapter(tmp_path / "model", task="i2v")
