"""Runs of InternVL-U by the commands: converted, trained, saved, resumed, exported, asked, and written back in the
released layout; its VAE; released names."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLQwenImage
from PIL import Image
from safetensors.torch import load_file

from mindspeed_mm.cli.mm_convert import run as convert
from mindspeed_mm.core.errors import CheckpointError
from mindspeed_mm.core.seeds import derive_seed
from mindspeed_mm.fsdp.data.data_utils.sample import MediaItem, RowLocation, Sample
from mindspeed_mm.fsdp.models.diffusion.picture_vae import PictureVAE
from mindspeed_mm.fsdp.models.internvlu.configuration_internvlu import InternVLUConfig
from mindspeed_mm.fsdp.models.internvlu.modeling_internvlu import InternVLUForConditionalGeneration
from mindspeed_mm.fsdp.params.data_args import PreprocessParameters
from mindspeed_mm.fsdp.sampling.internvlu import load_internvlu
from tests.helpers.runs import differing, mm, newest, tensors, train
from tests.helpers.tiny_internvlu import CHANNELS, DOWNSAMPLE, head_shapes, run_of, vlm_shapes

PARTS = ("vlm", "generation_decoder")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A YAML with its model and rows."""
    return run_of(tmp_path_factory.mktemp("internvlu"))


def drawn(folder: Path, out: Path, *words: object) -> np.ndarray:
    said = mm("infer", folder, "--prompt", "Draw.", "--draw", out, "--size", "8x16", "--steps", 2, *words)
    assert said.code == 0, said.err
    return np.asarray(Image.open(out))


def released_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Of both parts, behind their names."""
    found: dict[str, torch.Tensor] = {}
    for part in PARTS:
        found |= {f"{part}.{name}": each for name, each in load_file(folder / part / "model.safetensors").items()}
    return found


@pytest.mark.slow
def test_a_run_resumes_to_the_bit_and_goes_back_to_the_released_layout(run: Path, tmp_path: Path) -> None:
    """What draws alone is trained, as the paper's first stages do; the exported folder draws like the run, and its
    released layout has the names, shapes and other files of the released folder."""
    words = ["model.freeze=[vlm.vision_model, vlm.mlp1, vlm.language_model, vlm.special_token_embedding]"]
    train(run, tmp_path / "whole", *words)
    train(run, tmp_path / "broken", *words, "training.train_iters=1")
    train(run, tmp_path / "broken", *words)
    assert newest(tmp_path / "broken") == 2
    assert differing(tensors(tmp_path / "whole"), tensors(tmp_path / "broken")) == []
    said = mm("export", tmp_path / "broken", tmp_path / "one")
    assert said.code == 0, said.err
    released = run.parent / "released"
    convert(["InternVLUConverter", "mm_to_hf", f"--cfg.source_path={tmp_path / 'one'}", f"--cfg.hf_dir={released}",
             f"--cfg.target_path={tmp_path / 'hf'}"])  # fmt: skip
    before, after = released_weights(released), released_weights(tmp_path / "hf")
    assert {name: each.shape for name, each in before.items()} == {name: each.shape for name, each in after.items()}
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert "generation_decoder.decoder.proj_out.weight" in changed
    assert all(name.startswith("generation_decoder.decoder.") for name in changed)
    others = [path.relative_to(released) for path in released.rglob("*") if path.is_file()]
    for path in others:
        same = (released / path).read_bytes() == (tmp_path / "hf" / path).read_bytes()
        assert same or path.name == "model.safetensors", path
    whole = drawn(tmp_path / "one", tmp_path / "a.png")
    assert whole.shape == (8, 16, 3)
    assert np.array_equal(whole, drawn(tmp_path / "broken", tmp_path / "b.png"))
    assert not np.array_equal(whole, drawn(run.parent / "model", tmp_path / "c.png"))
    picture = run.parent / "rows" / "1.png"
    edited = mm("infer", tmp_path / "broken", "--image", picture, "--prompt", "Turn.", "--draw", tmp_path / "d.png",
                "--steps", 2, "--json")  # fmt: skip
    assert edited.code == 0 and json.loads(edited.out)["width"] == 16, edited.err  # as large as what is edited
    said = mm("infer", tmp_path / "one", "--image", picture, "--prompt", "Which?", "--max-new-tokens", 3, "--json")
    assert said.code == 0 and set(json.loads(said.out)) == {"text", "finished"}, said.err


def test_adapters_of_what_draws_leave_the_rest_alone(run: Path, tmp_path: Path) -> None:
    words = ["training.lora.enable=true", "training.lora.rank=2", "training.lr=0.05",
             "training.lora.target_modules=[to_q, add_k_proj, to_out.0]"]  # fmt: skip
    train(run, tmp_path / "run", *words)
    said = mm("export", tmp_path / "run", tmp_path / "merged", "--merge")
    assert said.code == 0, said.err
    before = released_weights(run.parent / "released")
    after = load_file(tmp_path / "merged" / "model.safetensors")
    assert before.keys() == after.keys()
    changed = {
        name.split("transformer_blocks.")[-1][2:] for name in before if not torch.equal(before[name], after[name])
    }
    assert changed == {f"attn.{name}.weight" for name in ("to_q", "add_k_proj", "to_out.0")}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["parallel.tensor_parallel_size=2"], "not built for models that answer and draw"),
        (["parallel.pipeline_parallel_size=2", "training.gradient_accumulation_steps=2"], "cannot be cut into stages"),
        (["parallel.ulysses_parallel_size=2"], "no decoder whose attention"),
        (["parallel.ring_attention_size=2"], "no decoder whose attention"),
        (["data.dataset_param.preprocess_parameters.vae_min_pixels=0"], "is not a size in pixels"),
        (["data.dataset_param.basic_parameters.text_cond_dropout_prob=0.6",
          "data.dataset_param.basic_parameters.all_cond_dropout_prob=0.6"], "are more than all rows"),
    ],
)  # fmt: skip
def test_what_it_cannot_do_is_refused(run: Path, words: list[str], says: str) -> None:
    said = mm("check", run, *words, "--nproc", 2)
    assert said.code != 0 and says in said.out + said.err and "Traceback" not in said.err, said.out + said.err


def test_the_released_folder_itself_leads_to_the_converter(run: Path, tmp_path: Path) -> None:
    said = mm("check", run, f"model.model_name_or_path={run.parent / 'released'}")
    assert said.code != 0 and "mm-convert InternVLUConverter hf_to_mm" in said.out + said.err, said.out + said.err
    with pytest.raises(CheckpointError, match="InternVLUPipeline is expected"):
        convert(["InternVLUConverter", "hf_to_mm", f"--cfg.source_path={run.parent / 'model'}",
                 f"--cfg.target_path={tmp_path / 'out'}"])  # fmt: skip


def test_its_vae_is_one_of_clips_of_one_frame(run: Path) -> None:
    """Latents of diffusers' own class, brought to mean 0 and variance 1 by channel; the likeliest, and drawn ones."""
    folder = run.parent / "model"
    vae = PictureVAE(folder, CHANNELS, DOWNSAMPLE, torch.device("cpu"), torch.float64)
    pixels = torch.randint(0, 256, (3, 8, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    plain: Any = AutoencoderKLQwenImage.from_pretrained(folder / "vae").double()
    mean, std = (torch.tensor(each, dtype=torch.float64).view(4, 1, 1) for each in
                 ([0.1, -0.2, 0.3, 0.0], [1.5, 2.0, 0.5, 1.0]))  # fmt: skip
    with torch.no_grad():
        posterior = plain.encode(pixels.double()[None, :, None] / 127.5 - 1).latent_dist
        torch.testing.assert_close(vae.encode(pixels, None), (posterior.mean[0, :, 0] - mean) / std)
        noise = torch.randn(1, 4, 2, 4, generator=torch.Generator().manual_seed(9), dtype=torch.float64)[0]
        expected = (posterior.mean[0, :, 0] + posterior.std[0, :, 0] * noise - mean) / std
        torch.testing.assert_close(vae.encode(pixels, 9), expected)
        shown = plain.decode((expected * std + mean)[None, :, None]).sample[0, :, 0] / 2 + 0.5
    difference = vae.decode(expected).int() - (shown.clamp(0, 1) * 255).int()
    assert difference.abs().max() <= 1


def test_names_and_shapes_are_the_released_ones() -> None:
    """The tower's are transformers', with one tensor of queries, keys and values in the release: 658 tensors of `vlm`
    and 654 of `generation_decoder`, as many as its files have."""
    record = json.loads((Path(__file__).parents[2] / "released" / "internvl-u.json").read_text(encoding="utf-8"))
    layout = {(each["key"], tuple(each["shape"])): each["n"] for each in record["layout"]}
    assert record["tensors"] == {"vlm": 658, "generation_decoder": 654} and sum(layout.values()) == 1312
    config = record["config"]
    written = {f"vlm.{name}": shape for name, shape in vlm_shapes(config).items()}
    head = config["generation_decoder_config"]
    written |= {f"generation_decoder.{name}": shape for name, shape in head_shapes(head).items()}
    assert numbered(written) == layout
    with torch.device("meta"):
        model = InternVLUForConditionalGeneration(InternVLUConfig.from_dict(config))
    own = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    language = {name: shape for name, shape in written.items() if not name.startswith("vlm.vision_model.")}
    assert {name: shape for name, shape in own.items() if not name.startswith("vlm.vision_model.")} == language
    seen = sum(int(np.prod(shape)) for name, shape in written.items() if name.startswith("vlm.vision_model."))
    assert seen == sum(parameter.numel() for parameter in model.vlm.vision_model.parameters())
    assert 4.1e9 < sum(parameter.numel() for parameter in model.parameters()) < 4.3e9


def numbered(shapes: dict[str, tuple[int, ...]]) -> dict[tuple[str, tuple[int, ...]], int]:
    """(name with N for the number of a layer, shape) → how many there are."""
    found: dict[tuple[str, tuple[int, ...]], int] = {}
    for name, shape in shapes.items():
        key = (re.sub(r"(layers|transformer_blocks)\.\d+\.", r"\1.N.", name), shape)
        found[key] = found.get(key, 0) + 1
    return found


def test_rows_are_asked_in_turns_as_training_shows_them(run: Path) -> None:
    """A row keeps its system prompt, its earlier answers, and the places of its pictures among the words."""

    def text(said: str) -> dict[str, str]:
        return {"type": "text", "text": said}

    sampler = load_internvlu(run.parent / "model", PreprocessParameters(), torch.device("cpu"))
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello."},
        {"role": "assistant", "content": "Yes."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "Is "}, {"type": "image"}, {"type": "text", "text": "?"}],
        },
        {"role": "assistant", "content": "."},
    ]
    sample = Sample(RowLocation("rows", 1), messages, [0.0, 0.0, 1.0, 0.0, 1.0], [MediaItem("image", "a.png")])
    context, size = sampler.read_row(sample, lambda _source: Image.new("RGB", (8, 8)))
    assert context.system == "Be brief." and context.earlier == [(["Hello."], "Yes.")]
    assert context.pieces == ["Is ", None, "?"] and len(context.pictures) == 1 and size is not None


def test_rows_are_answered_as_single_prompts_are(run: Path, tmp_path: Path) -> None:
    """Words and pictures of `--data` equal those of single calls with the row's seed."""
    model, rows = run.parent / "model", run.parent / "rows"
    data, words = rows / "asked.jsonl", ("--max-new-tokens", 4, "--steps", 2)
    asked = [("<image>Which?", "three", ["3.png"]), ("<image>turn it", "<image>", ["0.png", "2.png"])]
    lines = [
        json.dumps({"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}],
                    "images": images}) + "\n"
        for question, answer, images in asked
    ]  # fmt: skip
    data.write_text("".join(lines))
    said = mm("infer", model, "--data", data, "--out", tmp_path / "a.jsonl", "--size", "8x16", *words)
    assert said.code == 0, said.err
    single = mm("infer", model, "--image", rows / "3.png", "--prompt", "Which?", "--max-new-tokens", 4, "--json")
    answers = [json.loads(line)["answer"] for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert single.code == 0 and answers[0] == json.loads(single.out)["text"]
    seed = derive_seed(0, 2) >> 1
    mine = ("--image", rows / "0.png", "--prompt", "turn it", "--draw", tmp_path / "b.png", "--size", "8x16")
    said = mm("infer", model, *mine, "--steps", 2, "--seed", seed)
    assert said.code == 0, said.err
    together, alone = (np.asarray(Image.open(path)) for path in (tmp_path / "a" / "00002.png", tmp_path / "b.png"))
    assert np.array_equal(together, alone)
