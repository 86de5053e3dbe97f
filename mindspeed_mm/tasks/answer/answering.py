"""Many questions, one after the other: progress with the time left, and a file of answers that can be continued."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mindspeed_mm.core.artifacts import append_jsonl, atomic_write_text
from mindspeed_mm.core.errors import DataError
from mindspeed_mm.core.garbage import passed_over_by_collection
from mindspeed_mm.core.json_file import JsonObject, parse_json
from mindspeed_mm.fsdp.data.data_utils.media import MediaLoader
from mindspeed_mm.fsdp.sampling.answers.choosing import Sampling
from mindspeed_mm.fsdp.sampling.answers.generator import Generator
from mindspeed_mm.fsdp.sampling.answers.live import Answer
from mindspeed_mm.fsdp.sampling.answers.questions import Question
from mindspeed_mm.fsdp.utils.ranks import Ranks
from mindspeed_mm.fsdp.utils.work_progress import WorkProgress

_LINE_START = '{"row": '
WAIT_S = 7 * 24 * 3600.0
"""Ranks wait for one another at the end, and one may have much more to do."""


class AnswerFile:
    """Answers as JSON lines, appended batch by batch; what is there already is not asked again.

    Args:
        path: The file. Its folder is made when the first answer comes.
        fingerprint: Of model and settings; each line bears it, so that answers of two models are never mixed.
    """

    def __init__(self, path: Path, fingerprint: str) -> None:
        self.path = path
        self._fingerprint = fingerprint
        self.records: dict[int, JsonObject] = {}
        if path.exists():
            self._read()

    def missing(self, questions: Sequence[Question]) -> list[Question]:
        """The questions that the file has no answer to.

        Raises:
            DataError: An answer in the file belongs to another question: the input has changed.
        """
        rows = {question.row: question for question in questions}
        for row, record in self.records.items():
            if row not in rows or (record["id"], record["question"]) != (rows[row].id, rows[row].text):
                raise self._foreign(f"row {row} answers '{record['question']}', which is not that row of the input")
        return [question for question in questions if question.row not in self.records]

    def append(self, answered: Sequence[tuple[Question, Answer]], **more: str) -> None:
        """Add a batch of answers.

        Args:
            answered: Questions with their answers.
            more: Further keys of each.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        batch = {}
        for question, answer in answered:
            batch[question.row] = {
                "row": question.row,
                "id": question.id,
                "question": question.text,
                "images": question.image_names,
                "answer": answer.text,
                "finished": answer.finished,
                **more,
                "model": self._fingerprint,
            }
        append_jsonl(self.path, *batch.values())
        self.records |= batch

    def sort(self) -> None:
        """Put the lines into the order of the input."""
        lines = [json.dumps(self.records[row], ensure_ascii=False) + "\n" for row in sorted(self.records)]
        atomic_write_text(self.path, "".join(lines))

    def _read(self) -> None:
        for line in self.path.read_text(encoding="utf-8", errors="replace").split("\n"):  # answers may hold U+2028
            try:
                record = parse_json(line)
            except ValueError:
                if not line.startswith(_LINE_START[: len(line)]):
                    raise self._foreign("it was not written by mm infer") from None
                continue  # a line that a crash cut short: its question is asked again
            if not isinstance(record, dict) or "row" not in record or "model" not in record:
                raise self._foreign("it was not written by mm infer")
            if record["model"] != self._fingerprint:
                raise self._foreign("it holds answers of another model or with other settings")
            self.records[record["row"]] = record

    def _foreign(self, why: str) -> DataError:
        return DataError(
            f"cannot be continued: {why}",
            where=str(self.path),
            way_out="Choose another file, or add --overwrite to start again.",
        )


def answer_all(
    generator: Generator,
    questions: Sequence[Question],
    media: MediaLoader,
    *,
    is_shown: bool = True,
    **settings: Any,
) -> Iterator[list[tuple[Question, Answer]]]:
    """`Generator.answer` with its further settings, and progress on stderr; of ranks that share questions one shows its
    own."""
    progress = WorkProgress("answers", total=len(questions))
    answers = generator.answer(questions, media, **settings)
    with passed_over_by_collection():
        for answered in answers:
            yield answered
            if is_shown:
                progress.advance(len(answered))
    progress.end()


def answer_on_ranks(
    generator: Generator,
    questions: Sequence[Question],
    media: MediaLoader,
    ranks: Ranks,
    *,
    sampling: Sampling,
    batch_size: int,
) -> dict[int, Answer]:
    """Row → answer, on every rank: ranks share the questions, or answer each together where they share the model."""
    share = questions if generator.is_spread else questions[ranks.rank :: ranks.world_size]
    batches = answer_all(generator, share, media, sampling=sampling, batch_size=batch_size, is_shown=ranks.is_first)
    answers: dict[int, Answer] = {}
    for batch in batches:
        answers |= {question.row: answer for question, answer in batch}
    if generator.is_spread:
        return answers
    for part in ranks.gather(answers):
        answers |= part
    return answers
