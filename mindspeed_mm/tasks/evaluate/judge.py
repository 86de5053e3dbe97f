"""A language model behind a server as the judge of open questions: whether an answer means the expected one.

It is asked about answers that are not the expected one character for character; the others are right without it. What
it said is kept with the sample.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from mindspeed_mm.core.artifacts import atomic_write_jsonl, read_jsonl
from mindspeed_mm.core.errors import MachineError
from mindspeed_mm.core.file_writing import check_output_file, first_line_has
from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.core.outbound import OutboundError, RequestLimits, Server, key_header
from mindspeed_mm.fsdp.posttrain_rewards.http import AskedModel
from mindspeed_mm.fsdp.sampling.answers.live import Answer
from mindspeed_mm.fsdp.sampling.answers.questions import Question
from mindspeed_mm.fsdp.sampling.answers.scored import Verdict
from mindspeed_mm.fsdp.sampling.answers.scoring import Comparison
from mindspeed_mm.fsdp.sampling.answers.spoken import words_of
from mindspeed_mm.fsdp.utils.ranks import Ranks
from mindspeed_mm.fsdp.utils.work_progress import WorkProgress
from mindspeed_mm.tasks.requests.evaluate import EvaluateRequest

Asked = TypeVar("Asked")
Reply = TypeVar("Reply")
AT_A_TIME = 8
TIMEOUT_S, RETRIES = 120.0, 2
_INSTRUCTION = (
    "Does the answer given to this question mean the same as the expected answer? What is said beside it, and how it "
    "is worded, do not count; a wrong or missing fact does.\n\nQuestion: {question}\nExpected answer: {expected}\n"
    "Answer given: {given}\n\nSay yes or no, and nothing else."
)
_VERDICT = re.compile(r"[\W_]*(yes|no)\b", re.IGNORECASE)


@dataclass(frozen=True)
class Judge:
    """Where the judge is, and what it is called.

    Args:
        url: Of its server, up to `/v1`.
        model: Its name there.
        key_variable: The environment variable that holds the server's key; None: it wants none.
    """

    url: str
    model: str
    key_variable: str | None = None

    @classmethod
    def of(cls, request: EvaluateRequest) -> Judge | None:
        """The judge that a request names; None where it names none."""
        if request.judge is None or request.judge_model is None:
            return None
        return cls(request.judge, request.judge_model, request.judge_key_env)

    def facts(self) -> dict[str, str]:
        """What results say of it."""
        return {"url": self.url, "model": self.model}

    def check(self) -> None:
        """Ask it something, before the work whose results it judges.

        Raises:
            ConfigError: The variable is not set, or the address is none.
            MachineError: It does not answer, or by something else than yes or no.
        """
        said = self._asked(retries=0).answer(_compared("How many legs has a spider?", "eight", "8"))
        if _VERDICT.match(said) is None:
            what = f"the judge was asked to say yes or no, and said {said[:80]!r}"
            raise MachineError(what, where=self.url, key="--judge-model", way_out="Name another model.")

    def verdicts(
        self, questions: Sequence[Question], answers: Mapping[int, Answer], comparison: Comparison
    ) -> dict[int, Verdict]:
        """Row → verdict, of all answers that are not the expected ones. A request that fails is told in its verdict.

        Args:
            questions: With expected answers.
            answers: By row.
            comparison: Says which answers are the expected ones.
        """
        judge = self._asked(retries=RETRIES)

        def of_row(question: Question) -> Verdict | None:
            given, expected = words_of(answers[question.row].text), words_of(question.expected or "")
            if comparison.outcome(given, expected).correct:
                return None
            return _verdict(judge, _compared(question.text, expected, given))

        found = zip(questions, _at_once(of_row, questions), strict=True)
        return {question.row: verdict for question, verdict in found if verdict is not None}

    def replies(self, instruction: str, texts: Sequence[Mapping[str, str]]) -> list[tuple[str | None, str | None]]:
        """What it says to an instruction with texts put into it, and why it said nothing, in order.

        Args:
            instruction: With marks.
            texts: For each question, mark → text.
        """
        judge = self._asked(retries=RETRIES)

        def ask(one: Mapping[str, str]) -> tuple[str | None, str | None]:
            try:
                return judge.answer(_parts(instruction, one)), None
            except OutboundError as error:
                return None, error.problems[0].what

        return _at_once(ask, texts)

    def _asked(self, retries: int) -> AskedModel:
        server = Server(
            self.url,
            RequestLimits(TIMEOUT_S),
            key_header(self.key_variable, "--judge-key-env"),
            title="the judge",
            key="--judge",
            way_out="See its log, whether the address ends in /v1, and whether it wants a key (--judge-key-env).",
        )
        return AskedModel(server, self.model, retries)


def _at_once(ask: Callable[[Asked], Reply], asked: Sequence[Asked]) -> list[Reply]:
    """The replies in order, asked for by several threads, with progress on stderr."""
    replies = []
    progress = WorkProgress("judged answers", total=len(asked))
    try:
        with ThreadPoolExecutor(AT_A_TIME) as pool:
            for reply in pool.map(ask, asked):
                replies.append(reply)
                progress.advance(1)
    finally:
        progress.end()
    return replies


def _parts(instruction: str, texts: Mapping[str, str]) -> list[dict[str, Any]]:
    # Not `format`: what the texts hold in braces stays as it is.
    text = re.sub("|".join(map(re.escape, texts)), lambda found: texts[found[0]], instruction)
    return [{"type": "text", "text": text}]


def _compared(question: str, expected: str, given: str) -> list[JsonObject]:
    return _parts(_INSTRUCTION, {"{question}": question, "{expected}": expected, "{given}": given})


def _verdict(judge: AskedModel, parts: Sequence[Mapping[str, object]]) -> Verdict:
    try:
        said = judge.answer(parts)
    except OutboundError as error:
        return Verdict(correct=False, failure=error.problems[0].what)
    found = _VERDICT.match(said)
    if found is None:
        return Verdict(correct=False, said=said, failure="it said neither yes nor no")
    return Verdict(correct=found[1].lower() == "yes", said=said)


# --- answers that wait ------------------------------------------------------------------------------------------------
# Answers that wait for a judge: stored before it is asked, so that a command whose judge fails, or that is killed
# meanwhile, judges alone when it is run again.

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
