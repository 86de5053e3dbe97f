"""The published sets that `mm evaluate --benchmark` knows: their files, and the rule of their authors.

Names and columns are those under which the authors, or VLMEvalKit in its tab-separated files, give them out.
"""

from __future__ import annotations

import ast
import re
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from mindspeed_mm.core.errors import DataError, UsageError
from mindspeed_mm.core.json_file import parse_json
from mindspeed_mm.fsdp.sampling.answers.scoring import GradedScore, Score, graded, score
from mindspeed_mm.tasks.evaluate.published import rules
from mindspeed_mm.tasks.evaluate.published.item import Item, with_options
from mindspeed_mm.tasks.evaluate.published.tables import ReaderTable, Row, SetTable, TsvTable

_LETTERS = string.ascii_uppercase
_REFERENCE_CHARACTERS = 64
"""A shorter picture of a TSV file is the index of another row, whose picture it is."""
_OPTION_LINE = re.compile(r"^\s*(?P<letter>[A-Z])[.)](?P<text>.*)$", re.MULTILINE)
_PICTURES = ("image", *(f"image_{number}" for number in range(1, 8)))
_PUBLISHED = "Take the file as it is published."
_CHOOSE, _SHORT = "Answer with the letter of the right option.", "Answer with a single word or phrase."

Rule = Callable[[str, Item], float]
MakeItems = Callable[[Path, Sequence[Path]], Sequence[Item]]


@dataclass(frozen=True)
class PublishedSet:
    """Describes a published evaluation set: its files, and how its authors score answers."""

    title: str
    layouts: Mapping[str, MakeItems]
    """Pattern of files in its folder → what reads them. The first that is there counts."""
    rule: Rule
    note: str = ""
    """What a reader of its figures must know."""
    asks_judge: rules.AsksJudge | None = None
    """When its authors let a language model find the answer; None: never."""
    takes_nearest: bool = False
    """Whether, where a judge's reply names no option, the one that it is nearest to by edit distance is taken."""
    is_graded: bool = False
    """Whether answers are right by degrees."""

    def score(self, shares: Sequence[float]) -> Score | GradedScore:
        """Return the score of all answers: the mean of their shares (0 to 1) if the set is graded, else how many are 1.

        Raises:
            ValueError: There are no answers.
        """
        if self.is_graded:
            return graded(shares)
        return score(share == 1.0 for share in shares)

    def read(self, data: Path) -> Sequence[Item]:
        """The questions of a folder, or of a single file of it.

        Raises:
            DataError: A file is broken, or holds no question.
            UsageError: None of the set's files is there.
        """
        if not data.exists():
            way_out = f"Relative paths start at '{Path.cwd()}'."
            raise UsageError("there is no such file or folder", where=str(data), key="--data", way_out=way_out)
        folder = data if data.is_dir() else data.parent
        for pattern, items in self.layouts.items():
            if files := _files_of(data, pattern):
                found = items(folder.absolute(), files)  # relative media are looked for in the folder of the rows
                if not found:
                    raise DataError("holds no question that counts", where=str(files[0]), way_out=_PUBLISHED)
                return found
        raise UsageError(
            f"holds no file of {self.title}",
            where=str(data),
            key="--data",
            way_out=f"Its files are {' or '.join(self.layouts)}.",
        )


def _files_of(data: Path, pattern: str) -> list[Path]:
    """Those of a folder that a pattern names, or the file that is named itself."""
    if data.is_file():
        return [data] if data.match(pattern) else []
    return sorted(data.glob(pattern))


class TableItems(Sequence[Item]):
    """Items of a table's rows, each made when it is asked for.

    Args:
        table: The rows.
        make: (table, row, rotation) → item.
        rotations: Of a row: how many items it gives.
    """

    def __init__(
        self,
        table: SetTable,
        make: Callable[[SetTable, int, int], Item],
        rotations: Callable[[Row], int] = lambda _: 1,
    ) -> None:
        self._table, self._make = table, make
        self._places: list[tuple[int, int]] = []
        for row, light in enumerate(table.rows):
            self._places += [(row, turn) for turn in range(rotations(light))]

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: Any) -> Any:
        row, turn = self._places[index]
        try:
            return self._make(self._table, row, turn)
        except (KeyError, ValueError, SyntaxError) as error:
            what = f"has no column {error}" if isinstance(error, KeyError) else f"cannot be read: {error}"
            raise DataError(what, where=self._table.where(row), way_out=_PUBLISHED) from error


def _tsv(make: Callable[[SetTable, int, int], Item], rotations: Any = lambda _: 1) -> MakeItems:
    return lambda _, files: TableItems(TsvTable(files[0], ["image"]), make, rotations)


def _parquet(make: Callable[[SetTable, int, int], Item]) -> MakeItems:
    return lambda _, files: TableItems(ReaderTable(list(files), _PICTURES), make)


def _asked(question: str, options: Mapping[str, str]) -> str:
    """A question with what there is to choose from, and how to answer."""
    return f"{with_options(question, options)}\n{_CHOOSE if options else _SHORT}"


# --- tab-separated files ----------------------------------------------------------------------------------------------


def _options_of(row: Row) -> dict[str, str]:
    return {letter: str(row[letter]) for letter in _LETTERS[:9] if letter in row}


def _tsv_pictures(table: SetTable, index: int) -> dict[str, list[object]]:
    """The row's pictures: base64 text, a list of it, or another row's."""
    cell = table.media(index, "image")
    if cell is not None and len(cell) <= _REFERENCE_CHARACTERS:
        numbers = {str(row["index"]): at for at, row in enumerate(table.rows)}
        if cell not in numbers:
            raise ValueError(f"its picture is that of row {cell}, which is not there")
        cell = table.media(numbers[cell], "image")
    if cell is None:
        return {}
    texts = [cell]
    if cell.startswith("["):
        texts = ast.literal_eval(cell)
    return {"images": [{"bytes": text} for text in texts]}


def _tsv_choice(table: SetTable, index: int, turn: int) -> Item:
    """A question with options; the hint comes first. In turn n every option has moved on by n letters."""
    row = table.rows[index]
    options = _options_of(row)
    question = "\n".join([row[key] for key in ("hint", "question") if key in row])
    # The letter that each option has in this turn, by the one that it has in the file.
    letters = list(options)
    turned = dict(zip(letters, letters[turn:] + letters[:turn], strict=True))
    shown = {turned[letter]: text for letter, text in options.items()}
    name, gold = str(row["index"]), str(row["answer"])
    if turn:
        name = f"{name} turned by {turn}"
    if options:
        if gold not in turned:
            raise ValueError(f"its answer '{gold}' is not one of the options")
        gold = turned[gold]
    return Item(
        id=name,
        task=str(row.get("l2-category", row.get("category", "all"))),
        prompt=_asked(question, dict(sorted(shown.items()))),
        gold=(gold,),
        media=partial(_tsv_pictures, table, index),
        options=shown,
        group=str(row["index"]),
    )


def _tsv_open(table: SetTable, index: int, _: int) -> Item:
    row = table.rows[index]
    return Item(
        id=str(row["index"]),
        task=str(row.get("category", row.get("split", "all"))),
        prompt=f"{row['question']}\n{_SHORT}",
        gold=_answers(row["answer"]),
        media=partial(_tsv_pictures, table, index),
        facts={"category": str(row.get("category", ""))},
    )


def _tsv_mmmu(table: SetTable, index: int, turn: int) -> Item:
    """Open questions come as a choice of two, in which A is the answer and B says "Other Answers"."""
    row = table.rows[index]
    if row.get("question_type") == "open" or row.get("B") == "Other Answers":
        return replace(_tsv_open(table, index, turn), gold=_answers(row.get("A", row["answer"])))
    return _tsv_choice(table, index, turn)


def _answers(cell: object) -> tuple[str, ...]:
    """One answer, or a list of them as text."""
    if isinstance(cell, list):
        return tuple(map(str, cell))
    text = str(cell)
    if not (text.startswith("[") and text.endswith("]")):
        return (text,)
    try:
        listed = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return (text,)
    return tuple(map(str, listed)) or ("",)


# --- parquet files ----------------------------------------------------------------------------------------------------


def _parquet_pictures(table: SetTable, index: int) -> dict[str, list[object]]:
    pictures = []
    for name in _PICTURES:
        picture = table.media(index, name)
        if picture is not None:
            pictures.append(picture)
    return {"images": pictures}


def _parquet_choice(table: SetTable, index: int, _: int) -> Item:
    """AI2D: `question`, `options`, `answer` as the option's number."""
    row = table.rows[index]
    options = dict(zip(_LETTERS, map(str, row["options"]), strict=False))
    return Item(
        id=str(index + 1),
        task="all",
        prompt=_asked(row["question"], options),
        gold=(_LETTERS[int(row["answer"])],),
        media=partial(_parquet_pictures, table, index),
        options=options,
    )


def _parquet_mmmu(table: SetTable, index: int, _: int) -> Item:
    row = table.rows[index]
    options: dict[str, str] = {}
    gold = _answers(row["answer"])
    if row["question_type"] == "multiple-choice":
        options = dict(zip(_LETTERS, _answers(row["options"]), strict=False))
        gold = (row["answer"],)
    return Item(
        id=row["id"],
        task=row["id"].removeprefix("dev_").removeprefix("validation_").rpartition("_")[0],
        prompt=_asked(row["question"], options),
        gold=gold,
        media=partial(_parquet_pictures, table, index),
        options=options,
    )


def _parquet_open(table: SetTable, index: int, _: int) -> Item:
    row = table.rows[index]
    return Item(
        id=str(row.get("id", index + 1)),
        task=str(row.get("question_type", "all")),
        prompt=f"{row['question']}",
        gold=_answers(row["answer"]),
        media=partial(_parquet_pictures, table, index),
        facts={"dataset": str(row.get("dataset", ""))},
    )


def _parquet_world(table: SetTable, index: int, _: int) -> Item:
    """RealWorldQA: options and the way to answer stand in the question's own text."""
    row = table.rows[index]
    gold = str(row["answer"])
    options = {}
    for found in _OPTION_LINE.finditer(row["question"]):
        options[found["letter"]] = found["text"].strip()
    return Item(
        id=str(index + 1),
        task="all",
        prompt=row["question"],
        gold=(gold,),
        media=partial(_parquet_pictures, table, index),
        options=options if gold in options else {},
    )


def _parquet_vista(table: SetTable, index: int, _: int) -> Item:
    row = table.rows[index]
    options = dict(zip(_LETTERS, map(str, row.get("choices") or ()), strict=False))
    gold = str(row["answer"])
    for letter, text in options.items():
        if text == gold:
            gold = letter
            break
    return Item(
        id=str(row["pid"]),
        task=str((row.get("metadata") or {}).get("task", row.get("question_type", "all"))),
        prompt=_asked(row["question"], options),
        gold=(gold,),
        media=lambda: {"images": [table.media(index, "decoded_image") or row["image"]]},
        options=options,
        facts={key: str(row[key]) for key in ("answer_type", "precision") if row.get(key) is not None},
    )


def _parquet_films(folder: Path, files: Sequence[Path]) -> Sequence[Item]:
    """Video-MME without subtitles: films lie as `data/<videoID>.mp4`."""

    def make(table: SetTable, index: int, _: int) -> Item:
        row = table.rows[index]
        options = {}
        for option in row["options"]:
            line = str(option).strip()
            options[line[0]] = line[2:].strip()
        return Item(
            id=str(row["question_id"]),
            task=str(row["duration"]),
            prompt=_asked(row["question"], options),
            gold=(str(row["answer"]),),
            media=lambda: {"videos": [str(folder / "data" / f"{row['videoID']}.mp4")]},
            options=options,
        )

    return TableItems(ReaderTable(list(files), ()), make)


# --- JSON files -------------------------------------------------------------------------------------------------------


def _records(path: Path, key: str) -> list[Row]:
    try:
        found = parse_json(path.read_text(encoding="utf-8"))
        if key:
            found = found[key]
        if isinstance(found, list) and all(isinstance(record, dict) for record in found):
            return found
        raise ValueError("it holds no list of questions")
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"cannot be read: {error}", where=str(path), way_out=_PUBLISHED) from error


def _picture(path: Path) -> dict[str, list[object]]:
    return {"images": [str(path)]}


def _json_items(path: Path, key: str, make: Callable[[int, Row], Item]) -> list[Item]:
    items = []
    for number, record in enumerate(_records(path, key), start=1):
        try:
            items.append(make(number, record))
        except KeyError as error:
            raise DataError(f"has no {error}", where=f"{path}:{number}", way_out="Take the published file.") from error
    return items


def _json_charts(folder: Path, files: Sequence[Path]) -> Sequence[Item]:
    """`test_human.json` and `test_augmented.json`, charts in `png/`."""

    def make(task: str, number: int, record: Row) -> Item:
        return Item(
            id=f"{task}-{number}",
            task=task,
            prompt=f"{record['query']}\n{_SHORT}",
            gold=(str(record["label"]),),
            media=partial(_picture, folder / "png" / record["imgname"]),
        )

    items = []
    for file in files:
        items += _json_items(file, "", partial(make, file.stem.removeprefix("test_")))
    return items


def _json_documents(folder: Path, files: Sequence[Path]) -> Sequence[Item]:
    def make(_: int, record: Row) -> Item:
        return Item(
            id=str(record["questionId"]),
            task="all",
            prompt=f"{record['question']}\n{_SHORT}",
            gold=tuple(map(str, record["answers"])),
            media=partial(_picture, folder / record["image"]),
        )

    return _json_items(files[0], "data", make)


def _json_scene_texts(folder: Path, files: Sequence[Path]) -> Sequence[Item]:
    def make(_: int, record: Row) -> Item:
        return Item(
            id=str(record["question_id"]),
            task="all",
            prompt=f"{record['question']}\n{_SHORT}",
            gold=tuple(map(str, record["answers"])),
            media=partial(_picture, folder / "train_images" / f"{record['image_id']}.jpg"),
        )

    return _json_items(files[0], "data", make)


_ROTATED = 1_000_000
"""Published files of MMBench hold the rotations of question n as rows n + 1,000,000, n + 2,000,000 …"""


def _circular(_: Path, files: Sequence[Path]) -> Sequence[Item]:
    """Questions of MMBench in every rotation of their options: those of the file, or ours where it has none."""
    table = TsvTable(files[0], ["image"])
    if any(_number_of(row) >= _ROTATED for row in table.rows):
        return TableItems(table, _tsv_rotated)
    return TableItems(table, _tsv_choice, lambda row: max(1, len(_options_of(row))))


def _tsv_rotated(table: SetTable, index: int, _: int) -> Item:
    return replace(_tsv_choice(table, index, 0), group=str(_number_of(table.rows[index]) % _ROTATED))


def _number_of(row: Row) -> int:
    text = str(row["index"])
    return int(text) if text.isdecimal() else 0


def _of_validation(row: Row) -> int:
    """MMMU's figures are those of its validation split; the file holds both."""
    return 0 if row.get("split") == "dev" else 1


SETS: dict[str, PublishedSet] = {
    "ai2d_test": PublishedSet(
        "AI2D",
        {"AI2D_TEST*.tsv": _tsv(_tsv_choice), "**/test-*.parquet": _parquet(_parquet_choice)},
        rules.choice_in_any_case,
    ),
    "mmmu_dev_val": PublishedSet(
        "MMMU",
        {
            "MMMU_DEV_VAL*.tsv": _tsv(_tsv_mmmu, _of_validation),
            "**/validation-*.parquet": _parquet(_parquet_mmmu),
            "**/dev-*.parquet": _parquet(_parquet_mmmu),
        },
        rules.mmmu,
        "Of the validation split. An answer in which no option is found counts as wrong; the authors draw an option.",
    ),
    "chartqa_test": PublishedSet(
        "ChartQA", {"test_*.json": _json_charts, "ChartQA_TEST*.tsv": _tsv(_tsv_open)}, rules.relaxed
    ),
    "docvqa_val": PublishedSet(
        "DocVQA", {"val*_withQT.json": _json_documents, "DocVQA_VAL*.tsv": _tsv(_tsv_open)}, rules.anls, is_graded=True
    ),
    "textvqa_val": PublishedSet(
        "TextVQA",
        {"TextVQA*_val.json": _json_scene_texts, "TextVQA_VAL*.tsv": _tsv(_tsv_open)},
        rules.vqa,
        is_graded=True,
    ),
    "mmbench_dev": PublishedSet(
        "MMBench",
        {"MMBench*DEV*.tsv": _circular},
        rules.choice,
        "Circular: a question counts as right when every rotation of its options is.",
        rules.names_no_option,
    ),
    "mathvista_testmini": PublishedSet(
        "MathVista",
        {
            "**/testmini-*.parquet": lambda _, files: TableItems(
                ReaderTable(list(files), ["decoded_image"]), _parquet_vista
            )
        },
        rules.typed,
        "By rules alone: the authors let a language model find the answer in the text (--judge), which gives higher "
        "figures.",
        rules.says_more,
        takes_nearest=True,
    ),
    "ocrbench": PublishedSet(
        "OCRBench", {"OCRBench*.tsv": _tsv(_tsv_open), "**/test-*.parquet": _parquet(_parquet_open)}, rules.contains
    ),
    "realworldqa": PublishedSet(
        "RealWorldQA",
        {"RealWorldQA*.tsv": _tsv(_tsv_choice), "**/test-*.parquet": _parquet(_parquet_world)},
        rules.exact_or_choice,
    ),
    "videomme": PublishedSet("Video-MME", {"**/test-*.parquet": _parquet_films}, rules.choice, "Without subtitles."),
}
"""By the name that upstream's evaluation, or the set's own files, use."""
