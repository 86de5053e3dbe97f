"""`mm evaluate --benchmark`: answers the questions of a published set and scores them as its authors do."""

from __future__ import annotations

import json
import re
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from mindspeed_mm.core.artifacts import atomic_write_jsonl, atomic_write_text, make_writable_folder
from mindspeed_mm.core.errors import DataError, UsageError
from mindspeed_mm.core.file_writing import IsOurs, any_of, check_output_file, first_line_has, is_object_of
from mindspeed_mm.core.json_file import JsonObject, parse_json
from mindspeed_mm.fsdp.distributed.job.launch import joined_ranks
from mindspeed_mm.fsdp.sampling.answers.choosing import Sampling
from mindspeed_mm.fsdp.sampling.answers.live import Answer
from mindspeed_mm.fsdp.sampling.answers.questions import Question
from mindspeed_mm.fsdp.sampling.answers.scored import RESULTS, SAMPLES
from mindspeed_mm.fsdp.sampling.answers.scoring import GradedScore, Score
from mindspeed_mm.fsdp.sampling.answers.spoken import words_of
from mindspeed_mm.fsdp.utils.ranks import Ranks
from mindspeed_mm.tasks.answer.answering import WAIT_S, answer_on_ranks
from mindspeed_mm.tasks.answer.generation import load_on_ranks
from mindspeed_mm.tasks.answer.view import rows_view
from mindspeed_mm.tasks.evaluate.comparing import PairedTest, compare, shares_by_group
from mindspeed_mm.tasks.evaluate.folder import Facts, results_folder
from mindspeed_mm.tasks.evaluate.judge import Judge, Unjudged
from mindspeed_mm.tasks.evaluate.published import rules
from mindspeed_mm.tasks.evaluate.published.item import Item
from mindspeed_mm.tasks.evaluate.published.sets import SETS, PublishedSet
from mindspeed_mm.tasks.model_source import ModelSource, resolve_model, with_adapters
from mindspeed_mm.tasks.requests.evaluate import EvaluateRequest

_SAMPLE_KEYS = ("benchmark", "id", "group", "task", "question", "expected", "given", "share")
_FACTS = ("benchmark", "title", "note", "model", "data", "max_new_tokens", "cut_off", "seconds")
_JUDGED = "judge"
"""A further key of samples where there was a judge."""
_is_samples = any_of(first_line_has(*_SAMPLE_KEYS), first_line_has(*_SAMPLE_KEYS, _JUDGED))


def _is_results_of(kind: type[Score | GradedScore]) -> IsOurs:
    parts = [field.name for field in fields(kind)]
    return is_object_of(("tasks", "overall", *_FACTS), ("lora", "against", _JUDGED), "overall", parts)


_is_results = any_of(*map(_is_results_of, (Score, GradedScore)))


@dataclass(frozen=True)
class PublishedResult:
    """Scores by task, and over all questions."""

    tasks: dict[str, Score | GradedScore]
    overall: Score | GradedScore
    facts: Facts
    against: PairedTest | None

    def to_dict(self) -> dict[str, object]:
        """Return the content of `results.json`: scores by task and overall, the facts and, if there is one, the
        comparison."""
        tasks = {name: one.to_dict() for name, one in self.tasks.items()}
        told = {"tasks": tasks, "overall": self.overall.to_dict(), **self.facts}
        if self.against is not None:
            told["against"] = self.against.to_dict()
        return told

    def lines(self) -> list[str]:
        """Return lines of text: scores by task if there are several, the overall score, the comparison, and the set's
        note."""
        title, note = self.facts["title"], self.facts["note"]
        told = []
        if len(self.tasks) > 1:
            told += [f"{title}, {name}: {one}" for name, one in self.tasks.items()]
        told.append(f"{title}: {self.overall}")
        if self.against is not None:
            told.append(f"{title} against the other model: {self.against}")
        if note:
            told.append(note)
        return told


@dataclass(frozen=True)
class _AskedSet:
    """A request that names a set, with its files and its judge."""

    request: EvaluateRequest
    benchmark: str
    data: Path
    judge: Judge | None


def run(request: EvaluateRequest) -> PublishedResult:
    """Score a model, and write `results.json` and `samples.jsonl`.

    As ranks of one job, processes share the questions; or, with `plan`, the model. All of them return the scores.

    Raises:
        UsageError: There is a judge, and the set's authors ask none.
        MMError: The folder is not a model, the set's files are missing or broken, or `out` cannot be written.
    """
    assert request.benchmark is not None and request.data is not None  # as was checked
    asked = _AskedSet(request, request.benchmark, request.data, Judge.of(request))
    published, judge = SETS[asked.benchmark], asked.judge
    _check_judge(asked, published)
    source = with_adapters(resolve_model(request.folder), request.lora)
    items = published.read(asked.data)
    others = _read_others(asked, items)
    out = request.out or results_folder(source.run, source.folder) / asked.benchmark
    with joined_ranks(WAIT_S) as ranks:
        ranks.first("looking at the results' folder", lambda: _prepare(out, judge))
        began = time.monotonic()
        view = rows_view(source, asked.request.config)
        settings = (source.fingerprint(), view.mark, asked.benchmark, asked.request.longest_answer)
        unjudged = Unjudged.of(out, asked.data, settings, ((item.id, item.prompt) for item in items))

        def answer() -> dict[int, Answer]:
            return _answers_by_place(asked, source, items, ranks)

        answers = answer() if judge is None else unjudged.answers(ranks, answer)
        facts = _facts(asked, source, answers) | {"seconds": round(time.monotonic() - began, 3)}
        given = [answers[place].text for place in range(len(items))]
        found = ranks.first("asking the judge", lambda: _found(asked, published, items, given))
        facts |= _facts_of_judge(asked, found)
        samples = [_sample(asked, items[place], given[place], found.get(place)) for place in range(len(items))]
        result = _result(published, samples, facts, others)
        ranks.first("writing the results", lambda: _write(result, samples, out))
        if judge is not None and (
            kept := ranks.first("settling the stored answers", lambda: unjudged.settle(failures(found)))
        ):
            result = replace(result, facts=result.facts | {"note": f"{result.facts['note']} {kept}"})
    return result


def _read_others(asked: _AskedSet, items: Sequence[Item]) -> dict[str, float] | None:
    """What the model that is compared with got, by question; None where there is none."""
    if asked.request.against is None:
        return None
    others = _read_shares(asked.request.against, asked.benchmark, is_judged=asked.judge is not None)
    if others.keys() != set(map(_group, items)):
        what, way_out = "was made with other questions", "Evaluate both models on the same files."
        raise UsageError(what, where=str(asked.request.against), key="--against", way_out=way_out)
    return others


def _check_judge(asked: _AskedSet, published: PublishedSet) -> None:
    if asked.judge is not None and published.asks_judge is None:
        judged = " and ".join(name for name, one in SETS.items() if one.asks_judge is not None)
        what = f"the authors of {published.title} score by their rule alone"
        raise UsageError(what, key="--judge", way_out=f"Leave it out: those of {judged} ask a language model.")


def _prepare(out: Path, judge: Judge | None) -> None:
    check_output_file(out / SAMPLES, _is_samples, "--out")
    check_output_file(out / RESULTS, _is_results, "--out")
    make_writable_folder(out)
    if judge is not None:
        judge.check()


def _found(asked: _AskedSet, published: PublishedSet, items: Sequence[Item], given: Sequence[str]) -> dict[int, Found]:
    """What the judge finds in answers, by their place."""
    if asked.judge is None or published.asks_judge is None:
        return {}
    words, nearest = [words_of(text) for text in given], published.takes_nearest
    return _found_answers(asked.judge, published.asks_judge, items, words, takes_nearest=nearest)


def _facts_of_judge(asked: _AskedSet, found: Mapping[int, Found]) -> JsonObject:
    """What results say of a judge; nothing where there is none."""
    if asked.judge is None:
        return {}
    vain = failures(found)
    note = f"{asked.judge.model} was asked for the answer in {len(found)} of the texts."
    if vain:
        note += f" It failed at {vain} of them, which are read by rules alone; samples.jsonl says why."
    return {"judge": asked.judge.facts(), "note": note}


def _answers_by_place(asked: _AskedSet, source: ModelSource, items: Sequence[Item], ranks: Ranks) -> dict[int, Answer]:
    """Of each item, by its place."""
    folder = asked.data if asked.data.is_dir() else asked.data.parent
    generator = load_on_ranks(source, rows_view(source, asked.request.config), asked.request.plan, ranks)
    greedy, media = Sampling(asked.request.longest_answer, temperature=0), generator.encoder.media(folder, [folder])
    return answer_on_ranks(
        generator, Questions(items), media, ranks, sampling=greedy, batch_size=asked.request.questions_at_a_time
    )


def _facts(asked: _AskedSet, source: ModelSource, answers: Mapping[int, Answer]) -> Facts:
    published = SETS[asked.benchmark]
    facts = {
        "benchmark": asked.benchmark,
        "title": published.title,
        "note": published.note,
        "model": str(source.folder.absolute()),
        "data": str(asked.data.absolute()),
        "max_new_tokens": asked.request.longest_answer,
        "cut_off": sum(not answer.finished for answer in answers.values()),
    }
    if source.lora is not None:
        facts["lora"] = str(source.lora.absolute())
    return facts


class Questions(Sequence[Question]):
    """The questions of a set, each read when it is due: the pictures of thousands do not fit into memory."""

    def __init__(self, items: Sequence[Item], rows: range | None = None) -> None:
        self._items = items
        self._rows = range(len(items)) if rows is None else rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return Questions(self._items, self._rows[index])
        row = self._rows[index]
        return self._items[row].question(row)


def _sample(asked: _AskedSet, item: Item, given: str, found: Found | None) -> JsonObject:
    """What is kept of a question; with a judge, also what it found in the answer."""
    words = words_of(given)
    share = SETS[asked.benchmark].rule(words if found is None else found.words(words, item), item)
    values = (asked.benchmark, item.id, _group(item), item.task, item.prompt, list(item.gold), given, share)
    sample = dict(zip(_SAMPLE_KEYS, values, strict=True))
    if asked.judge is None:
        return sample
    return sample | {_JUDGED: found and told(found)}


def _group(item: Item) -> str:
    return item.group or item.id


def _result(
    published: PublishedSet, samples: Sequence[JsonObject], facts: Facts, others: dict[str, float] | None
) -> PublishedResult:
    shares = shares_by_group(samples)
    by_task: dict[str, dict[str, float]] = defaultdict(dict)
    for sample in samples:
        by_task[sample["task"]][sample["group"]] = shares[sample["group"]]
    tasks = {name: published.score(list(found.values())) for name, found in by_task.items()}
    test = None
    if others is not None:
        test = compare(shares, others, is_graded=published.is_graded)
    return PublishedResult(tasks, published.score(list(shares.values())), facts, test)


def _read_shares(folder: Path, benchmark: str, *, is_judged: bool) -> dict[str, float]:
    """What another evaluation of the same set found, with a judge or without."""
    path = folder / SAMPLES if folder.is_dir() else folder
    samples = []
    try:
        # Not `splitlines`: an answer may hold other marks that end a line.
        for line in path.read_text(encoding="utf-8").strip("\n").split("\n"):
            sample = parse_json(line)
            if sample.keys() - {_JUDGED} != set(_SAMPLE_KEYS):
                raise ValueError("it has other fields")
            samples.append(sample)
    except (OSError, ValueError, AttributeError) as error:
        raise DataError(
            f"holds no results of --benchmark: {error}", where=str(path), key="--against", way_out="Name its folder."
        ) from error
    if {sample["benchmark"] for sample in samples} != {benchmark}:
        what, way_out = f"holds results of another set than {benchmark}", "Name the folder of that set's results."
        raise UsageError(what, where=str(path), key="--against", way_out=way_out)
    if any((_JUDGED in sample) != is_judged for sample in samples):
        what = "was scored without a judge" if is_judged else "was scored with a judge"
        raise UsageError(what, where=str(path), key="--against", way_out="Score both alike: --judge.")
    return shares_by_group(samples)


def _write(result: PublishedResult, samples: Sequence[JsonObject], out: Path) -> None:
    """Samples first: where results stand, the samples are theirs."""
    (out / RESULTS).unlink(missing_ok=True)
    atomic_write_jsonl(out / SAMPLES, samples)
    atomic_write_text(out / RESULTS, json.dumps(result.to_dict(), indent=2, ensure_ascii=False) + "\n")


# --- judged answers ---------------------------------------------------------------------------------------------------
# Sets whose authors let a language model find the answer in what was said, before their rule compares it: MathVista
# (Lu et al. 2024), and MMBench where its rule finds no option (Liu et al. 2024).

_INSTRUCTION = (
    "Somebody was asked the question below, and said what stands below it. What is the answer that was given, whether "
    "it is right or wrong? Say {form}, and nothing else. If no answer was given, say none.\n\n"
    "Question: {question}\n\nSaid: {given}"
)
_NONE = re.compile(r"\W*none\W*", re.IGNORECASE)
_SHOWN = 60
_FORMS = {
    "integer": "it as a whole number in digits",
    "float": "it as a number in digits",
    "list": "it as a list in brackets",
}


@dataclass(frozen=True)
class Found:
    """What a judge has found in an answer."""

    said: str | None = None
    failure: str | None = None
    """Why it said nothing."""

    def words(self, given: str, item: Item) -> str:
        """What the set's rule reads: what was found, or all that was said where nothing could be."""
        if self.said is None:
            return given
        if item.options and _NONE.fullmatch(self.said):
            return ""  # an option may be called so, too
        return self.said


def _found_answers(
    judge: Judge, asks: rules.AsksJudge, items: Sequence[Item], given: Sequence[str], *, takes_nearest: bool
) -> dict[int, Found]:
    """By place: what a judge finds in the answers that the set's authors would ask about.

    Args:
        judge: It is asked.
        asks: Whether they would.
        items: The questions, read as they are needed.
        given: What the model said to each, without its thoughts.
        takes_nearest: A reply that names no option stands for the nearest one; else it is told as a failure.
    """
    asked: dict[int, dict[str, str]] = {}
    for place, words in enumerate(given):
        item = items[place]
        if words and asks(words, item):
            asked[place] = {"{form}": _form(item), "{question}": item.prompt, "{given}": words}
    found = {}
    replies = judge.replies(_INSTRUCTION, list(asked.values()))
    for place, reply in zip(asked, replies, strict=True):
        said, failure = reply
        options = items[place].options
        if said is not None and options and not _NONE.fullmatch(said):
            if takes_nearest:
                said = rules.nearest_option(said, options)
            elif rules.chosen_letter(said, options) is None:
                failure = f"it says '{said[:_SHOWN]}', which names no option"
                said = None
        found[place] = Found(said, failure)
    return found


def _form(item: Item) -> str:
    if item.options:
        return "the letter of the option that it is"
    return _FORMS.get(item.facts.get("answer_type", ""), "it in a few words")


def told(found: Found) -> JsonObject:
    """Return a judge's finding as the samples file holds it, under `said` and `failure`."""
    return {"said": found.said, "failure": found.failure}


def failures(found: Mapping[int, Found]) -> int:
    """How many answers a judge was asked about in vain."""
    return sum(one.failure is not None for one in found.values())
