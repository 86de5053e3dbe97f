"""Answers that wait for a judge: stored before it is asked, so that a command whose judge fails, or that is killed
meanwhile, judges alone when it is run again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from mindspeed_mm.core.artifacts import atomic_write_jsonl, read_jsonl
from mindspeed_mm.core.file_writing import check_output_file, first_line_has
from mindspeed_mm.fsdp.sampling.answers.live import Answer
from mindspeed_mm.fsdp.utils.ranks import Ranks

FILE = "answers.jsonl"
_is_ours = first_line_has("row", "answer", "finished", "of")


@dataclass(frozen=True)
class Unjudged:
    """The file of such answers.

    Args:
        path: In the folder of the results.
        mark: Of the model, the settings and the questions: other answers are not taken for these.
    """

    path: Path
    mark: str

    @classmethod
    def of(
        cls, folder: Path, data: Path, settings: Iterable[object], questions: Iterable[tuple[object, ...]]
    ) -> Unjudged:
        """The file in a folder.

        Args:
            folder: Of the results.
            data: The rows; a file that was changed since has other questions.
            settings: What the answers depend on besides the questions.
            questions: What tells each of them from others.
        """
        stamp = (str(data.absolute()), data.stat().st_size, data.stat().st_mtime_ns)
        told = json.dumps([stamp, [*settings], [*questions]], default=str)
        return cls(folder / FILE, hashlib.sha256(told.encode()).hexdigest()[:16])

    def answers(self, ranks: Ranks, answer: Callable[[], dict[int, Answer]]) -> dict[int, Answer]:
        """Row → answer: those that are stored, or new ones, which are stored.

        Args:
            ranks: All of them take part.
            answer: Makes the answers.

        Raises:
            UsageError: Another file has the name.
        """
        stored = ranks.first("reading stored answers", self._read)
        if stored is not None:
            return stored
        found = answer()
        ranks.first("storing the answers", lambda: self._write(found))
        return found

    def settle(self, failures: int) -> str | None:
        """Remove the file after all answers were judged; else what to do about those that were not."""
        if not failures:
            self.path.unlink(missing_ok=True)
            return None
        return f"The answers are kept in {self.path}: the same command judges them again."

    def _read(self) -> dict[int, Answer] | None:
        check_output_file(self.path, _is_ours, "--out")
        if not self.path.exists():
            return None
        lines = read_jsonl(self.path)
        if any(line.get("of") != self.mark for line in lines):
            return None
        return {line["row"]: Answer((), line["answer"], line["finished"]) for line in lines}

    def _write(self, answers: Mapping[int, Answer]) -> None:
        lines = []
        for row, answer in answers.items():
            lines.append({"row": row, "answer": answer.text, "finished": answer.finished, "of": self.mark})
        atomic_write_jsonl(self.path, lines)
