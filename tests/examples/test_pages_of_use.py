"""docs/inference.md, docs/evaluation.md and docs/generation.md as a reader follows them: every command runs, with tiny
models at its paths.

The server's own example stands in tests/cli/test_serve.py, the section of a training YAML in
tests/fsdp/train/test_evaluation.py.
"""

from __future__ import annotations

import base64
import io
import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mindspeed_mm.tasks.answer.engine import AnswerEngine
from mindspeed_mm.tasks.answer.generation import load_generator, load_model
from tests.helpers import tiny_bagel, tiny_internvlu
from tests.helpers.family_templates import QWEN2_5_OMNI
from tests.helpers.runs import lines, mm, train
from tests.helpers.served import served
from tests.helpers.stub_harnesses import install_stubs
from tests.helpers.tiny_clip import make_tiny_clip
from tests.helpers.tiny_distillation import make_tiny_distillation
from tests.helpers.tiny_generators import make_tiny_wan
from tests.helpers.tiny_janus import make_tiny_janus
from tests.helpers.tiny_media import write_video
from tests.helpers.tiny_models import make_tiny_qwen3_vl
from tests.helpers.tiny_omni import make_tiny_omni
from tests.helpers.tiny_omni_talker import write_omni
from tests.helpers.tiny_run import make_rows, make_tiny_run
from tests.helpers.tiny_sounds import sound_bytes, tone
from tests.helpers.tiny_speech_codec import VOICE, write_speaker
from tests.tasks.test_evaluate_clips import install_vbench, make_tiny_dino, save_alexnet
from tests.tasks.test_evaluate_generated import make_pictures
from tests.tasks.test_evaluate_published import picture, write_tsv
from tests.tasks.test_evaluate_speech import make_subset
from tests.tasks.test_transcripts import make_whisper
from tests.test_readme import ROOT, commands

SERVER = "http://127.0.0.1:8000"


def commands_of(page: str) -> list[list[str]]:
    """The words of each command, without those that serve until they are stopped."""
    found = [shlex.split(command)[1:] for command in commands(ROOT / "docs" / page)]
    return [words for words in found if words[0] != "serve"]


def with_two_processes(words: list[str]) -> list[str]:
    """The page shares the work among eight."""
    return ["2" if before == "--nproc" else word for before, word in zip(["", *words], words, strict=False)]


def check(words: list[str]) -> None:
    said = mm(*with_two_processes(words))
    assert said.code == 0, (words, said.err)


def write_lines(path: Path, *rows: dict[str, object]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


# --- docs/inference.md ------------------------------------------------------------------------------------------------


def make_place_of_inference(place: Path, model: Callable[[Path], Path]) -> None:
    """What the page's first commands name."""
    model(place / "runs" / "mine")
    (place / "three.png").write_bytes(picture(7))
    write_lines(
        place / "questions.jsonl",
        {"prompt": "Which digit is this?", "images": ["three.png"]},
        {"prompt": "And what is one and one?"},
        {"messages": [{"role": "user", "content": "Say one word."}]},
    )


def make_adapters(model: Path, folder: Path) -> None:
    """As PEFT writes them."""
    import peft

    settings = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    peft.get_peft_model(load_model(model), settings).save_pretrained(folder)


def test_the_first_question_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_place_of_inference(tmp_path, make_tiny_qwen3_vl)
    monkeypatch.chdir(tmp_path)
    check(commands_of("inference.md")[0])


DRAWING = ("models/BAGEL-7B-MoT", "models/InternVL-U-one")
"""Folders whose published sizes of pictures are too much for tiny models."""


def make_places_of_drawing(place: Path) -> None:
    """Folders that read and draw, and rows for both."""
    (place / DRAWING[0]).mkdir(parents=True)
    tiny_bagel.make_tiny_bagel(place / DRAWING[0])
    made = tiny_internvlu.run_of(place / "made_internvlu")
    (place / DRAWING[1]).symlink_to(made.parent / "model")
    write_lines(place / "rows.jsonl", *lines(tiny_bagel.write_rows(place))[:2])  # one is drawn, one is read


@pytest.mark.slow
def test_every_command_of_inference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_place_of_inference(tmp_path, make_tiny_omni)
    (tmp_path / "runs" / "mine" / "chat_template.jinja").write_text(QWEN2_5_OMNI)
    write_video(tmp_path / "walk.mp4", range(0, 160, 20))
    (tmp_path / "steps.wav").write_bytes(sound_bytes(tone(0.4, 16000), 16000))
    make_tiny_qwen3_vl(tmp_path / "models" / "Qwen3-VL-2B-Instruct")
    make_tiny_qwen3_vl(tmp_path / "models" / "large", tie=False)
    write_omni(tmp_path / "models" / "Qwen3-Omni-30B-A3B-Instruct")
    make_tiny_janus(tmp_path / "models" / "Janus-Pro-1B")
    voices = {"spk_id": {"ryan": 70}, "codec_language_id": {"northern": 59}, "spk_is_dialect": {"ryan": False}}
    named = {"tts_model_type": "custom_voice", "talker_config": voices}
    write_speaker(tmp_path / "models" / "Qwen3-TTS-12Hz-1.7B-CustomVoice", **named)
    write_speaker(tmp_path / "models" / "Qwen3-TTS-12Hz-1.7B-Base", talker_config={"spk_id": None})
    (tmp_path / "voice.wav").write_bytes(VOICE)
    make_places_of_drawing(tmp_path)
    for name in ("terse", "kind"):
        make_adapters(tmp_path / "runs" / "mine", tmp_path / "exported" / name)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    followed = commands_of("inference.md")
    assert {words[0] for words in followed} == {"infer", "chat"} and len(followed) > 9
    with served(AnswerEngine(load_generator(tmp_path / "runs" / "mine"))) as address:
        for words in followed:
            monkeypatch.setattr("sys.stdin", io.StringIO("What is it?\n/exit\n"))  # of mm chat
            if "answers.jsonl" in words:
                (tmp_path / "answers.jsonl").unlink(missing_ok=True)  # or nothing would be left to answer
            if words[1] in DRAWING:
                words += ["--size", "8x16", "--steps", "2", *(["--max-new-tokens", "3"] if "--data" in words else [])]
            check([word.replace(SERVER, address) for word in words])
    assert (tmp_path / "heard.wav").stat().st_size > 44  # more than its header
    assert (tmp_path / "dog.png").is_file() and (tmp_path / "blue.png").is_file()
    assert sum("picture" in line for line in lines(tmp_path / "answers.jsonl")) == 1  # of the last folder's rows
    assert len(lines(tmp_path / "large.jsonl")) == len(lines(tmp_path / "named.jsonl")) == 3


# --- docs/evaluation.md -----------------------------------------------------------------------------------------------


def make_sets(place: Path) -> None:
    asked = {"question": "what?", "answer": "A", "A": "a cat", "B": "a dog", "l2-category": "animals"}
    image = base64.b64encode(picture(1)).decode()
    write_tsv(place / "MMBench_DEV_EN.tsv", [{"index": str(n), **asked, "image": image} for n in range(2)])
    published = {"questionId": 1, "question": "what?", "image": "a.png", "answers": ["a"]}
    (place / "sets" / "DocVQA").mkdir(parents=True)
    (place / "sets" / "DocVQA" / "a.png").write_bytes(picture(2))
    (place / "sets" / "DocVQA" / "val_v1.0_withQT.json").write_text(json.dumps({"data": [published]}))


def make_spoken(place: Path) -> None:
    subset = make_subset(place / "LibriSpeech" / "test-clean")
    sounds = [str(path.relative_to(place)) for path in sorted(subset.rglob("*.flac"))[:2]]
    heard = [{"role": "user", "content": "<audio>"}, {"role": "assistant", "content": "stuff it"}]
    write_lines(place / "spoken.jsonl", *({"messages": heard, "audios": [sound]} for sound in sounds))
    make_whisper(place / "models" / "whisper-small")
    (place / "runs" / "asr").symlink_to(place / "models" / "whisper-small")


def make_place_of_evaluation(place: Path, runs: tuple[str, ...]) -> None:
    for name in runs:
        yaml = make_tiny_run(place / "made" / name, training={"train_iters": 2, "save_interval": 2})
        train(yaml, place / "runs" / name)
    make_rows(place / "made", count=4).rename(place / "test.jsonl")
    (place / "images").symlink_to(place / "made" / "images")


def test_the_loss_of_rows_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_place_of_evaluation(tmp_path, ())
    make_tiny_qwen3_vl(tmp_path / "runs" / "mine")
    monkeypatch.chdir(tmp_path)
    check(next(words for words in commands_of("evaluation.md") if "--loss" in words))


def make_clips(place: Path) -> None:
    """Clips of a size that AlexNet takes, a DINO model, AlexNet without training, and a stand-in for VBench."""
    for name in ("drawn", "filmed"):
        (place / name).mkdir()
        write_video(place / name / "a.mp4", range(0, 80, 20), height=64, width=64)
    write_lines(place / "drawn" / "samples.jsonl", {"file": "a.mp4", "prompt": "a box"})
    make_tiny_dino(place / "models" / "dino-vitb16")
    save_alexnet(place / "alexnet-owt-7be5be79.pth")
    install_vbench(place / "envs" / "vbench")


@pytest.mark.slow
def test_every_command_of_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_place_of_evaluation(tmp_path, ("mine", "base"))
    (tmp_path / "runs" / "vqa").symlink_to(tmp_path / "runs" / "mine")
    make_tiny_qwen3_vl(tmp_path / "models" / "Qwen3-VL-2B-Instruct")
    make_tiny_qwen3_vl(tmp_path / "models" / "large", tie=False)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    make_tiny_clip(tmp_path / "models" / "clip-vit-large-patch14")
    make_sets(tmp_path)
    make_spoken(tmp_path)
    write_speaker(tmp_path / "models" / "Qwen3-TTS-12Hz-1.7B-Base", talker_config={"spk_id": None})
    (tmp_path / "voice.wav").write_bytes(VOICE)
    text = (ROOT / "docs" / "evaluation.md").read_text(encoding="utf-8")
    (spoken,) = re.findall(r'^{"id": "1", "text": .*}$', text, flags=re.MULTILINE)
    (tmp_path / "texts.jsonl").write_text(spoken + "\n")
    make_pictures(tmp_path / "samples", 4, 1)
    make_pictures(tmp_path / "real", 6, 2)
    for name, count in (("samples", 4), ("real", 6)):
        np.save(tmp_path / f"{name}_inception.npy", np.random.default_rng(count).normal(size=(count, 3)))
    monkeypatch.chdir(tmp_path)
    make_clips(tmp_path)
    for name in ("lmms", "vlmevalkit"):
        install_stubs(tmp_path / "envs" / name)
    followed = commands_of("evaluation.md")
    assert {words[0] for words in followed} == {"evaluate", "report"} and len(followed) > 8
    with served(AnswerEngine(load_generator(tmp_path / "models" / "Qwen3-VL-2B-Instruct"))) as address:
        for words in followed:
            check([word.replace(SERVER, address) for word in words])
    assert (tmp_path / "comparison.html").is_file()


# --- docs/generation.md -----------------------------------------------------------------------------------------------

SMALL = {"480x832": "32x32", "81": "5", "161": "9"}
"""Sizes of the page → those of the tiny Wan."""


def make_place_of_generation(place: Path) -> list[list[str]]:
    """The page's YAML with a tiny Wan and clips at its paths, two steps of it; returns the page's commands."""
    text = (ROOT / "docs" / "generation.md").read_text(encoding="utf-8")
    (yaml,) = re.findall(r"^```yaml\n(model:\n.*?runs/wan\}\n)```", text, flags=re.DOTALL | re.MULTILINE)
    for old, new in {"480": "32", "832": "32", "num_frames: 81": "num_frames: 5", "2000": "2"}.items():
        assert old in yaml
        yaml = yaml.replace(old, new)
    (place / "run.yaml").write_text(yaml)
    make_tiny_wan(place / "models" / "Wan2.1-T2V-1.3B-Diffusers")
    (place / "models" / "wan").symlink_to("Wan2.1-T2V-1.3B-Diffusers")
    (place / "clips").mkdir()
    captions = ("a cat on a piano", "rain on a window", "a red box", "two lines")
    for number, caption in enumerate(captions):
        write_video(place / "clips" / f"{number}.mp4", range(10 * number, 240, 20), height=32, width=32)
        with (place / "clips" / "rows.jsonl").open("a") as file:
            file.write(json.dumps({"path": f"{number}.mp4", "cap": caption}) + "\n")
    (place / "prompts.txt").write_text("a cat on a piano\nrain on a window\n")
    write_lines(place / "prompts.jsonl", {"prompt": "a red box", "seed": 3}, {"prompt": "two lines"})
    return [[SMALL.get(word, word) for word in words] for words in commands_of("generation.md")]


def of_trajectories(words: list[str]) -> bool:
    """Whether a command belongs to the fit of a student to its teacher's trajectories."""
    return "$ODE" in words or any("runs/init" in word for word in words)


def test_the_data_commands_of_generation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    followed = make_place_of_generation(tmp_path)
    monkeypatch.chdir(tmp_path)
    about_data = [words for words in followed if words[0] == "data"]
    assert [words[1] for words in about_data] == ["check", "stats", "preview"]
    for words in about_data:
        check(words)
    assert (tmp_path / "data.html").is_file()


@pytest.mark.slow
def test_every_command_of_generation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    followed = make_place_of_generation(tmp_path)
    monkeypatch.chdir(tmp_path)
    followed = [words for words in followed if not of_trajectories(words)]
    assert [words[0] for words in followed] == [
        "check", "data", "data", "data", "extract", "train", "infer", "export", "infer", "infer", "infer",
    ]  # fmt: skip
    lora = ("training.lora.enable=true", "parallel.fsdp_plan.param_dtype=fp32")
    for words in followed:
        if "exported/lora" in words:
            train("run.yaml", "runs/lora", *lora)
            assert mm("export", "runs/lora", "exported/lora").code == 0
        small = {"--steps": "2", "--size": "32x32", "--frames": "5"} if words[0] == "infer" else {}
        for option, value in small.items():  # what a command leaves to the pipeline is too much for the tiny Wan
            words += [] if option in words else [option, value]
        check(words)
    made = {name: len(list((tmp_path / name).glob("*.mp4"))) for name in ("cat", "samples", "adapted", "long")}
    assert made == {"cat": 1, "samples": 8, "adapted": 2, "long": 2}
    assert (tmp_path / "exported" / "wan" / "model_index.json").is_file()


@pytest.mark.slow
def test_every_command_of_a_fit_to_trajectories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "docs" / "generation.md").read_text(encoding="utf-8")
    (ode,) = re.findall(r'^ODE="(.*)"$', text, flags=re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    teacher = {"model_name_or_path": str(tmp_path / "model")}
    make_tiny_distillation(tmp_path, "t2v", posttrain={"reference": teacher}, training={"save": "runs/few"})
    followed = [words for words in commands_of("generation.md") if of_trajectories(words)]
    assert [words[0] for words in followed] == ["posttrain", "train", "export", "train"]
    for words in followed:
        whole = [each for word in words for each in (ode.split() if word == "$ODE" else [word])]
        check(["training.train_iters=2" if word == "training.train_iters=3000" else word for word in whole])
    assert (tmp_path / "runs" / "init_folder" / "model_index.json").is_file()
    assert len(lines(tmp_path / "runs" / "few" / "metrics.jsonl")) == 2
