"""`mm evaluate --benchmark`: files as their authors publish them, rules as their authors score."""

from __future__ import annotations

import base64
import csv
import io
import json
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image
from scipy.stats import binomtest

from mindspeed_mm.cli.evaluate import command
from mindspeed_mm.core.errors import DataError, UsageError
from mindspeed_mm.fsdp.sampling.answers.live import Answer
from mindspeed_mm.tasks.evaluate import judge as judging_answers
from mindspeed_mm.tasks.evaluate.comparing import compare, mcnemar
from mindspeed_mm.tasks.evaluate.published import evaluate, rules
from mindspeed_mm.tasks.evaluate.published.item import Item
from mindspeed_mm.tasks.evaluate.published.sets import SETS
from mindspeed_mm.tasks.requests.evaluate import JUDGED, Benchmark, EvaluateRequest
from tests.helpers.judging import JudgingServer, judging
from tests.helpers.tiny_models import make_tiny_qwen3_vl

ABCD = {"A": "a cat", "B": "a dog", "C": "the sun", "D": "the moon and the sun"}


def item(*gold: str, **more: Any) -> Item:
    return Item("1", "all", "what?", gold, **more)


def picture(shade: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (16, 16), (shade, 9, 9)).save(file, "PNG")
    return file.getvalue()


def write_tsv(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, list(dict.fromkeys(key for row in rows for key in row)), delimiter="\t")
        table.writeheader()
        table.writerows(rows)
    return path


# --- rules ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "letter"),
    [
        ("B", "B"), ("(B)", "B"), ("B.", "B"), ("B. a dog", "B"), ("**B**: a dog", "B"), ("The answer is (C).", "C"),
        ("answer: b", "B"), ("I think it is D", "D"), ("A dog runs.", "B"), ("A", "A"), ("A cat", "A"),
        ("the sun", "C"), ("the moon and the sun", "D"), ("It is A or B", None), ("B or C", None), ("", None),
        ("I believe A is right", "A"), ("something else", None), ("E", None), ("a cat and a dog", None),
        ("The answer is a dog.", "B"), ("The answer is a bird, because it flies.", None), ("The answer is A dog", "B"),
        ("Option A is wrong, so the correct answer is B.", "B"), ("the answer is option C", "C"),
    ],
)  # fmt: skip
def test_the_option_that_an_answer_names(answer: str, letter: str | None) -> None:
    assert rules.chosen_letter(answer, ABCD) == letter


@pytest.mark.parametrize(
    ("answer", "gold", "share"),
    [
        ("105", "100", 1), ("95.0", "100", 1), ("105.1", "100", 0), ("0.05", "5%", 1), ("5%", "0.05", 1),
        ("1,050", "1000", 1), ("blue.", "Blue", 1), ("light blue", "Blue", 0), ("0", "0", 1), ("0.001", "0", 0),
        # 5 % are of what is right: 95.3 is within 5 % of 100, and 100 is not within 5 % of 95.2.
        ("95.3", "100", 1), ("100", "95.2", 0), ("21,5", "215", 0), ("1,234,567", "1234567", 1),
        ("50%%", "0.5", 1), ("50%%", "50", 0),
    ],
)  # fmt: skip
@pytest.mark.edge("BN14")
def test_relaxed_accuracy(answer: str, gold: str, share: float) -> None:
    assert rules.relaxed(answer, item(gold)) == share


@pytest.mark.parametrize(
    ("answer", "golds", "share"),
    [
        ("hello world", ["Hello World", "x"], 1.0), ("Hello  World", ["hello world"], 1.0), ("hallo", ["hello"], 0.8),
        ("abxx", ["abcd"], 0.5), ("axxx", ["abcd"], 0.0), ("", ["a"], 0.0), ("abcde", ["abxde", "zzz"], 0.8),
        ("12", ["13"], 0.5),
        # One edit in eleven characters as written, nine of them the text.
        ("a  b c d xyz", ["a  b c d xyw"], 1 - 1 / 12), ("ab", ["a   x"], 1 - 2 / 5), ("abc", ["ab        "], 0.9),
    ],
)  # fmt: skip
@pytest.mark.edge("BN14")
def test_anls(answer: str, golds: list[str], share: float) -> None:
    assert rules.anls(answer, item(*golds)) == pytest.approx(share)


@pytest.mark.edge("BN16")
@pytest.mark.parametrize(
    ("answer", "share"), [("b", 1), ("B", 1), ("(b)", 1), (" b. ", 1), ("a", 0), ("a dog", 1), ("a cat", 0), ("e", 0)]
)
def test_a_letter_alone_counts_in_either_case_in_ai2d(answer: str, share: float) -> None:
    assert SETS["ai2d_test"].rule(answer, item("B", options=ABCD)) == share


@pytest.mark.edge("BN14")
@pytest.mark.parametrize(
    ("answer", "letter"),
    [("B. C. are both seen", "B"), ("C. B. are both seen", "B"), ("C.", "C"), ("not B but C", "C")],
)
def test_mmmu_takes_the_first_of_options_with_full_stops(answer: str, letter: str) -> None:
    assert rules.last_named_letter(answer, ABCD) == letter


def test_agreement_with_ten_people() -> None:
    def by_hand(matches: int) -> float:
        """min(1, n/3), leaving each of the ten out in turn."""
        out = [min(1, (matches - 1) / 3)] * matches + [min(1, matches / 3)] * (10 - matches)
        return sum(out) / 10

    for matches in range(11):
        people = ["Two dogs"] * matches + ["a cat"] * (10 - matches)
        assert rules.vqa("2 dogs.", item(*people)) == pytest.approx(by_hand(matches))
    assert rules.vqa("the 1,000", item(*["1000"] * 10)) == 1
    assert rules.vqa("dont", item(*["don't"] * 10)) == 1


@pytest.mark.parametrize(
    ("said", "people"),
    [("$5", "5"), ("50%", "50"), ("#5", "5"), ("3:45", "3 45"), ("a&w", "a w"), ("50", ".50"), ("its", "it's"),
     ("well", "we'll"), ("hell", "he'll"), ("were", "we're"), ("id", "i'd")],
)  # fmt: skip
def test_people_do_not_agree(said: str, people: str) -> None:
    """By the marks that VQA's evaluation leaves, and its words."""
    assert rules.vqa(said, item(*[people] * 10)) == 0


@pytest.mark.parametrize(
    ("said", "people"),
    [("blue-green", "blue green"), ("stop!", "STOP"), ("u.s.", "us"), ("a/b c", "b c"), ("1,000", "1000"),
     ("theyll", "they'll"), ("10 oclock", "10 o'clock"), ("couldn'tve", "couldn't've"), ("itd've", "it'd've"),
     ("yall", "y'all"), ("whatre", "what're"), ("youd", "you'd"), ("yall'd've", "y'all'd've")],
)  # fmt: skip
def test_people_agree(said: str, people: str) -> None:
    assert rules.vqa(said, item(*[people] * 10)) == 1


@pytest.mark.parametrize(
    ("answer", "letter"),
    [
        ("Option A is wrong, so the correct answer is B.", "B"), ("Not (A), not (B), therefore (C)", "C"),
        ("Option (A) shows a cat and option (B) a dog; the picture shows the latter, so (B).", "B"),
        ("Both A and B look right, but the animal barks, so it is B", "B"), ("The choice between A and C: C", "C"),
        ("What we see here must be the sun", "C"), ("**B**", "B"), ("dog", None), ("", None),
    ],
)  # fmt: skip
def test_the_option_of_mmmu(answer: str, letter: str | None) -> None:
    for gold in ABCD:
        assert rules.mmmu(answer, item(gold, options=ABCD)) == (gold == letter)


@pytest.mark.parametrize(
    ("answer", "gold", "right"),
    [
        ("The total is 3.50 dollars", "3.5", True), ("The total is 13.5", "3.5", False), ("1.5e3", "1500", True),
        ("First I add 3 and 4. The total is 10", "3", False), ("There are 2 steps.\nSo the answer is 7", "2", False),
        ("There are 2 steps.\nSo the answer is 7", "7", True), ("no idea", "A", False), ("it is vitamin A", "A", True),
        ("x = 4", "4", True), ("1,500 km", "1500", True), ("It is a Golden Retriever.", "golden retriever", True),
    ],
)  # fmt: skip
def test_the_result_of_mmmu(answer: str, gold: str, right: bool) -> None:
    assert rules.mmmu(answer, item(gold)) == right


def test_other_rules() -> None:
    assert rules.contains("it says Coffee  Shop here", item("coffee shop")) == 1
    assert rules.contains("a b + c", item("ab+c")) == 0
    for formula in ({"dataset": "HME100k"}, {"category": "Handwritten Mathematical Expression Recognition"}):
        assert rules.contains("a b + c", item("ab+c", facts=formula)) == 1
    assert rules.typed(
        "so x = 2, and the area is 4.126", item("4.13", facts={"answer_type": "float", "precision": "2"})
    )
    assert not rules.typed("4.2", item("4.13", facts={"answer_type": "float", "precision": "2.0"}))
    assert rules.typed("There are 7.", item("7", facts={"answer_type": "integer"}))
    assert rules.exact_or_choice("Red.", item("red")) == 1


def test_paired_tests() -> None:
    assert mcnemar(10, 3) == pytest.approx(0.0922852, abs=1e-7)
    assert mcnemar(3, 10) == pytest.approx(binomtest(3, 13).pvalue)
    assert mcnemar(0, 0) == 1
    rng = np.random.default_rng(3)
    ours, theirs = ({str(i): float(x) for i, x in enumerate(rng.random(200) > bar)} for bar in (0.3, 0.5))
    test = compare(ours, theirs, is_graded=False)
    assert test.difference == pytest.approx(np.mean(list(ours.values())) - np.mean(list(theirs.values())))
    assert test.low < test.difference < test.high and test.p_value == mcnemar(test.better, test.worse)
    with pytest.raises(ValueError, match="same questions"):
        compare(ours, {}, is_graded=False)


# --- files ------------------------------------------------------------------------------------------------------------


def test_the_command_offers_every_set() -> None:
    assert tuple(SETS) == get_args(Benchmark)


def test_a_tsv_file_gives_its_pictures_to_whoever_names_them(tmp_path: Path) -> None:
    texts = [base64.b64encode(picture(shade)).decode() for shade in range(3)]
    rows = [
        {"index": "7", "image": texts[0], "question": "one\nline two\tand a tab", "A": "x", "B": "y", "answer": "B"},
        {"index": "9", "image": "7", "question": "as before", "A": "x", "B": "y", "C": "z", "answer": "A", "hint": "H"},
        {
            "index": "11",
            "image": str(texts[1:]),
            "question": "<image 2> or <image 1>?",
            "A": "x",
            "B": "y",
            "answer": "B",
        },
    ]
    items = SETS["ai2d_test"].read(write_tsv(tmp_path / "AI2D_TEST.tsv", rows))
    assert [each.id for each in items] == ["7", "9", "11"]
    assert items[0].prompt == "one\nline two\tand a tab\nA. x\nB. y\nAnswer with the letter of the right option."
    assert items[1].prompt.startswith("H\nas before\nA. x\nB. y\nC. z\n")
    assert items[1].question(1).images == [{"bytes": texts[0]}]
    asked = items[2].question(2)
    assert asked.images == [{"bytes": texts[2]}, {"bytes": texts[1]}]
    kinds = [part["type"] for part in asked.messages[-1]["content"]]
    assert kinds == ["image", "text", "image", "text"] and asked.expected == "B"


def test_mmmus_tsv_file_counts_by_its_validation_split(tmp_path: Path) -> None:
    """An open question comes as a choice of its answer and "Other Answers"."""
    image = base64.b64encode(picture(1)).decode()
    row = {"image": image, "question": "<image 1>?", "A": "left", "B": "right", "answer": "B", "category": "Art"}
    rows = [{**row, "index": str(n), "split": split} for n, split in enumerate(["dev", "validation"])]
    rows.append({**row, "index": "2", "split": "validation", "A": "['4', 'four']", "B": "Other Answers", "answer": "A"})
    choice, free = SETS["mmmu_dev_val"].read(write_tsv(tmp_path / "MMMU_DEV_VAL.tsv", rows))
    assert (choice.id, choice.options, choice.gold, choice.task) == ("1", {"A": "left", "B": "right"}, ("B",), "Art")
    assert (free.options, free.gold) == ({}, ("4", "four"))
    write_tsv(tmp_path / "MMMU_DEV_VAL.tsv", rows[:1])
    with pytest.raises(DataError, match="holds no question that counts"):
        SETS["mmmu_dev_val"].read(tmp_path)


@pytest.mark.parametrize(
    ("name", "file", "more", "task", "gold"),
    [
        ("realworldqa", "RealWorldQA.tsv", {"A": "yes", "B": "no", "answer": "B"}, "all", ("B",)),
        ("chartqa_test", "ChartQA_TEST.tsv", {"split": "test_human", "answer": "12"}, "test_human", ("12",)),
        ("docvqa_val", "DocVQA_VAL.tsv", {"answer": "['a', 'b c']"}, "all", ("a", "b c")),
        ("textvqa_val", "TextVQA_VAL.tsv", {"answer": str(["x"] * 10)}, "all", ("x",) * 10),
        ("ocrbench", "OCRBench.tsv", {"category": "Scene", "answer": "['AB']"}, "Scene", ("AB",)),
    ],
)
def test_sets_that_vlmevalkit_publishes(
    name: str, file: str, more: dict[str, str], task: str, gold: tuple[str, ...], tmp_path: Path
) -> None:
    row = {"index": "4", "image": base64.b64encode(picture(1)).decode(), "question": "what?", **more}
    (found,) = SETS[name].read(write_tsv(tmp_path / file, [row]))
    assert (found.id, found.task, found.gold) == ("4", task, gold)
    asked = found.question(0)
    assert (len(asked.images), asked.expected) == (1, gold[0]) and "what?" in asked.text


def test_mmbench_turns_the_options(tmp_path: Path) -> None:
    row = {"index": "3", "question": "q", "A": "one", "B": "two", "C": "three", "answer": "B", "l2-category": "logic"}
    row["image"] = base64.b64encode(picture(1)).decode()
    items = list(SETS["mmbench_dev"].read(write_tsv(tmp_path / "MMBench_DEV_EN.tsv", [row])))
    assert [dict(sorted(each.options.items())) for each in items] == [
        {"A": "one", "B": "two", "C": "three"},
        {"A": "three", "B": "one", "C": "two"},
        {"A": "two", "B": "three", "C": "one"},
    ]
    assert [each.gold for each in items] == [("B",), ("C",), ("A",)]
    assert {each.group for each in items} == {"3"} and items[1].task == "logic"


def test_rotations_of_a_published_file_are_not_turned_again(tmp_path: Path) -> None:
    """Rows n + 1,000,000 and so on; a question is right where all of them are."""
    options = ["one", "two", "three"]
    rows = []
    for turn in range(3):
        turned = options[turn:] + options[:turn]
        letters = dict(zip("ABC", turned, strict=True))
        gold = next(letter for letter, text in letters.items() if text == "two")
        rows.append(
            {"index": str(3 + 1_000_000 * turn), "question": "q", **letters, "answer": gold, "l2-category": "x"}
        )
        rows[-1]["image"] = base64.b64encode(picture(1)).decode() if turn == 0 else "3"
    rows.append({**rows[0], "index": "7"})
    items = list(SETS["mmbench_dev"].read(write_tsv(tmp_path / "MMBench_DEV_EN.tsv", rows)))
    assert [(each.id, each.group) for each in items] == [("3", "3"), ("1000003", "3"), ("2000003", "3"), ("7", "7")]
    assert [each.options[each.gold[0]] for each in items] == ["two"] * 4
    assert items[1].media()


def test_what_a_judge_says_is_the_nearest_option() -> None:
    """By edits that are counted by hand: 13 is two from 135°, three from 145°."""
    angles, colours = {"A": "145°", "B": "135°", "C": "165°"}, {"A": "red", "B": "blue"}
    assert [rules.nearest_option(said, angles) for said in ("145", "13", "(C)", "")] == ["A", "B", "(C)", ""]
    assert [rules.nearest_option(said, colours) for said in ("bleu", "rot", "B")] == ["B", "A", "B"]


def test_json_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, label in (("human", "12"), ("augmented", "blue")):
        records = [{"imgname": "1.png", "query": f"what of {name}?", "label": label}]
        (tmp_path / f"test_{name}.json").write_text(json.dumps(records))
    charts = SETS["chartqa_test"].read(tmp_path)
    assert [(each.task, each.gold) for each in charts] == [("augmented", ("blue",)), ("human", ("12",))]
    assert charts[0].media() == {"images": [str(tmp_path / "png/1.png")]}
    record = {"questionId": 4, "question": "who?", "image": "documents/a.png", "answers": ["x", "X."]}
    (tmp_path / "val_v1.0_withQT.json").write_text(json.dumps({"data": [record]}))
    (document,) = SETS["docvqa_val"].read(tmp_path)
    assert (document.id, document.gold) == ("4", ("x", "X."))
    record = {"question_id": 5, "question": "sign?", "image_id": "ab", "answers": ["stop"] * 10}
    (tmp_path / "TextVQA_0.5.1_val.json").write_text(json.dumps({"data": [record]}))
    (scene,) = SETS["textvqa_val"].read(tmp_path)
    assert scene.media() == {"images": [str(tmp_path / "train_images/ab.jpg")]}
    monkeypatch.chdir(tmp_path.parent)
    (beside,) = SETS["textvqa_val"].read(Path(tmp_path.name))
    assert beside.media() == scene.media()  # what is relative there is relative to the set


def write_parquet(path: Path, rows: Sequence[dict[str, Any]], pictures: Sequence[str]) -> None:
    import datasets  # a second

    path.parent.mkdir(parents=True, exist_ok=True)
    table = datasets.Dataset.from_list(list(rows))
    for name in pictures:
        table = table.cast_column(name, datasets.Image())
    table.to_parquet(path)


def test_parquet_sets(tmp_path: Path) -> None:
    shown = {"bytes": picture(3), "path": None}
    mmmu = {"question_type": "multiple-choice", "options": "['left', 'right']", "image_1": shown, "image_2": shown}
    rows = [
        {**mmmu, "id": "validation_Art_Theory_1", "question": "<image 1> is?", "answer": "B"},
        {**mmmu, "id": "validation_Art_2", "question": "how many?", "answer": "['4', 'four']", "question_type": "open"},
    ]
    write_parquet(tmp_path / "mmmu/Art/validation-00000-of-00001.parquet", rows, ["image_1", "image_2"])
    choice, free = SETS["mmmu_dev_val"].read(tmp_path / "mmmu")
    assert (choice.task, choice.options, choice.gold) == ("Art_Theory", {"A": "left", "B": "right"}, ("B",))
    assert (free.options, free.gold, len(free.question(1).images)) == ({}, ("4", "four"), 2)
    drawn = {"image": shown, "question": "which?", "options": ["a", "b", "c"], "answer": "2"}
    write_parquet(tmp_path / "drawn/data/test-0.parquet", [drawn], ["image"])
    (one,) = SETS["ai2d_test"].read(tmp_path / "drawn")
    assert (one.gold, one.options) == (("C",), {"A": "a", "B": "b", "C": "c"})
    read = {"image": shown, "question": "what is written?", "answer": ["AB"], "question_type": "Scene Text"}
    write_parquet(tmp_path / "read/data/test-0.parquet", [{**read, "dataset": "IIIT5K"}], ["image"])
    (one,) = SETS["ocrbench"].read(tmp_path / "read")
    assert (one.gold, one.task, one.facts["dataset"]) == (("AB",), "Scene Text", "IIIT5K")
    vista = {"pid": "1", "question": "side?", "image": "images/1.jpg", "decoded_image": shown, "answer": "right"}
    vista |= {"choices": ["left", "right"], "metadata": {"task": "geometry"}, "answer_type": "text"}
    write_parquet(tmp_path / "vista/testmini-00000.parquet", [vista], ["decoded_image"])
    (one,) = SETS["mathvista_testmini"].read(tmp_path / "vista")
    assert (one.task, one.gold) == ("geometry", ("B",))
    world = {"image": shown, "question": "Which?\nA. red\nB. green\nAnswer with a letter.", "answer": "A"}
    write_parquet(tmp_path / "world/test-0.parquet", [world], ["image"])
    (one,) = SETS["realworldqa"].read(tmp_path / "world")
    assert one.options == {"A": "red", "B": "green"}
    film = {"videoID": "xy", "question_id": "1-1", "duration": "short", "question": "who?", "answer": "B"}
    film["options"] = ["A. he", "B. she"]
    write_parquet(tmp_path / "films/videomme/test-00000.parquet", [film], [])
    (one,) = SETS["videomme"].read(tmp_path / "films")
    assert one.media() == {"videos": [str(tmp_path / "films/data/xy.mp4")]}


def test_what_is_not_the_set_is_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file or folder"):
        SETS["docvqa_val"].read(tmp_path / "nowhere")
    with pytest.raises(UsageError, match=r"holds no file of DocVQA.*[\s\S]*val\*_withQT.json or DocVQA_VAL\*.tsv"):
        SETS["docvqa_val"].read(tmp_path)
    (tmp_path / "val_withQT.json").write_text('{"data": [{"questionId": 1}]}')
    with pytest.raises(DataError, match=r"val_withQT.json:1 +has no '"):
        SETS["docvqa_val"].read(tmp_path)
    (tmp_path / "val_withQT.json").write_text("[")
    with pytest.raises(DataError, match="cannot be read"):
        SETS["docvqa_val"].read(tmp_path)
    path = tmp_path / "OCRBench.tsv"
    path.write_text("index\tquestion\timage\n1\twhat?\n")
    with pytest.raises(DataError, match=r"OCRBench.tsv:1 +cannot be read as tab-separated text"):
        SETS["ocrbench"].read(path)
    write_tsv(path, [{"index": "1", "question": "what?", "image": "5"}])
    with pytest.raises(DataError, match=r"OCRBench.tsv:1 +has no column 'answer'"):
        SETS["ocrbench"].read(path)[0]


# --- the whole --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_qwen3_vl(tmp_path_factory.mktemp("model"), tie=False, initializer_range=0.4)


def evaluated(*words: object) -> dict[str, Any]:
    result = CliRunner().invoke(command, [*map(str, words), "--max-new-tokens", "3", "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found


def test_a_model_is_scored_and_compared(model: Path, tmp_path: Path) -> None:
    rows = [
        {
            "index": str(i),
            "image": base64.b64encode(picture(20 * i)).decode(),
            "question": f"what is {i}?",
            "answer": "?",
        }
        for i in range(6)
    ]
    for number, row in enumerate(rows):
        row |= {"category": f"kind {number % 2}", "answer": "?"}
    path = write_tsv(tmp_path / "OCRBench.tsv", rows)
    asked = [model, "--benchmark", "ocrbench", "--data", path, "--batch-size", 4]
    evaluated(*asked, "--out", tmp_path / "first")
    said = [json.loads(line)["given"] for line in (tmp_path / "first/samples.jsonl").read_text().splitlines()]
    assert any(said), "the model says something"
    # What it says becomes what is right, but for rows 1 and 4.
    for number, row in enumerate(rows):
        row["answer"] = str([said[number] or "", "or this"]) if number not in (1, 4) else "never said"
    write_tsv(path, rows)
    found = evaluated(*asked, "--out", tmp_path / "second")
    assert (found["overall"]["correct"], found["overall"]["n"]) == (4, 6)
    assert {name: task["correct"] for name, task in found["tasks"].items()} == {"kind 0": 2, "kind 1": 2}
    compared = evaluated(*asked, "--out", tmp_path / "second", "--against", tmp_path / "first")
    assert (compared["against"]["better"], compared["against"]["worse"]) == (4, 0)
    assert compared["against"]["p_value"] == 0.125


def judged_run(
    server: JudgingServer, monkeypatch: pytest.MonkeyPatch, given: Sequence[str], name: str, data: Path, **more: Any
) -> evaluate.PublishedResult:
    """With answers that are made up."""
    answers = {place: Answer((), text, finished=True) for place, text in enumerate(given)}
    monkeypatch.setattr(evaluate, "_answers_by_place", lambda *_: answers)
    judge = {"judge": f"http://127.0.0.1:{server.server_port}/v1", "judge_model": "large"}
    if not more.pop("judged", True):
        judge = {}
    return evaluate.run(EvaluateRequest(str(data.parent / "model"), benchmark=name, data=data, **judge, **more))


def test_a_judge_finds_what_the_authors_ask_it_for(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MathVista's is asked unless the answer stands alone; MMBench's where rules find no option."""
    monkeypatch.setattr(judging_answers, "RETRIES", 0)
    (tmp_path / "model").symlink_to(model)
    asked = {"question": "side?", "image": "1.jpg", "decoded_image": {"bytes": picture(3), "path": None}}
    sides = ["left", "right"]
    golds = [(sides, "right", "text"), (None, "12", "integer"), (None, "1.5", "float"), (None, "7", "integer")]
    rows = [
        {**asked, "pid": str(number), "choices": choices, "answer": answer, "answer_type": kind, "precision": 1.0}
        for number, (choices, answer, kind) in enumerate(golds)
    ]
    write_parquet(tmp_path / "vista/testmini-0.parquet", rows, ["decoded_image"])
    given = ["<think>B</think>it is on your left hand, so not A", "12.", "3 / 2 = 1.5, and 2 are left", "7 of 9"]
    answers = {"spider": "yes", "not A": "**B**", "3 / 2": "1.5", "7 of 9": ""}
    with judging(answers) as server:
        run = partial(judged_run, server, monkeypatch, given, "mathvista_testmini", tmp_path / "vista")
        found = run(out=tmp_path / "out")
        texts = [request["messages"][0]["content"][0]["text"] for _, request in server.asked]
        assert len(texts) == 1 + 3 and not any("think" in text for text in texts)
        (side,), (quotient,) = ([text for text in texts if part in text] for part in ("not A", "3 / 2"))
        assert "the letter of the option" in side and "A. left" in side and "number in digits" in quotient
        samples = [json.loads(line) for line in (tmp_path / "out/samples.jsonl").read_text().splitlines()]
        assert [sample["share"] for sample in samples] == [1.0, 1.0, 1.0, 0.0]
        assert [sample["judge"] and sample["judge"]["said"] for sample in samples] == ["**B**", None, "1.5", None]
        assert samples[1]["judge"] is None and "KeyError" in samples[3]["judge"]["failure"]
        assert found.facts["judge"]["model"] == "large" and "failed at 1" in found.facts["note"]
        run(out=tmp_path / "out", against=tmp_path / "out")  # over its own results
        by_rules = run(out=tmp_path / "rules", judged=False)
        assert by_rules.overall.to_dict()["correct"] == 1 < found.overall.to_dict()["correct"]
        with pytest.raises(UsageError, match="was scored without a judge"):
            run(out=tmp_path / "out", against=tmp_path / "rules")

    row = {"index": "1", "question": "which?", "A": "red", "B": "None", "answer": "A", "category": "colour"}
    path = write_tsv(tmp_path / "MMBench_DEV_EN.tsv", [row])
    with judging({"spider": "yes", "first": "A", "nothing": "None."}) as server:
        bench = partial(judged_run, server, monkeypatch, name="mmbench_dev", data=path)
        assert bench(given=["the first", "B"], out=tmp_path / "right").overall.to_dict()["correct"] == 1
        assert len(server.asked) == 1 + 1
        row["answer"] = "B"
        write_tsv(path, [row])
        assert bench(given=["B", "nothing"], out=tmp_path / "wrong").overall.to_dict()["correct"] == 0
    with judging({"spider": "yes", "nothing": "yes indeed"}) as server:
        found = judged_run(server, monkeypatch, ["B", "nothing"], "mmbench_dev", path, out=tmp_path / "told")
        assert "failed at 1" in found.facts["note"]
        samples = [json.loads(line) for line in (tmp_path / "told/samples.jsonl").read_text().splitlines()]
        assert samples[1]["judge"]["failure"] == "it says 'yes indeed', which names no option"


def test_a_judge_is_for_sets_whose_authors_ask_one(model: Path, tmp_path: Path) -> None:
    assert {name for name, one in SETS.items() if one.asks_judge is not None} == set(JUDGED)
    words = ["--benchmark", "docvqa_val", "--data", str(tmp_path), "--judge", "http://x/v1", "--judge-model", "m"]
    with pytest.raises(UsageError, match=r"docvqa_val score by their rule alone.*mmbench_dev and mathvista_testmini"):
        CliRunner().invoke(command, [str(model), *words], catch_exceptions=False)
    request = EvaluateRequest(str(model), benchmark="docvqa_val", data=tmp_path, judge="http://x/v1", judge_model="m")
    with pytest.raises(UsageError, match="DocVQA score by their rule alone"):
        evaluate.run(request)


def test_options_that_do_not_go_together(model: Path, tmp_path: Path) -> None:
    for words, message in (
        (["--benchmark", "ocrbench"], "the set's folder is not given"),
        (["--against", "x", "--data", "y", "--loss"], "nothing is generated with --loss"),
        (["--benchmark", "ocrbench", "--data", "x", "--metric", "wer"], "does not go with --benchmark"),
        (["--benchmark", "ocrbench", "--data", "x", "--loss"], "does not go with --benchmark"),
    ):
        with pytest.raises(UsageError, match=message):
            CliRunner().invoke(command, [str(model), *words], catch_exceptions=False)
    (tmp_path / "samples.jsonl").write_text('{"id": 1}\n')
    rows = [{"index": "1", "question": "q", "answer": "x"}]
    path = write_tsv(tmp_path / "OCRBench.tsv", rows)
    with pytest.raises(DataError, match="holds no results of --benchmark"):
        words = ["--benchmark", "ocrbench", "--data", str(path), "--against", str(tmp_path)]
        CliRunner().invoke(command, [str(model), *words], catch_exceptions=False)


def test_the_page_names_every_set_and_its_files() -> None:
    page = (Path(__file__).parents[2] / "docs/evaluation.md").read_text(encoding="utf-8")
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in page.splitlines()
        if line.startswith("| `") and "--" not in line
    ]
    told = {
        name.strip("`"): (title, re.findall(r"`([^`]*\.(?:tsv|json|parquet))`", files))
        for name, title, files, _ in rows
    }
    assert told == {name: (one.title, list(one.layouts)) for name, one in SETS.items()}
