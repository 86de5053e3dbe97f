"""`mm infer` of a generator: samples of folders, runs and adapters, the same on any number of ranks, continued where it
stopped; what does not fit is refused before anything is made."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from PIL import Image

from mindspeed_mm.cli import infer as cli
from mindspeed_mm.cli.sharing import rank_words
from mindspeed_mm.core.errors import ConfigError, DataError, MMError, ModelFolderError, StoppedAfterSave, UsageError
from mindspeed_mm.core.model_kinds import GENERATOR, LANGUAGE
from mindspeed_mm.fsdp.data.data_utils.decoding.video import ClipSampling, read_clip
from mindspeed_mm.fsdp.params.diffusion_args import SamplingArguments
from mindspeed_mm.fsdp.sampling.prompts import Prompt
from mindspeed_mm.fsdp.sampling.sampler import DiffusionSampler, MadeSample, SampleOrder
from mindspeed_mm.fsdp.train.run.stop_signal import StopSignal
from mindspeed_mm.tasks.draw import generate
from mindspeed_mm.tasks.draw.generate import GenerateRequest
from mindspeed_mm.tasks.draw.sample_folder import SampleFolder
from mindspeed_mm.tasks.export import export
from mindspeed_mm.tasks.model_kind import kind_of_path
from mindspeed_mm.tasks.requests.export import ExportRequest
from mindspeed_mm.tasks.requests.infer import InferRequest
from tests.helpers.distributed import run_ranks
from tests.helpers.runs import lines, mm, train
from tests.helpers.tiny_generator_run import make_tiny_generator_run
from tests.helpers.tiny_generators import make_tiny_flux, make_tiny_wan
from tests.helpers.tiny_models import make_tiny_qwen3

SETTINGS = {"num_inference_steps": 2, "height": 16, "width": 16}
OF_TRAINING = "not given, and taken as the run was trained: --size 16x16"
TEXTS = ("a cat", "", "a dog", "four five", "one")


@pytest.fixture(scope="module")
def flux(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_flux(tmp_path_factory.mktemp("flux"), identity_vae=True)


def request(*prompts: str, **settings: Any) -> GenerateRequest:
    return GenerateRequest(prompts=prompts or TEXTS, settings={**SETTINGS, "num_samples": 2, **settings})


def make(model: Path, out: Path, asked: GenerateRequest | None = None, **options: Any) -> generate.GenerateOutcome:
    outcome = generate.run(model, out, asked or request(), **options)
    assert outcome is not None
    return outcome


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


# --- what is made ----------------------------------------------------------------------------------------------------


def make_on_this_rank(model: str, out: str, batch_size: int) -> list[str]:
    made: list[str] = []
    real = SampleFolder.write

    def spy(self: SampleFolder, order: Any, frames: Any, rank: int) -> None:
        made.append(order.file_stem())
        real(self, order, frames, rank)

    with mock.patch.object(SampleFolder, "write", spy):
        generate.run(Path(model), Path(out), request(batch_size=batch_size))
    return made


def test_what_is_made_and_listed(flux: Path, tmp_path: Path) -> None:
    outcome = make(flux, tmp_path / "one", request(batch_size=3))
    assert (outcome.made, outcome.kept) == (10, 0)
    assert outcome.notes == ("1 prompt is empty (--prompt): sampled without a caption",)
    files = content(tmp_path / "one")
    manifest = lines(tmp_path / "one" / "manifest.jsonl")
    assert [entry["file"] for entry in manifest] == sorted(files)[:-1]
    assert [(entry["number"], entry["sample"]) for entry in manifest] == [(n, k) for n in range(5) for k in range(2)]
    assert [entry["prompt"] for entry in manifest[::2]] == list(TEXTS)
    assert manifest[0]["settings"]["num_inference_steps"] == 2
    assert (manifest[0]["height"], manifest[0]["width"], manifest[0]["frames"]) == (16, 16, 1)


@pytest.mark.slow
def test_two_ranks_make_the_same_files_as_one(flux: Path, tmp_path: Path) -> None:
    make(flux, tmp_path / "one", request(batch_size=3))
    shares = run_ranks(2, make_on_this_rank, str(flux), str(tmp_path / "two"), 3)
    assert sorted(map(len, shares)) == [4, 6]
    assert content(tmp_path / "two") == content(tmp_path / "one")


def test_a_run_is_sampled_with_its_own_settings(tmp_path: Path) -> None:
    yaml = make_tiny_generator_run(tmp_path)
    asked = ["prompts=[a red box, two blue lines]", "interval=6", "num_inference_steps=2"]  # no size
    train(yaml, tmp_path / "run", *(f"training.sampling.{word}" for word in asked))
    said = mm("infer", tmp_path / "run", "--out", tmp_path / "own", "--json")
    assert json.loads(said.out) == {"out": str(tmp_path / "own"), "made": 2, "kept": 0, "notes": [OF_TRAINING]}
    assert Image.open(tmp_path / "own" / "00000_00_a-red-box.png").size == (16, 16)
    while_training = content(tmp_path / "run" / "samples" / "iter_0000006")
    for name in ("000_00_a-red-box.png", "001_00_two-blue-lines.png"):
        assert content(tmp_path / "own")[f"00{name}"] == while_training[name]
    said = mm(
        "infer", tmp_path / "model", "--prompt=a red box", "--out", tmp_path / "base", "--steps=2", "--size=16x16"
    )
    assert said.out == f"{tmp_path / 'base'}: 1 sample made\n"
    assert content(tmp_path / "base")["00000_00_a-red-box.png"] != while_training["000_00_a-red-box.png"]
    assert mm("infer", tmp_path / "run" / "iter_0000006", "--out", tmp_path / "own", "--steps=3").code == 4
    with pytest.raises(UsageError, match="no prompts"):
        generate.run(tmp_path / "model", tmp_path / "none", GenerateRequest())


def test_adapters_of_a_run_and_beside_a_folder(tmp_path: Path) -> None:
    yaml = make_tiny_generator_run(tmp_path)
    train(yaml, tmp_path / "run", "training.lora.enable=true", "training.lora.rank=4", "training.lr=0.1")
    export.run(ExportRequest(tmp_path / "run", tmp_path / "lora"))
    asked = request("a cat")
    make(tmp_path / "run", tmp_path / "of run", asked)
    beside = GenerateRequest(asked.prompts, settings=asked.settings, lora=tmp_path / "lora")
    make(tmp_path / "model", tmp_path / "beside", beside)
    make(tmp_path / "model", tmp_path / "without", asked)
    name = "00000_00_a-cat.png"
    assert content(tmp_path / "of run")[name] == content(tmp_path / "beside")[name]
    assert content(tmp_path / "without")[name] != content(tmp_path / "beside")[name]
    with pytest.raises(UsageError, match="already has adapters"):
        make(tmp_path / "run", tmp_path / "x", beside)
    other = make_tiny_flux(tmp_path / "other", num_layers=0)
    with pytest.raises(ModelFolderError, match=r"no layer transformer_blocks\.0.*others"):
        make(other, tmp_path / "x", beside)


def test_clips_go_on_from_a_picture(tmp_path: Path) -> None:
    model = make_tiny_wan(tmp_path / "wan", task="i2v")
    for name, colour in (("a.png", "red"), ("b.png", "blue")):
        Image.new("RGB", (24, 16), colour).save(tmp_path / name)
    (tmp_path / "p.jsonl").write_text('{"prompt": "cat", "image": "a.png"}\n{"prompt": "cat", "image": "b.png"}\n')
    asked = GenerateRequest(
        ("cat",),
        tmp_path / "p.jsonl",
        media={"image": tmp_path / "a.png"},
        settings={**SETTINGS, "num_frames": 5, "batch_size": 3},
    )
    assert make(model, tmp_path / "out", asked).made == 3
    clips = []
    for number in range(3):
        with (tmp_path / "out" / f"0000{number}_00_cat.mp4").open("rb") as file:
            clips.append(read_clip(file, 5, ClipSampling(), np.asarray))
    assert clips[0].shape == (3, 5, 16, 16)
    assert not np.array_equal(clips[1], clips[2])
    with pytest.raises(DataError, match=r"--prompt.*no picture"):
        make(model, tmp_path / "none", request("cat"))
    (tmp_path / "a.png").write_bytes((tmp_path / "a.png").read_bytes()[:40])
    with pytest.raises(DataError, match=r"--image.*'a.png' is (broken|not an image)"):
        make(model, tmp_path / "none", asked)
    assert not (tmp_path / "none").exists()


def test_ten_thousand_prompts_are_all_used(flux: Path, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("".join(f"prompt {number}\n" for number in range(9_999)) + "\n")
    asked = GenerateRequest(prompts_file=tmp_path / "p.txt", settings={**SETTINGS, "batch_size": 100})
    made = []
    with (
        mock.patch.object(
            DiffusionSampler, "make", lambda self, batch, sampling: [np.zeros((1, 4, 4, 3))] * len(batch)
        ),
        mock.patch.object(SampleFolder, "write", lambda self, order, frames, rank: made.append(order.prompt)),
    ):
        outcome = make(flux, tmp_path / "out", asked)
    assert [prompt.number for prompt in made] == list(range(10_000))
    assert (outcome.made, made[-1].text) == (10_000, "")
    assert outcome.notes[0] == "1 prompt is empty (p.txt:10000): sampled without a caption"


# --- what is there already -------------------------------------------------------------------------------------------


def test_work_goes_on_where_it_stopped(flux: Path, tmp_path: Path) -> None:
    asked, out = request(batch_size=2), tmp_path / "out"
    make(flux, out, asked)
    whole = content(out)
    times = {name: (out / name).stat().st_mtime_ns for name in whole}

    manifest = (out / "manifest.jsonl").read_text().splitlines(keepends=True)
    (out / "manifest.jsonl").write_text("".join(manifest[:6]) + manifest[6][:50])  # killed while a line was written
    (out / "manifest.rank1.jsonl").write_text("".join(manifest[8:]))  # and another rank had come further
    (out / "00001_00_empty.png").unlink()
    (out / "00002_01_a-dog.png").write_bytes(whole["00002_01_a-dog.png"][:-1] + b"\0")
    outcome = make(flux, out, asked)
    assert (outcome.made, outcome.kept) == (4, 6)
    assert content(out) == whole
    made = {name for name in whole if (out / name).stat().st_mtime_ns != times[name]} - {"manifest.jsonl"}
    assert made == {
        "00001_00_empty.png", "00002_01_a-dog.png", "00003_00_four-five.png", "00003_01_four-five.png"
    }  # fmt: skip
    with mock.patch.object(generate, "load_sampler", side_effect=AssertionError("nothing is to be made")):
        assert make(flux, out, asked).kept == 10
    assert make(flux, out, request(*TEXTS, "six", batch_size=2)).made == 2  # prompts may be added


def test_a_sample_that_another_rank_makes_anew_replaces_its_line(tmp_path: Path) -> None:
    folder = SampleFolder(tmp_path, "model", SamplingArguments())
    order = SampleOrder(Prompt(0, "a\u2028cat", "--prompt"), 0)
    for rank, level in enumerate((10, 200)):
        assert folder.begin([order], overwrite=False) == set()
        folder.write(order, MadeSample(np.full((1, 16, 16, 3), level, dtype=np.uint8)), rank)
        folder.finish()
        assert folder.begin([order], overwrite=False) == {(0, 0)}
        (image,) = tmp_path.glob("*.png")
        image.write_bytes(b"damaged")


def test_a_stop_keeps_what_was_made(flux: Path, tmp_path: Path) -> None:
    polled = iter([False, False, True])
    with (
        mock.patch.object(StopSignal, "requested", property(lambda self: next(polled))),
        pytest.raises(StoppedAfterSave, match="Run the same command again"),
    ):
        make(flux, tmp_path / "out", request(batch_size=2))
    assert make(flux, tmp_path / "out", request(batch_size=2)).kept == 4


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (request("a cat", num_inference_steps=3), "num_inference_steps 2, not 3"),
        (request("a cat", seed=1), "seed 42, not 1"),
        (request("a cow"), "'00000_00_a-cat.png' shows 'a cat', which was not requested for it"),
        (request("a cat", num_samples=1), "'00000_01_a-cat.png' shows"),
    ],
)  # fmt: skip
def test_samples_of_something_else_are_not_continued(
    flux: Path, tmp_path: Path, asked: GenerateRequest, message: str
) -> None:
    make(flux, tmp_path / "out", request("a cat"))
    (tmp_path / "out" / "mine.txt").write_text("kept")
    before = content(tmp_path / "out")
    with pytest.raises(DataError, match=message):
        make(flux, tmp_path / "out", asked)
    assert content(tmp_path / "out") == before
    assert make(flux, tmp_path / "out", asked, overwrite=True).kept == 0
    after = content(tmp_path / "out")
    assert set(after) == {
        "mine.txt",
        "manifest.jsonl",
        *(e["file"] for e in lines(tmp_path / "out" / "manifest.jsonl")),
    }


def test_another_model_is_told(flux: Path, tmp_path: Path) -> None:
    make(flux, tmp_path / "out", request("a cat"))
    other = make_tiny_flux(tmp_path / "other", identity_vae=True, seed=5)
    with pytest.raises(DataError, match="another model"):
        make(other, tmp_path / "out", request("a cat"))
    (tmp_path / "out" / "manifest.jsonl").write_text('{"file": "../../etc/passwd"}\n')
    with pytest.raises(DataError, match="not written by mm infer"):
        make(flux, tmp_path / "out", request("a cat"))


# --- what does not fit -----------------------------------------------------------------------------------------------


def without_weights(copy: Path) -> None:
    (copy / "transformer" / "diffusion_pytorch_model.safetensors").unlink()


def pointer(copy: Path) -> None:
    path = copy / "transformer" / "diffusion_pytorch_model.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")


def other_weights(copy: Path) -> None:
    other = make_tiny_flux(copy.parent / "other", identity_vae=True, num_layers=2)
    name = "transformer/diffusion_pytorch_model.safetensors"
    shutil.copyfile(other / name, copy / name)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (without_weights, "transformer.*safetensors"),
        (pointer, "Git LFS pointer"),
        (other_weights, "unexpected.*transformer_blocks.1"),
    ],
)
def test_a_bad_folder_is_named(flux: Path, tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    damage(Path(shutil.copytree(flux, tmp_path / "copy")))
    with pytest.raises(ModelFolderError, match=message):
        make(tmp_path / "copy", tmp_path / "out")


@pytest.mark.parametrize(
    ("asked", "error", "message"),
    [
        (request(height=15), ConfigError, "--size.*15×16 cannot be encoded.*Use 14×16"),
        (request(num_frames=5), ConfigError, r"--frames  5 frames cannot be encoded: images have one frame\. Use 1\."),
        (GenerateRequest(prompts_file=Path("gone.txt")), DataError, "gone.txt.*no such file"),
        (GenerateRequest(("a",), media={"image": Path("gone.png")}), DataError, "--image.*'gone.png' not found"),
    ],
)  # fmt: skip
def test_nothing_is_made_of_a_bad_request(
    flux: Path, tmp_path: Path, asked: GenerateRequest, error: type[MMError], message: str
) -> None:
    with pytest.raises(error, match=message):
        make(flux, tmp_path / "out", asked)
    assert not (tmp_path / "out").exists()


def test_guidance_that_cannot_be_is_refused(tmp_path: Path) -> None:
    dev = make_tiny_flux(tmp_path / "dev", guidance_embeds=True)
    with pytest.raises(ConfigError, match="no effect"):
        make(dev, tmp_path / "out", request(negative_prompt="blur"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--prompt", "a"], "--out.*samples need an output folder"),
        (["--data", "q.jsonl", "--out", "o"], "--data.*is for language models"),
        (["--prompt", "a", "--out", "o", "--max-new-tokens", "512"], "--max-new-tokens.*is for language models"),
        (["--prompt", "a", "--out", "o", "--size", "480"], "'480' is not a size.*--size 480x832"),
        (["--prompt", "a", "--out", "o", "--size", "0x16"], "'0x16' is not a size"),
        (["--prompt", "a", "--out", "o", "--guidance-scale", "nan"], "--guidance-scale.*nan is not a number"),
        (["--prompts", "p", "--out", "o", "--image", "a.png"], "--image can only be used with --prompt"),
        (["--prompt", "a", "--video", "a", "--video", "b", "--out", "o"], "one video"),
        (["--prompt", "a", "--out", "o", "--steps", "0"], "--steps.*0 is not in the range"),
    ],
)  # fmt: skip
def test_the_command_line_of_a_generator(flux: Path, words: list[str], message: str) -> None:
    said = mm("infer", flux, *words)
    assert said.code == 2
    assert re.search(message, said.err), said.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--prompt", "a", "--steps", "3"], "--steps  is for image and video generators, but this model is a language"),
        (["--prompt", "a", "--adapter", "b=c"], "--adapter  only rows of --data choose among adapters"),
        (["--prompt", "a", "--nproc", "2"], "--nproc  one question is answered by one process"),
        (["--prompts", "p.txt"], "--prompts  is for image"),
        (["--prompt", "a", "--prompt", "b"], "answers one --prompt"),
    ],
)  # fmt: skip
def test_the_command_line_of_a_language_model(tmp_path: Path, words: list[str], message: str) -> None:
    said = mm("infer", make_tiny_qwen3(tmp_path / "text"), *words)
    assert said.code == 2
    assert message in said.err


def test_ranks_get_the_same_command_line() -> None:
    given = [
        "a folder",
        "--prompt",
        "-a cat",
        "--prompt",
        "",
        "--size",
        "16x16",
        "--json",
        "--nproc",
        "3",
        "--fps",
        "8",
    ]
    seen = []

    def note(request: InferRequest) -> int:
        seen.append((replace(request, nproc=1), rank_words(request)))
        return 0

    with (
        mock.patch.dict(cli.COMMANDS, {GENERATOR: note}),
        mock.patch("mindspeed_mm.tasks.model_kind.kind_of_path", lambda _: GENERATOR),
    ):
        assert mm("infer", *given).code == 0
        assert mm("infer", *seen[0][1]).code == 0
    assert seen[0] == seen[1]
    assert seen[0][0].prompts == ("-a cat", "")
    assert not any("nproc" in word for word in seen[0][1])


def test_what_a_folder_is_for(flux: Path, tmp_path: Path) -> None:
    assert kind_of_path(flux) is GENERATOR
    assert kind_of_path(tmp_path) is LANGUAGE
    assert kind_of_path(tmp_path / "gone") is LANGUAGE
    (tmp_path / "iter_0000001").mkdir()
    (tmp_path / "run.json").write_text(json.dumps({"model_name_or_path": str(flux)}))
    assert kind_of_path(tmp_path) is GENERATOR
    assert kind_of_path(tmp_path / "iter_0000001") is GENERATOR
    (tmp_path / "run.json").write_text("[")
    assert kind_of_path(tmp_path) is LANGUAGE


@pytest.mark.slow
def test_the_command_starts_its_ranks(flux: Path, tmp_path: Path) -> None:
    words = ["--prompt=a cat", "--prompt=a dog", "--steps=2", "--size=16x16"]
    assert mm("infer", flux, *words, "--out", tmp_path / "one").code == 0
    assert mm("infer", flux, *words, "--out", tmp_path / "two", "--nproc", 2).code == 0
    assert content(tmp_path / "one") == content(tmp_path / "two")
    said = mm("infer", flux, *words, "--out", tmp_path / "two", "--nproc", 2, "--steps", 3)
    assert said.code == 4
