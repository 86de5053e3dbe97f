"""`mm infer`: the same tokens as transformers' own `generate`, files of answers that continue, bad rows by name."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unicodedata import category

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from PIL import Image

from mindspeed_mm.cli.infer import command
from mindspeed_mm.core.errors import CheckpointError, DataError, MMError, ModelFolderError, UsageError
from mindspeed_mm.core.folder_writing import atomic_folder
from mindspeed_mm.fsdp.data.data_utils import data_collator
from mindspeed_mm.fsdp.data.data_utils.data_collator import padded_rows
from mindspeed_mm.fsdp.data.data_utils.encode import EncodedQuestion
from mindspeed_mm.fsdp.data.data_utils.sample import MediaItem
from mindspeed_mm.fsdp.sampling.answers.choosing import Sampling
from mindspeed_mm.fsdp.sampling.answers.generator import Generator
from mindspeed_mm.fsdp.sampling.answers.live import Answer, LiveAnswer
from mindspeed_mm.fsdp.sampling.answers.questions import Question, ask, read_questions, user_turn
from mindspeed_mm.tasks import model_source
from mindspeed_mm.tasks.answer import infer
from mindspeed_mm.tasks.answer.generation import load_generator
from mindspeed_mm.tasks.export import export as export_task
from mindspeed_mm.tasks.requests.export import ExportRequest
from mindspeed_mm.tasks.requests.infer import InferRequest
from tests.helpers.greedy import greedy_answers
from tests.helpers.runs import mm
from tests.helpers.tiny_models import make_tiny_qwen3, make_tiny_qwen3_vl

TOKENS = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_qwen3_vl(tmp_path_factory.mktemp("model"), seed=3, tie=False, initializer_range=0.4)


@pytest.fixture(scope="module")
def generator(folder: Path) -> Generator:
    return load_generator(folder)


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Seven conversations of different lengths with no, one or two pictures of different sizes."""
    lines = []
    for number in range(7):
        images = [f"{number}-{k}.png" for k in range(number % 3)]
        for k, name in enumerate(images):
            noise = torch.randint(0, 255, (16 * (1 + k), 16 * (1 + number % 2), 3), dtype=torch.uint8)
            Image.fromarray(noise.numpy()).save(tmp_path / name)
        content = "<image>" * len(images) + "what is this? " * (number + 1)
        lines.append(
            json.dumps({"id": f"q{number}", "messages": [{"role": "user", "content": content}], "images": images})
        )
    path = tmp_path / "questions.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def plain_answer(folder: Path, question: Question, media_dir: Path) -> tuple[int, ...]:
    """One question, one batch, with nothing but transformers."""
    from transformers import AutoModelForImageTextToText, AutoProcessor

    processor, model = AutoProcessor.from_pretrained(folder), AutoModelForImageTextToText.from_pretrained(folder).eval()
    text = processor.apply_chat_template(list(question.messages), add_generation_prompt=True, tokenize=False)
    images = [Image.open(media_dir / name).convert("RGB") for name in question.images]
    inputs = processor(text=[text], images=images or None, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=TOKENS, do_sample=False)
    return tuple(output[0, inputs["input_ids"].shape[1] :].tolist())


def answers_of(generator: Generator, rows: Path, batch_size: int) -> dict[str, Answer]:
    questions = read_questions(rows, needs_answers=False)
    media = generator.encoder.media(rows.parent)
    batches = generator.answer(questions, media, sampling=Sampling(TOKENS, temperature=0), batch_size=batch_size)
    return {question.id: answer for batch in batches for question, answer in batch}


def test_batched_answers_are_those_of_plain_transformers(
    generator: Generator, folder: Path, rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = {q.id: plain_answer(folder, q, rows.parent) for q in read_questions(rows, needs_answers=False)}
    assert len(set(expected.values())) > 1  # a model that always says the same proves nothing
    for batch_size in (1, 7):
        assert {k: a.token_ids for k, a in answers_of(generator, rows, batch_size).items()} == expected

    def padded_right(questions: Any, fills: Any) -> Any:
        return padded_rows(questions, fills, 1)

    monkeypatch.setattr(
        data_collator, "left_padded_rows", padded_right
    )  # the planted fault: the comparison must see it
    assert {k: a.token_ids for k, a in answers_of(generator, rows, 7).items()} != expected


def test_answers_end_at_the_end_token(generator: Generator) -> None:
    end = generator.tokenizer.eos_token_id
    question = EncodedQuestion(np.zeros(3, np.int64), [])
    ended, cut_off = LiveAnswer(question, Sampling()), LiveAnswer(question, Sampling(max_new_tokens=2))
    assert [ended.take(token, [end]) for token in (50, 51, end, 52)] == [False, False, True, True]
    assert [cut_off.take(token, [end]) for token in (50, 51, 52)] == [False, True, True]
    answers = [row.close(generator.tokenizer.decode) for row in (ended, cut_off)]
    assert [(answer.token_ids, answer.finished) for answer in answers] == [((50, 51, end), True), ((50, 51), False)]


def test_text_model_answers_and_refuses_pictures(tmp_path: Path, rows: Path) -> None:
    generator = load_generator(make_tiny_qwen3(tmp_path / "text"))
    media = generator.encoder.media(rows.parent)
    question = generator.encoder.encode(ask("zero one").sample, media)
    assert greedy_answers(generator, [question], TOKENS)[0].token_ids
    with_picture = next(q for q in read_questions(rows, needs_answers=False) if q.images)
    with pytest.raises(DataError, match=r"jsonl:2.*takes text only\. Name a model that takes"):
        generator.encoder.encode(with_picture.sample, media)


def test_answers_end_where_the_models_positions_do(tmp_path: Path) -> None:
    folder = make_tiny_qwen3(tmp_path / "text", max_position_embeddings=24)
    generator, media = load_generator(folder), load_generator(folder).encoder.media(tmp_path)
    question = generator.encode(ask("zero one").sample, media)
    generator.end_ids = []
    answer = greedy_answers(generator, [question], 512)[0]
    assert (len(answer.token_ids), answer.finished) == (24 - len(question.input_ids), False)
    longer = generator.encode(ask("zero one two zero").sample, media)
    rows = [LiveAnswer(each, Sampling(512, temperature=0, beams=2)) for each in (question, longer)]
    assert [len(each.token_ids) for each in generator.answer_live(rows)] == [
        24 - len(r.question.input_ids) for r in rows
    ]
    with pytest.raises(DataError, match=r"has \d+ tokens, and the model takes 24 with the answer\. Ask"):
        generator.encode(ask("zero one " * 12).sample, media)


def run(folder: Path, rows: Path, **options: Any) -> infer.InferOutcome:
    return infer.run(
        InferRequest(
            folder, data=rows, out=rows.parent / "answers.jsonl", max_new_tokens=TOKENS, batch_size=2, **options
        )
    )


def test_a_file_of_answers_continues_where_it_stopped(
    folder: Path, rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(folder, rows).answered == 7
    out = rows.parent / "answers.jsonl"
    whole = out.read_text()
    assert [json.loads(line)["id"] for line in whole.splitlines()] == [f"q{number}" for number in range(7)]

    lines = whole.splitlines(keepends=True)
    out.write_text(lines[4] + lines[0] + lines[2][:30])  # killed in the middle of a line
    asked: list[str] = []
    original = Generator.answer

    def spy(self: Generator, questions: Any, media: Any, **options: Any) -> Any:
        asked.extend(question.id for question in questions)
        return original(self, questions, media, **options)

    monkeypatch.setattr(Generator, "answer", spy)
    outcome = run(folder, rows)
    assert (outcome.answered, outcome.kept) == (5, 2)
    assert sorted(asked) == ["q1", "q2", "q3", "q5", "q6"]
    assert out.read_text() == whole


def test_answers_of_something_else_are_not_continued(folder: Path, rows: Path, tmp_path: Path) -> None:
    run(folder, rows)
    other = make_tiny_qwen3_vl(tmp_path / "other", seed=4)
    with pytest.raises(DataError, match="another model"):
        run(other, rows)
    changed = rows.read_text().replace("what is this?", "what was this?", 1)
    rows.write_text(changed)
    with pytest.raises(DataError, match="not that row of the input"):
        run(folder, rows)
    assert run(folder, rows, overwrite=True).answered == 7
    with pytest.raises(UsageError, match="the file of questions itself"):
        infer.run(InferRequest(folder, data=rows, out=rows))
    assert rows.read_text() == changed


ASKED = '"messages": [{"role": "user", "content": "<image>?"}]'


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (f'{{{ASKED}, "images": ["gone.png"]}}', r"jsonl:2.*'gone.png' not found"),
        ('{"messages": [{"role": "user", ', r"jsonl:2.*broken JSON"),
        (f'{{{ASKED}, "images": ["a.png", "b.png"]}}', r"jsonl:2.*1 <image> placeholders.*2 images"),
        ('{"messages": [{"role": "user", "content": 7}]}', r"jsonl:2.*7 is not text\. Write .*'7'\.$"),
        ('{"text": "no conversation"}', r"jsonl:2.*is a document, and asks nothing"),
        ('{"prompt": "hi", "image": "questions.jsonl"}', r"jsonl:2.*'questions.jsonl' is not an image"),
        ('{"prompt": "hi", "image": "../outside.png"}', r"jsonl:2.*outside the media roots"),
    ],
)  # fmt: skip
def test_a_bad_row_is_named(folder: Path, rows: Path, line: str, message: str) -> None:
    (rows.parent.parent / "outside.png").write_bytes(b"x")
    first = rows.read_text().splitlines()[0]
    rows.write_text(f"{first}\n{line}\n")
    with pytest.raises(DataError, match=message) as caught:
        run(folder, rows)
    assert "on_bad_sample" not in str(caught.value)
    assert ("data.dataset_param" in str(caught.value)) == ("--config YAML" in str(caught.value))


def test_every_bad_row_is_named_at_once(rows: Path) -> None:
    rows.write_text("{\n" * 12)
    with pytest.raises(DataError, match="12 of 12 rows are bad") as caught:
        read_questions(rows, needs_answers=False)
    assert len(caught.value.problems) == 10


@dataclass
class Found:
    """A checkpoint, as the search returns it."""

    path: Path


def test_a_run_is_exported_once_for_each_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exports: list[Path] = []

    def export(request: ExportRequest) -> None:
        exports.append(request.run)
        with atomic_folder(request.out) as draft:
            (draft / "config.json").write_text("{}")

    def newest(path: Path, ranks: Any, verification: str) -> Found:
        return Found(max(path.glob("iter_*")) if path == tmp_path else path)

    monkeypatch.setattr(export_task, "run", export)
    monkeypatch.setattr(model_source, "open_checkpoint", newest)
    (tmp_path / "run.json").write_text(json.dumps({"model_name_or_path": str(tmp_path)}))
    (tmp_path / "config.json").write_text("{}")
    first, second = (tmp_path / f"iter_000000{step}" for step in (1, 2))
    for folder in (first, second):
        folder.mkdir()
        (folder / "MANIFEST.json").write_text(folder.name)
        sources = [model_source.resolve_model(tmp_path), model_source.resolve_model(folder)]
        assert {source.folder.parent for source in sources} == {tmp_path / "exported"}
        assert {source.run for source in sources} == {tmp_path}
    assert exports == [first, second]
    assert len(list((tmp_path / "exported").iterdir())) == 1  # the older one has gone
    (tmp_path / "exported" / "iter_mine").mkdir()
    (second / "MANIFEST.json").write_text("trained again")
    model_source.resolve_model(tmp_path)
    assert exports == [first, second, second]
    assert (tmp_path / "exported" / "iter_mine").is_dir()  # not ours


def no_folder(tmp_path: Path, model: Path) -> Path:
    return tmp_path / "nowhere"


def no_weights(tmp_path: Path, model: Path) -> Path:
    copy = copy_of(model, tmp_path / "copy")
    (copy / "model.safetensors").unlink()
    return copy


def lfs_pointer(tmp_path: Path, model: Path) -> Path:
    copy = copy_of(model, tmp_path / "copy")
    (copy / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    return copy


def foreign_weights(tmp_path: Path, model: Path) -> Path:
    other = make_tiny_qwen3_vl(tmp_path / "other", num_hidden_layers=3)
    copy = copy_of(model, tmp_path / "copy")
    (copy / "model.safetensors").write_bytes((other / "model.safetensors").read_bytes())
    return copy


def copy_of(model: Path, target: Path) -> Path:
    target.mkdir()
    for file in model.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (no_folder, CheckpointError, "nowhere.*does not exist"),
        (no_weights, ModelFolderError, "copy.*safetensors"),
        (lfs_pointer, ModelFolderError, "Git LFS pointer"),
        (foreign_weights, ModelFolderError, "missing.*lm_head.weight.*unexpected.*layers.2"),
    ],
)
def test_a_bad_model_folder_is_named(
    folder: Path, tmp_path: Path, build: Callable[[Path, Path], Path], error: type[MMError], message: str
) -> None:
    with pytest.raises(error, match=message):
        infer.answer_prompt(InferRequest(build(tmp_path, folder), prompts=("hi",), max_new_tokens=1))


def test_the_command_answers_a_prompt(folder: Path, rows: Path) -> None:
    arguments = [str(folder), "--prompt", "what?", "--image", str(rows.parent / "1-0.png"), "--max-new-tokens", "3"]
    result = CliRunner().invoke(command, [*arguments, "--json"], catch_exceptions=False)
    answer = json.loads(result.output)
    assert len(answer["token_ids"]) <= 3
    is_control = {sign: category(sign) == "Cc" and sign not in "\t\n" for sign in answer["text"]}
    shown = "".join(f"\\x{ord(sign):02x}" if is_control[sign] else sign for sign in answer["text"])
    assert CliRunner().invoke(command, arguments).output == shown + "\n"


def test_marks_say_where_media_stand(rows: Path) -> None:
    pictures = [MediaItem("image", str(rows.parent / name)) for name in ("1-0.png", "2-0.png")]
    marked = ask("<image>and<image>?", pictures).sample
    assert [part["type"] for part in marked.messages[0]["content"]] == ["image", "text", "image", "text"]
    assert marked.media == pictures
    mixed, media = user_turn("<video> <image>", [pictures[0], MediaItem("video", "clip")], "here")
    assert [part["type"] for part in mixed["content"]] == ["video", "text", "image"]
    assert [item.kind for item in media] == ["video", "image"]
    with pytest.raises(DataError, match=r"--prompt:1  the text holds 1 × <image>, and 2 of that kind are given"):
        ask("<image>?", pictures)


@pytest.mark.edge("BR8")
def test_marks_of_a_kind_that_is_not_given_are_words() -> None:
    assert ask("what does <image> mean?").sample.messages == [{"role": "user", "content": "what does <image> mean?"}]
    picture = MediaItem("image", "a.png")
    turn, media = user_turn("the <video> tag", [picture], "here")
    assert turn["content"] == [{"type": "image"}, {"type": "text", "text": "the <video> tag"}]
    turn, media = user_turn("<image> and <audio>", [picture], "here")
    assert turn["content"] == [{"type": "image"}, {"type": "text", "text": " and <audio>"}]
    assert media == [picture]


@pytest.mark.parametrize(
    "arguments",
    [[], ["--prompt", "a", "--data", "b"], ["--data", "b"], ["--data", "b", "--out", "c", "--image", "d"]],
)
def test_the_command_refuses_what_does_not_go_together(arguments: list[str]) -> None:
    with pytest.raises(UsageError):
        CliRunner().invoke(command, ["model", *arguments], catch_exceptions=False)


@pytest.mark.slow
def test_processes_share_the_rows_and_go_on_where_others_stopped(folder: Path, rows: Path, tmp_path: Path) -> None:
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    words = [str(folder), "--data", str(rows), "--max-new-tokens", str(TOKENS), "--batch-size", "2"]
    mm = [sys.executable, "-m", "mindspeed_mm.cli.main", "infer", *words]
    assert CliRunner().invoke(command, [*words, "--out", str(one)], catch_exceptions=False).exit_code == 0
    for held in (0, 3):  # answers that are there already
        two.write_text("".join(one.read_text().splitlines(keepends=True)[:held]))
        done = subprocess.run([*mm, "--out", str(two), "--nproc", "2"], capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
        kept = f", {held} were already there" if held else ""
        assert f"two.jsonl: {7 - held} answered{kept}" in done.stdout
        assert two.read_text() == one.read_text()
    two.write_text(one.read_text().replace("what is this?", "and this?"))
    done = subprocess.run([*mm, "--out", str(two), "--nproc", "2"], capture_output=True, text=True, timeout=600)
    assert done.returncode == 4 and done.stderr.count("cannot be continued") == 1


@pytest.mark.parametrize(
    ("words", "code", "messages"),
    [
        (["--data", "rows.jsonl", "--out", "/proc/x.jsonl"], 3, ["/proc/x.jsonl", "cannot be written", "--out"]),
        (["--data", "rows.jsonl", "--out", "o.jsonl"], 4, ["'a.png' not found", "--media-dir FOLDER", "12 of 12 rows"]),
        (["--data", "rows.jsonl", "--out", "o.jsonl"], 4, ["the first 10 are"]),
        (["--data", "rows.jsonl", "--out", "o.jsonl", "--media-dir", "no"], 4, ["--media-dir", "no such folder"]),
        (["--prompt", "what?", "--image", "missing.png"], 4, ["missing.png  --image  there is no such file"]),
        (["--prompt", "half \udcff"], 4, ["--prompt", "lone surrogate"]),
    ],
)
def test_what_is_off_is_told_before_a_model_is_loaded(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], code: int, messages: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "?", "image": "a.png"}\n' * 12)
    monkeypatch.setattr(infer, "load_generator", lambda *_: pytest.fail("it was loaded"))
    monkeypatch.setattr(infer, "load_on_ranks", lambda *_: pytest.fail("it was loaded"))
    said = mm("infer", folder, *words)
    assert said.code == code and all(message in said.err for message in messages), said.err
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]
