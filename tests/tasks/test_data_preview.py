"""`mm data preview`: what is shown is what is trained, token for token, and what users wrote stays text."""

from __future__ import annotations

import base64
import io
import itertools
import json
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from PIL import Image

from mindspeed_mm.core.errors import UsageError
from mindspeed_mm.fsdp.data.data_utils.media import MediaLoader
from mindspeed_mm.fsdp.data.data_utils.sample import MediaItem
from mindspeed_mm.fsdp.data.dataloader.order import DataPosition
from mindspeed_mm.fsdp.utils.processor import load_processor
from mindspeed_mm.tasks.data import check, preview, stats
from mindspeed_mm.tasks.data.media_views import sound_uri, view_medium, wave_points
from mindspeed_mm.tasks.data.micro_batch import PackedDocument, view_batch
from mindspeed_mm.tasks.data.opening import open_data
from mindspeed_mm.tasks.data.page import preview_page
from mindspeed_mm.tasks.data.preview import Preview
from mindspeed_mm.tasks.data.tokens import TokenReader
from mindspeed_mm.tasks.data.words import Paint, preview_lines
from mindspeed_mm.tasks.requests.data import DataCheckRequest, DataPreviewRequest, DataStatsRequest
from tests.helpers.tiny_generator_run import make_tiny_generator_run
from tests.helpers.tiny_media import write_video
from tests.tasks.data_rows import add_rows, basics, conversation, make_run
from tests.tasks.test_report import Page, external

EVIL = "<script>alert(1)</script>"


@pytest.fixture(scope="module")
def yaml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("preview")
    run = make_run(folder)
    rows = [
        conversation(f"{EVIL} \x1b[31m中文 😀?", "grün 😀", id="odd"),
        {"messages": [
            {"role": "user", "content": "one"}, {"role": "assistant", "content": "two", "weight": 0.5},
            {"role": "user", "content": "three"}, {"role": "assistant", "content": "four"},
        ]},
        conversation("<image>?", images=["images/none.png"]),
    ]  # fmt: skip
    add_rows(folder, rows)
    return run


@pytest.fixture(scope="module")
def tokenizer(yaml: Path) -> Any:
    return load_processor(yaml.parent / "model").tokenizer


@pytest.fixture(scope="module")
def found(yaml: Path) -> Preview:
    return preview.run(DataPreviewRequest(yaml, rows="0,2,24,25,26"))


def plain(found: Preview) -> str:
    return "\n".join(preview_lines(found, Paint(colour=False)))


def test_texts_are_those_of_the_ids_and_trained_ones_those_of_the_labels(found: Preview, tokenizer: Any) -> None:
    for row in found.shown[:4]:
        [answer] = row.answers
        said = "".join(s.text * (s.repeated or 1) for s in answer.stretches)
        assert said == tokenizer.decode(answer.ids)
        labels = np.array(answer.labels)
        expected = tokenizer.decode(labels[labels != -100].tolist())
        assert "".join(s.text for s in answer.stretches if s.weight) == expected
        assert sum(s.tokens for s in answer.stretches) == len(answer.ids)


def test_characters_of_several_tokens_stand_together(tokenizer: Any) -> None:
    ids = tokenizer("a 😀 中", add_special_tokens=False)["input_ids"]
    pieces = [piece for stretch in TokenReader(tokenizer).stretches(ids, None) for piece in stretch.pieces]
    assert "".join(piece.text for piece in pieces) == "a 😀 中"
    assert sum(len(piece.ids) for piece in pieces) == len(ids) > len(pieces)


def test_blanks_of_sentencepiece_tokens_are_kept() -> None:
    class Sentencepiece:
        all_special_ids = [0]
        added_tokens_decoder: dict[int, Any] = {}
        words = ["<s>", "▁the", "▁cat", "s"]

        def decode(self, ids: list[int], **_: Any) -> str:
            return "".join(self.words[i] for i in ids).replace("▁", " ").removeprefix(" ")

    [stretch] = TokenReader(Sentencepiece()).stretches([1, 2, 3, 1], None)
    assert [piece.text for piece in stretch.pieces] == ["the", " cat", "s", " the"]


def test_plain_text_marks_trained_tokens(yaml: Path, found: Preview) -> None:
    row = json.loads((yaml.parent / "rows.jsonl").read_text().splitlines()[0])
    text = plain(found)
    assert f"«{row['messages'][1]['content']}<|im_end|>»" in text
    assert "<|vision_start|>[<|image_pad|> × 4]<|vision_end|>What is it like?<|im_end|>" in text
    assert "«two<|im_end|>»(weight 0.5)" in text
    assert "«four<|im_end|>»" in text
    assert "image 1: images/0_0.png  32 × 32  → 4 tokens" in text
    assert "cannot be used: rows.jsonl:27" in text
    assert "\x1b" not in text
    assert "\\x1b[31m" in text  # a row cannot colour the terminal


def test_colour_shows_the_same_words(found: Preview) -> None:
    text = "\n".join(preview_lines(found, Paint(colour=True)))
    assert "\x1b[30m\x1b[42mtwo<|im_end|>\x1b[0m" in text
    assert "«" not in text.partition("\n")[2]
    assert "▀" in text


def test_the_token_table_has_every_token(found: Preview) -> None:
    lines = preview_lines(found, Paint(colour=False), tokens=True)
    [answer] = found.shown[1].answers
    table = [line for line in lines if re.match(r" +\d+ +\d", line)]
    assert any(re.match(rf" +{len(answer.ids) - 1} +{answer.ids[-1]} ", line) for line in table)


def test_json_has_numbers_where_numbers_are_meant(yaml: Path, found: Preview) -> None:
    told = json.loads(json.dumps(found.to_dict()))
    assert found.batch is not None
    rows, length = found.batch.rows, found.batch.length
    batch = told["micro_batch"]
    assert batch["shapes"]["input_ids"] == [rows, length] and batch["dtypes"]["input_ids"] == "int64"
    assert batch["shapes"]["sample_ids"] == [rows] and batch["dtypes"]["sample_ids"] == "list"
    words = basics(packing=True, cutoff_len=64, max_samples=24)
    packed = preview.run(DataPreviewRequest(yaml, words)).to_dict()["micro_batch"]
    assert packed["values"]["max_length_q"] > 0 and packed["shapes"]["max_length_q"] == []
    when = preview.run(DataPreviewRequest(yaml, basics(max_samples=24), count=1)).to_dict()["shown"][0]["when"]
    assert when == {"epoch": 0, "step": 1, "of_steps": 12, "micro_batch": 1}


class TestPage:
    def test_media_are_inside_and_nothing_comes_from_outside(self, found: Preview) -> None:
        html = preview_page(found)
        page = Page(html)
        assert external(page, html) == []
        assert page.tags.count("img") == 3
        assert all(source.startswith("data:image/png;base64,") for source in page.references)
        assert "'images/none.png' not found" in html.replace("&#39;", "'")

    def test_what_users_wrote_stays_text(self, found: Preview) -> None:
        html = preview_page(found)
        assert EVIL not in html
        assert "script" not in Page(html).tags
        assert EVIL in "".join(Page(html).text)

    def test_trained_tokens_are_marked_and_each_names_its_id(self, found: Preview) -> None:
        html = preview_page(found)
        [answer] = found.shown[1].answers
        trained = re.findall(r'<span class="trained">(.*?)</span></span>', html, flags=re.DOTALL)
        assert len(trained) == 5  # two rows, the odd one, two turns of different weights
        ids = [int(number) for part in trained[1:2] for number in re.findall(r"id (\d+), weight 1", part)]
        assert ids == [label for label in answer.labels if label != -100]
        assert "<sup>× 0.5</sup>" in html


class TestWhichRows:
    def test_by_id_and_place(self, yaml: Path) -> None:
        shown = preview.run(DataPreviewRequest(yaml, row_ids=["odd", "rows.jsonl:3"])).shown
        assert [row.index for row in shown] == [24, 2]
        with pytest.raises(UsageError, match="no row has the id or location nobody"):
            preview.run(DataPreviewRequest(yaml, row_ids=["nobody"]))
        with pytest.raises(UsageError, match="row 99 does not exist: the data set has 27"):
            preview.run(DataPreviewRequest(yaml, rows="99"))

    def test_the_first_of_training_and_their_steps_are_those_that_the_loader_takes(self, yaml: Path) -> None:
        words = ["training.gradient_accumulation_steps=2", *basics(max_samples=24)]
        shown = preview.run(DataPreviewRequest(yaml, words, count=7)).shown
        loader = open_data(yaml, words).loader()
        steps = [[name for batch in step for name in batch["sample_ids"]] for step in itertools.islice(loader, 2)]
        taken = [name for step in steps for name in step]
        assert [row.place for row in shown] == taken[:7]
        for row in shown:
            assert row.when is not None
            step = next(number for number, names in enumerate(steps, 1) if row.place in names)
            assert (row.when.step, row.when.of_steps) == (step, 6)
        assert preview.run(DataPreviewRequest(yaml, words, count=7, nproc=2)).shown[4].when.step == 1  # type: ignore[union-attr]

    def test_rows_that_packing_leaves_over_are_of_the_next_epoch(self, yaml: Path) -> None:
        words = basics(packing=True, cutoff_len=64, max_samples=24)
        loader = open_data(yaml, words).loader()
        steps = loader.steps_per_epoch
        assert steps is not None
        *_, next_epoch = itertools.islice(loader, steps + 1)
        shown = preview.run(DataPreviewRequest(yaml, words, count=24)).shown
        places = {row.place: row.when for row in shown}
        late = {name: when for name, when in places.items() if when is not None and when.epoch == 1}
        assert late and late.keys() <= {name for batch in next_epoch for name in batch["sample_ids"]}
        assert {(when.step, when.of_steps) for when in late.values()} == {(1, steps)}
        assert all(when is None or when.step <= steps for when in places.values())

    def test_rows_that_wait_while_the_next_epoch_is_drawn_are_found(self, yaml: Path) -> None:
        alone = preview.run(DataPreviewRequest(yaml, basics(max_samples=8), count=8)).shown
        tokens = sum(len(row.answers[0].ids) for row in alone)
        of_a_row = int(0.4 * tokens)  # two rows of a step hold 0.8 of all
        words = [*basics(packing=True, cutoff_len=of_a_row, max_samples=8), "data.dataloader_param.drop_last=false"]
        position = open_data(yaml, words).loader().order.step(DataPosition(0, 0)).after
        assert position.epoch == 1 and position.overdue
        shown = preview.run(DataPreviewRequest(yaml, words, count=8)).shown
        assert sorted(row.index for row in shown) == list(range(8))
        assert all(row.when is not None for row in shown)

    def test_rows_for_validation(self, yaml: Path) -> None:
        words = basics(val_dataset=str(yaml.parent / "rows.jsonl"), val_max_samples=5)
        found = preview.run(DataPreviewRequest(yaml, words, validation=True))
        assert (found.rows, [row.index for row in found.shown], found.batch) == (5, [0, 1, 2], None)
        with pytest.raises(UsageError, match="no validation rows"):
            preview.run(DataPreviewRequest(yaml, validation=True))


class TestOtherOrders:
    def test_streamed_rows_are_looked_at_by_number_and_batched_as_they_come(self, yaml: Path) -> None:
        found = preview.run(DataPreviewRequest(yaml, basics(streaming=True, max_samples=24)))
        assert found.batch is not None, found.batch_trouble
        assert str(found.shown[0].when).startswith("epoch 0, step 1, micro-batch ")

    def test_the_part_for_training_and_that_for_validation(self, yaml: Path) -> None:
        words = basics(val_rate=0.25, max_samples=24)
        parts = [preview.run(DataPreviewRequest(yaml, words, count=24, validation=flag)) for flag in (False, True)]
        assert [found.rows for found in parts] == [18, 6]
        for row in (row for found in parts for row in found.shown):
            assert row.place == f"rows.jsonl:{int((row.row_id or '').removeprefix('row')) + 1}"
        assert len({row.place for found in parts for row in found.shown}) == 24

    def test_nothing_is_encoded_ahead(self, yaml: Path, tmp_path: Path) -> None:
        words = basics(preprocess_on_fly=False, cache_dir=str(tmp_path / "cache"), max_samples=24)
        assert preview.run(DataPreviewRequest(yaml, words)).batch is not None
        assert not (tmp_path / "cache").exists()

    def test_batches_by_a_budget(self, yaml: Path) -> None:
        words = [*basics(max_samples=24), "data.dataloader_param.max_tokens_per_batch=300"]
        found = preview.run(DataPreviewRequest(yaml, words))
        assert found.batch is not None
        assert found.batch.rows > 2
        assert found.batch.rows * found.batch.length <= 300
        assert all(row.when is not None for row in found.shown)


class TestMicroBatch:
    def test_padded(self, yaml: Path) -> None:
        batch = preview.run(DataPreviewRequest(yaml, basics(max_samples=24))).batch
        assert batch is not None
        assert (batch.rows, batch.is_packed) == (2, False)
        real = [document for document in batch.documents if document.sample_id]
        assert batch.fill == sum(d.end - d.first for d in real) / (2 * batch.length)
        assert all(document.trained > 0 for document in real)

    def test_borders_of_a_pack_and_its_padding(self) -> None:
        labels = torch.tensor([[-100, 1, 1, -100, -100, 1, -100, -100]])
        view = view_batch(
            {
                "input_ids": torch.ones(1, 8, dtype=torch.int64),
                "shift_labels": labels,
                "cu_seq_lens_q": torch.tensor([0, 4, 6, 8], dtype=torch.int32),
                "sample_ids": ["a:1", "a:2"],
            }
        )
        assert view.documents == (
            PackedDocument(0, 0, 4, "a:1", 2),
            PackedDocument(0, 4, 6, "a:2", 1),
            PackedDocument(0, 6, 8, "", 0),
        )
        assert (view.is_packed, view.fill) == (True, 0.75)

    def test_packs_of_a_run(self, yaml: Path) -> None:
        found = preview.run(DataPreviewRequest(yaml, basics(max_samples=24, packing=True, cutoff_len=200)))
        assert found.batch is not None, found.batch_trouble
        assert (found.batch.is_packed, found.batch.rows) == (True, 1)
        assert len([document for document in found.batch.documents if document.sample_id]) > 1
        assert "packed" in plain(found)

    def test_too_few_rows_for_a_step_is_told(self, yaml: Path) -> None:
        found = preview.run(DataPreviewRequest(yaml, basics(max_samples=1)))
        assert (len(found.shown), found.batch) == (1, None)
        assert "fewer than one global batch of 2" in plain(found)
        packed = preview.run(DataPreviewRequest(yaml, basics(packing=True, max_samples=24)))
        assert (len(packed.shown), packed.batch) == (3, None)
        assert "do not fill the 1 micro-batches of 2,048 tokens" in plain(packed)


def test_videos_are_strips_of_frames(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    write_video(tmp_path / "a.mp4", range(0, 256, 8))
    add_rows(tmp_path, [conversation("<video>?", videos=["a.mp4"])])
    found = preview.run(DataPreviewRequest(run, rows="24"))
    assert not found.shown[0].fault
    html = preview_page(found)
    assert Page(html).tags.count("img") >= 2
    assert "48 × 32, 2.0 s" in plain(found)


def test_sounds_can_be_seen_and_heard(tmp_path: Path) -> None:
    """What the page plays is what training reads, decoded by somebody else's reader."""
    rate = 16_000
    samples = (np.sin(np.arange(rate // 2) * 440 * 2 * np.pi / rate) * np.linspace(0, 1, rate // 2)).astype(np.float32)
    soundfile.write(tmp_path / "a.wav", samples, rate, subtype="FLOAT")
    view = view_medium(MediaLoader(tmp_path), MediaItem("audio", "a.wav"))
    assert (view.facts, view.trouble) == ("0.50 s at 16,000 Hz", "")
    played, played_rate = soundfile.read(io.BytesIO(base64.b64decode(sound_uri(view.sound, rate).partition(",")[2])))
    assert played_rate == rate
    assert np.abs(played - samples).max() < 1e-4
    points = [tuple(map(float, point.split(","))) for point in wave_points(view.sound).split()]
    heights = [30 - y for _, y in points[: len(points) // 2]]
    assert heights == sorted(heights)  # it grows louder
    assert heights[-1] == pytest.approx(30, abs=0.5)
    assert view_medium(MediaLoader(tmp_path), MediaItem("audio", "b.wav")).trouble == "'b.wav' not found"
    assert view_medium(None, MediaItem("audio", "b.wav")).trouble


def test_rows_of_a_generator(tmp_path: Path) -> None:
    """They have no tokens; what there is to see is seen."""
    run = make_tiny_generator_run(tmp_path)
    found = preview.run(DataPreviewRequest(run, rows="0"))
    assert found.batch is not None, found.batch_trouble
    assert "pixels" in found.batch.entries
    assert "first micro-batch of training  2 samples" in plain(found)
    assert check.run(DataCheckRequest(run)).exit_code == 0
    assert stats.run(DataStatsRequest(run)).tokens == {}


def test_an_animated_picture_is_shown_as_the_clip_that_it_is(tmp_path: Path) -> None:
    run = make_tiny_generator_run(tmp_path, "t2v")  # its clips are GIFs
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        text = plain(preview.run(DataPreviewRequest(run, rows="0")))
    assert "video 1: clips/0.gif  16 × 16, 0.6 s, an animation of 5 frames" in text
    assert not [each for each in told if "the first is used" in str(each.message)]
    view = view_medium(MediaLoader(tmp_path), MediaItem("video", "clips/0.gif"))
    with Image.open(tmp_path / "clips" / "0.gif") as image:
        for number, frame in enumerate(view.images):
            image.seek(number)
            assert np.array_equal(np.asarray(frame), np.asarray(image.convert("RGB")))
    assert view.times_s == pytest.approx([0.0, 0.12, 0.24, 0.36, 0.48])


def test_preference_rows_show_both_answers(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    pair = {"conversations": [{"from": "human", "value": "which?"}]}
    pair |= {"chosen": {"from": "gpt", "value": "seven"}, "rejected": {"from": "gpt", "value": "one"}}
    (tmp_path / "pairs.jsonl").write_text(json.dumps(pair) + "\n")
    words = [*basics(dataset=str(tmp_path / "pairs.jsonl"), stage="rm"), "data.dataset_param.attr={ranking: true}"]
    words.append("posttrain.method=dpo")
    text = plain(preview.run(DataPreviewRequest(run, words, rows="0")))
    assert re.search(r"chosen: .*«seven<\|im_end\|>».*rejected: .*«one<\|im_end\|>»", text, flags=re.DOTALL)
