"""`mm infer` takes pictures, videos and sounds, as options, in rows and from Python; answers are transformers' own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import soundfile
import torch
from PIL import Image

import mindspeed_mm
from mindspeed_mm.core.errors import UsageError
from tests.helpers.family_templates import QWEN2_5_OMNI
from tests.helpers.runs import mm
from tests.helpers.tiny_media import write_video
from tests.helpers.tiny_models import make_tiny_qwen3_vl
from tests.helpers.tiny_omni import make_tiny_omni
from tests.helpers.tiny_sounds import sound_bytes, tone

mindspeed_mm.ensure_torchvision()

from transformers import AutoProcessor, Qwen2_5OmniThinkerForConditionalGeneration  # noqa: E402

TOKENS = 6
ASKED = ("--max-new-tokens", TOKENS, "--json")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that hears and sees, whose answers depend on what it is shown, and one medium of each kind."""
    folder = tmp_path_factory.mktemp("omni")
    make_tiny_omni(folder / "model", initializer_range=0.4)
    (folder / "model" / "chat_template.jinja").write_text(QWEN2_5_OMNI)
    Image.linear_gradient("L").resize((32, 32)).convert("RGB").save(folder / "a.png")
    (folder / "a.wav").write_bytes(sound_bytes(tone(0.4, 16000), 16000))
    write_video(folder / "a.mp4", range(0, 240, 24))
    return folder


def asked(folder: Path, *words: object) -> list[int]:
    said = mm("infer", folder / "model", *words, *ASKED)
    assert said.code == 0, said.err
    return list(json.loads(said.out)["token_ids"])


def plain(folder: Path, parts: list[dict[str, str]], images: list[Path], sounds: list[Path]) -> list[int]:
    """Of transformers alone, given the same media."""
    processor = AutoProcessor.from_pretrained(folder / "model")
    model = Qwen2_5OmniThinkerForConditionalGeneration.from_pretrained(folder / "model", dtype="auto").eval()
    text = processor.apply_chat_template([{"role": "user", "content": parts}], add_generation_prompt=True)
    heard = [soundfile.read(path, dtype="float32")[0] for path in sounds]
    pictures = [Image.open(path).convert("RGB") for path in images]
    inputs = processor(
        text=text, images=pictures or None, audio=heard or None, return_tensors="pt", add_special_tokens=False
    )
    with torch.inference_mode():
        made = model.generate(**inputs, max_new_tokens=TOKENS, do_sample=False)
    return list(made[0, inputs["input_ids"].shape[1] :].tolist())


def test_a_picture_and_a_sound_are_answered_as_transformers_answers(folder: Path) -> None:
    given = asked(folder, "--image", folder / "a.png", "--audio", folder / "a.wav", "--prompt", "What is it?")
    parts = [{"type": "image"}, {"type": "audio"}, {"type": "text", "text": "What is it?"}]
    assert given == plain(folder, parts, [folder / "a.png"], [folder / "a.wav"])


def test_a_sound_needs_no_prompt(folder: Path) -> None:
    assert asked(folder, "--audio", folder / "a.wav") == plain(folder, [{"type": "audio"}], [], [folder / "a.wav"])


def test_options_rows_and_python_show_the_same(folder: Path, tmp_path: Path) -> None:
    given = mm(
        "infer", folder / "model", "--video", folder / "a.mp4", "--audio", folder / "a.wav", "--prompt", "Well?", *ASKED
    )
    answer = json.loads(given.out)
    assert answer["token_ids"] != asked(folder, "--prompt", "Well?")
    row = {"prompt": "Well?", "video": "a.mp4", "audio": ["a.wav"]}
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n")
    out = tmp_path / "answers.jsonl"
    assert mm("infer", folder / "model", "--data", folder / "rows.jsonl", "--out", out, *ASKED).code == 0
    assert json.loads(out.read_text())["answer"] == answer["text"]
    in_python = mindspeed_mm.infer(
        folder / "model", "Well?", videos=[folder / "a.mp4"], audios=folder / "a.wav", max_new_tokens=TOKENS
    )
    assert list(in_python.token_ids) == answer["token_ids"]


def test_a_medium_that_the_model_does_not_take_is_named(folder: Path, tmp_path: Path) -> None:
    make_tiny_qwen3_vl(tmp_path / "model")
    said = mm("infer", tmp_path / "model", "--audio", folder / "a.wav", "--prompt", "What is it?")
    assert said.code == 4
    assert "audio" in said.err and "Traceback" not in said.err


@pytest.mark.parametrize("kind", ["image", "video", "audio"])
def test_media_go_with_a_prompt_and_not_with_rows(folder: Path, kind: str) -> None:
    said = mm("infer", folder / "model", "--data", "rows.jsonl", "--out", "out.jsonl", f"--{kind}", "a")
    assert said.code == 2
    assert f"--{kind} can only be used with --prompt" in said.err
    with pytest.raises(UsageError, match="go with a prompt"):
        mindspeed_mm.infer(folder / "model", rows=[{"prompt": "?"}], **{f"{kind}s": ["a"]})  # type: ignore[arg-type]


@pytest.mark.edge("BS14")
@pytest.mark.parametrize("words", [["--out", "a.jsonl"], ["--overwrite"], ["--media-dir", "."], ["--batch-size", "2"]])
def test_options_of_rows_are_refused_with_a_prompt(folder: Path, words: list[str]) -> None:
    said = mm("infer", folder / "model", "--prompt", "What?", *words)
    assert said.code == 2 and f"{words[0]} can only be used with --data" in said.err


@pytest.mark.parametrize("kind", ["videos", "audios"])
def test_a_file_that_is_no_path_is_refused(folder: Path, kind: str) -> None:
    with pytest.raises(UsageError, match="is not a path"):
        mindspeed_mm.infer(folder / "model", "?", **{kind: [3]})  # type: ignore[arg-type]
