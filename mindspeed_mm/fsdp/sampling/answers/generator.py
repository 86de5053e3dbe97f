"""Answers in batches, with transformers' own `generate`, of a model that is loaded.

Questions of similar length share a batch; rows are padded on the left, so that every answer starts at the same place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from mindspeed_mm.core.errors import DataError, MMError, UsageError
from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.fsdp.data.data_utils.encode import EncodedQuestion
from mindspeed_mm.fsdp.data.data_utils.media import MediaLoader
from mindspeed_mm.fsdp.data.data_utils.sample import Sample
from mindspeed_mm.fsdp.data.data_utils.transcript_language import is_whisper
from mindspeed_mm.fsdp.models.forward_arguments import list_arguments, refusals_explained
from mindspeed_mm.fsdp.sampling.answers.asking import QuestionEncoder
from mindspeed_mm.fsdp.sampling.answers.choosing import RowChoices, RowStart, Sampling, TokenChoice
from mindspeed_mm.fsdp.sampling.answers.live import Answer, LiveAnswer, Speech
from mindspeed_mm.fsdp.sampling.answers.questions import Question
from mindspeed_mm.fsdp.sampling.answers.spoken import BEGIN_THOUGHT, take_apart
from mindspeed_mm.fsdp.sampling.answers.steering import Grammars, Steering
from mindspeed_mm.fsdp.sampling.answers.transcription import check_speech, transcripts
from mindspeed_mm.fsdp.sampling.finite import FiniteScores, NotFiniteError, not_finite, placed
from mindspeed_mm.fsdp.utils.model_parts import attribute_at, longest_of, rope_border

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class QuestionTooLongError(DataError):
    """A question leaves the model no position for an answer."""


SORTED_BATCHES = 4
"""Questions are sorted by length in windows of so many batches: the media of two windows are in memory at a time, those
of the one that is answered and of the one that is prepared meanwhile."""
LIKELIEST = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None, "min_p": None}
ONE_BY_ONE = {**LIKELIEST, "num_beams": 1, "repetition_penalty": 1.0}
"""`generate` itself takes the likeliest token, whatever the model's generation configuration says: `RowChoices` sees to
it that the likeliest is the one that is chosen."""
_FORWARD_WAY_OUT = "Let the forward of the plugin's model take these arguments, or any keyword (**kwargs)."
SOUNDS = "input_features"
"""What models call the spectra of sounds."""


class Generator:
    """A model with its processor, ready to answer.

    Args:
        model: A transformers model that generates.
        encoder: Shows it questions as training did.
        adapters: Names of adapters that rows may choose; a row that chooses none is answered without any.
        group: Ranks that hold parts of the model's layers, and answer the same rows: the first one's scores decide.
        trains: The model will be trained on: it stays out of inference mode, whose tensors know no gradients.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        encoder: QuestionEncoder,
        adapters: Sequence[str] = (),
        *,
        group: dist.ProcessGroup | None = None,
        trains: bool = False,
    ) -> None:
        self.model = model.eval()
        self._group, self.is_spread = group, group is not None
        # Weights that are gathered for a moment have versions, which inference mode does not know.
        self._without_gradients = torch.no_grad if self.is_spread or trains else torch.inference_mode
        self.adapters = tuple(adapters)
        self.encoder, self.tokenizer = encoder, encoder.tokenizer
        self.end_ids = _end_ids(model, encoder)
        """The tokens that end an answer."""
        self.grammars = Grammars(self.tokenizer, self.end_ids)
        """That answers may be told to follow."""
        self.longest = longest_of(model.config)
        """Tokens that the model takes, question and answer together; None: it does not say."""
        self.longest_alike = rope_border(model.config)
        """Tokens of a row up to which its neighbours leave its rotary frequencies alone; None: they always do."""

    def encode(
        self, question: Sample, media: MediaLoader, variables: Mapping[str, object] | None = None
    ) -> EncodedQuestion:
        """A question as the model takes it.

        Args:
            question: The conversation.
            media: Opens what it shows.
            variables: Of the chat template, beside those of training.

        Raises:
            DataError: A medium cannot be read, the model takes none of its kind, or the template has no such variable.
            QuestionTooLongError: The model has no position left for an answer.
        """
        encoded = self.encoder.encode(question, media, variables)
        self._check_length(encoded, str(question.place))
        return encoded

    def encode_text(self, prompt: str | Sequence[int]) -> EncodedQuestion:
        """A text that the model goes on with, with the tokens that its tokenizer begins texts with; or tokens as they
        are.

        Raises:
            DataError: It is empty, or has tokens that the model does not have.
            QuestionTooLongError: The model has no position left for an answer.
        """
        ids = self.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else list(prompt)
        if not ids:
            raise DataError("the prompt is empty", key="prompt", way_out="Give text.")
        if max(ids) >= self.vocabulary:
            what = f"the prompt has token {max(ids)}, and the model has {self.vocabulary:,}"
            raise DataError(what, key="prompt", way_out="Give text.")
        encoded = EncodedQuestion(np.array(ids, dtype=np.int64), [])
        self._check_length(encoded, "prompt")
        return encoded

    @property
    def vocabulary(self) -> int:
        """How many tokens the model has."""
        return int(self.model.config.get_text_config().vocab_size)

    def check_steering(self, steering: Steering) -> None:
        """Raise `UsageError` where answers cannot be steered so."""
        largest = max((token for token, _ in steering.logit_bias), default=0)
        if largest >= self.vocabulary:
            raise UsageError(f"there is no token {largest}: the model has {self.vocabulary:,}", key="logit_bias")
        if steering.grammar is not None:
            self.grammars.check(steering.grammar)

    def check_speech(self, speech: Speech) -> None:
        """Raise `UsageError` where a sound cannot be heard so."""
        check_speech(self.model, self.encoder.processor, speech)

    def text_of(self, token: int) -> str:
        """The text of one token."""
        return str(self.tokenizer.decode([token]))

    def _check_length(self, encoded: EncodedQuestion, where: str) -> None:
        tokens = len(encoded.input_ids)
        if self.longest is not None and tokens >= self.longest:
            raise QuestionTooLongError(
                f"the question has {tokens:,} tokens, and the model takes {self.longest:,} with the answer",
                where=where,
                way_out="Ask something shorter, or show smaller pictures.",
            )

    def answer(
        self,
        questions: Sequence[Question],
        media: MediaLoader,
        *,
        sampling: Sampling,
        batch_size: int,
        hides_thoughts: bool = False,
        stops: Sequence[str] = (),
    ) -> Iterator[list[tuple[Question, Answer]]]:
        """Answers, batch by batch; within a window of four batches the questions come sorted by length.

        Args:
            questions: To answer.
            media: Of `QuestionEncoder.media`.
            sampling: How tokens are chosen; with a seed, each row has its own of it.
            batch_size: Questions answered at a time.
            hides_thoughts: Leave what the model thinks out of the texts.
            stops: Texts that end an answer; they are not part of it.

        Raises:
            DataError: A medium cannot be read, or the model takes none of its kind.
            NotFiniteError: The scores for a question are not finite. The other answers of its batch come first.
        """
        for encoded in self._encoded_ahead(questions, media, batch_size * SORTED_BATCHES):
            for batch in _alike_batches(encoded, batch_size):
                rows = []
                for question, each in batch:
                    choice = sampling.of_row(question.row)
                    rows.append(LiveAnswer(each, choice, stop=stops, adapter=question.adapter))
                failure: NotFiniteError | None = None
                try:
                    answers: Sequence[Answer | None] = self.answer_live(rows)
                except NotFiniteError as error:
                    failure, answers = error, [row.answer for row in rows]
                answered, failed = [], []
                for (question, each), answer in zip(batch, answers, strict=True):
                    if answer is None:
                        failed.append(str(question.sample.place))
                        continue
                    if hides_thoughts:
                        answer = self.without_thoughts(each, answer)
                    answered.append((question, answer))
                if answered:
                    yield answered
                if failure is not None:
                    with placed(failed[0]):
                        raise failure

    def _encoded_ahead(self, questions: Sequence[Question], media: MediaLoader, window: int) -> Iterator[list[Asked]]:
        """Questions as the model takes them, window by window; a thread prepares the next one meanwhile. One thread:
        tokenizers are not made for several."""

        def encode(start: int) -> list[Asked]:
            asked = questions[start : start + window]
            return [(question, self.encode(question.sample, media)) for question in asked]

        with ThreadPoolExecutor(1, "encoder") as thread:
            coming = thread.submit(encode, 0)
            for start in range(0, len(questions), window):
                encoded = coming.result()
                coming = thread.submit(encode, start + window)
                yield encoded

    def answer_streamed(self, question: EncodedQuestion, tell: Callable[[str], None], sampling: Sampling) -> Answer:
        """The answer to one question, told piece by piece while it is made."""
        return self.answer_live([LiveAnswer(question, sampling, tell)])[0]

    def answer_live(self, rows: Sequence[LiveAnswer]) -> list[Answer]:
        """Make answers together, each with its own settings; what one says does not depend on the others.

        Transcripts are greedy, told when they are whole, and all of one longest length. Rows of one call choose the
        same adapters: those of a vision tower could not tell rows apart.

        Raises:
            NotFiniteError: The scores for some rows are not finite. These rows have a `failure`; the others are
                finished and have their `answer`.
            UsageError: Some rows are not what their schema asks for; as above.
        """
        (adapter,) = {row.adapter for row in rows}
        with self._using(adapter):
            answers = self._answer_alike(rows)
            if len(answers) < len(rows):
                raise self.fail([row for row in rows if row.ending == "failed"])
        return answers

    def fail(self, rows: Sequence[LiveAnswer]) -> MMError:
        """Give rows without a `failure` that of scores that are not finite; that of the first row."""
        found: dict[int, NotFiniteError] = {}
        for row in rows:
            if row.failure is not None:
                continue
            token = len(row.token_ids) + 1
            if token not in found:
                found[token] = not_finite(f"the scores of token {token} of the answer", {"": self.model})
            row.failure = found[token]
        assert rows[0].failure is not None
        return rows[0].failure

    def _using(self, adapter: str | None) -> AbstractContextManager[object]:
        """The model with these adapters alone."""
        if self.adapters and adapter is None:
            without: AbstractContextManager[object] = self.model.disable_adapter()
            return without
        if self.adapters:
            self.model.set_adapter(adapter)
        return nullcontext()

    def _answer_alike(self, rows: Sequence[LiveAnswer]) -> list[Answer]:
        for row in rows:
            self.begin(row)
        beams = self._beams(rows)
        # The most tokens steer which beam wins: those of a long question are not to be its neighbours'.
        apart = beams > 1 and len({row.most_tokens for row in rows}) > 1
        if self.longest_alike is not None:
            apart |= any(len(row.question.input_ids) + row.most_tokens > self.longest_alike for row in rows)
        if apart and len(rows) > 1:
            answers: list[Answer] = []
            for row in rows:
                answers += self._answer_alike([row])
            return answers
        batch = self.encoder.collate([row.question for row in rows])
        inputs = in_dtype_of(self.model, move_to(batch, self.model.device))
        list_arguments(self.model, inputs)
        with refusals_explained(self.model, inputs, "question", key="model.model_id", way_out=_FORWARD_WAY_OUT):
            if is_whisper(self.encoder.processor):
                self._transcribe(inputs, rows)
            elif beams > 1:
                self._search(inputs, rows, beams)
            else:
                self._generate(inputs, rows)
        answers = []
        for row in rows:
            if row.ending != "failed":
                try:
                    answers.append(self.end(row))
                except UsageError as error:
                    row.ending, row.failure = "failed", error
        return answers

    def begin(self, row: LiveAnswer) -> None:
        """Forget what is there of an answer; `RuntimeError` where somebody has read a part of it."""
        row.begin(self._text_of, self.longest)

    def end(self, row: LiveAnswer) -> Answer:
        """An answer whose tokens are all there; what of its text was held back is told.

        Raises:
            UsageError: It is not what its schema asks for, though it is over.
        """
        grammar = row.sampling.steering.grammar
        if grammar is not None and row.ending == "stop" and not row.stop:
            self.grammars.check_followed(grammar, row.token_ids, thinks=self.thinks(row.question))
        return row.close(self._text_of)

    def thinks(self, question: EncodedQuestion) -> bool:
        """Whether a question ends within a thought, so that the answer begins in it."""
        return self._text_of(question.input_ids[-4:].tolist()).rstrip().endswith(BEGIN_THOUGHT)

    def without_thoughts(self, question: EncodedQuestion, answer: Answer) -> Answer:
        """The same answer, its text without what the model thought."""
        return replace(answer, text=take_apart(answer.text, thinks=self.thinks(question)).words)

    def _beams(self, rows: Sequence[LiveAnswer]) -> int:
        """How many beams all rows ask for; where they do not say, those of the generation configuration."""
        (asked,) = {row.sampling.beams for row in rows}
        if asked is not None:
            return asked
        configured: int | None = attribute_at(self.model, "generation_config.num_beams")
        return configured or 1

    def _transcribe(self, inputs: Mapping[str, object], rows: Sequence[LiveAnswer]) -> None:
        (most,) = {row.sampling.max_new_tokens for row in rows}
        (speech,) = {row.speech for row in rows}
        found = transcripts(self.model, inputs, self.encoder.processor, speech, max_new_tokens=most)
        for row, transcript in zip(rows, found, strict=True):
            row.token_ids, row.ending = list(transcript.token_ids), transcript.ending

    def _search(self, inputs: dict[str, Any], rows: Sequence[LiveAnswer], beams: int) -> None:
        if self.is_spread:  # without its own way to towers, transformers takes pictures of other rows to beams
            what = "beams are not searched by a model that is spread over ranks"
            raise UsageError(what, key="--beams", way_out="Add --beams 1.")
        (most,) = {row.most_tokens for row in rows}
        ends = {"eos_token_id": self.end_ids or None, "pad_token_id": self.tokenizer.pad_token_id}
        finite = FiniteScores(len(rows))
        with self._without_gradients():
            found_BL = self._loop(
                **inputs, **ends, **LIKELIEST, num_beams=beams, max_new_tokens=most, logits_processor=[finite]
            )
        answers_BL = found_BL[:, inputs["input_ids"].shape[1] :]
        for row, (*tokens, good) in zip(rows, finite.beside(answers_BL).tolist(), strict=True):
            for token in tokens[:good]:
                if row.take(token, self.end_ids):
                    break
            if good < len(finite.seen):  # some beam at least: which one wins is chance
                row.ending = "failed"

    def _generate(self, inputs: dict[str, Any], rows: Sequence[LiveAnswer]) -> None:
        device, config = self.model.device, self.model.generation_config
        choices, longest = [], inputs["input_ids"].shape[1]
        for row in rows:
            choices.append(TokenChoice.of(row.sampling, config))
        starts = [self.start(row, longest) for row in rows]
        finite, chooser = FiniteScores(len(rows)), RowChoices(choices, starts, device, self.grammars)
        processors: list[FiniteScores | RowChoices | FirstRankDecides] = [finite]
        if chooser.changes_scores:
            processors.append(chooser)
        if self._group is not None:
            processors.append(FirstRankDecides(self._group))

        def is_over(input_ids: torch.Tensor, _scores: object, **_: object) -> torch.Tensor:
            # One read for all rows; no token is negative.
            tokens = self._as_first_rank(input_ids[:, -1].masked_fill(~finite.seen[-1], -1)).tolist()
            over = []
            for row, token in zip(rows, tokens, strict=True):
                over.append(row.take(token, self.end_ids) if token >= 0 else row.fail())
            return self._as_first_rank(torch.tensor(over, dtype=torch.uint8, device=device)).bool()

        # Where the ends do not end all rows, `generate` hears of none: each row is asked anyway.
        ends = [-1] if any(row.sampling.steering.ignores_end for row in rows) else self.end_ids
        with self._without_gradients():
            self._loop(
                **inputs,
                **ONE_BY_ONE,
                eos_token_id=ends or None,
                pad_token_id=self.tokenizer.pad_token_id,
                max_new_tokens=max(row.most_tokens for row in rows),
                logits_processor=processors,
                stopping_criteria=[is_over],
            )
        for number, row in enumerate(rows):
            row.log_probs = chooser.log_probs(number, len(row.token_ids))

    @property
    def _loop(self) -> Callable[..., Any]:
        """transformers' `generate` of text. Janus's own hands its logits processors on to pictures alone."""
        if type(self.model).__name__ == "JanusForConditionalGeneration":
            from transformers import GenerationMixin

            return partial(GenerationMixin.generate, self.model, guidance_scale=None)
        loop: Callable[..., object] = self.model.generate
        return loop

    def start(self, row: LiveAnswer, longest: int) -> RowStart:
        """Where the answer of a row begins, in a batch whose longest question has so many tokens."""
        asked = len(row.question.input_ids)
        thinks = row.sampling.steering.grammar is not None and self.thinks(row.question)
        return RowStart(longest - asked, asked, thinks)

    def _as_first_rank(self, numbers: torch.Tensor) -> torch.Tensor:
        """Those of the first of the ranks that answer together: it alone knows what clients want."""
        if self._group is not None:
            dist.broadcast(numbers, group=self._group, group_src=0)
        return numbers

    def _text_of(self, token_ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True))


class FirstRankDecides:
    """A logits processor of transformers: all ranks go by the scores of the first, which rounding may tell apart.

    Args:
        group: The ranks.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def __call__(self, _input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Scores (B, V) → those of the first rank."""
        scores = scores.contiguous()
        dist.broadcast(scores, group=self._group, group_src=0)
        return scores


Asked = tuple[Question, EncodedQuestion]
"""A question, and as the model takes it."""


def _alike_batches(encoded: Sequence[Asked], batch_size: int) -> Iterator[list[Asked]]:
    """Questions of like length and of the same adapters."""
    groups: dict[str | None, list[Asked]] = {}
    for pair in sorted(encoded, key=lambda pair: len(pair[1].input_ids)):
        groups.setdefault(pair[0].adapter, []).append(pair)
    for group in groups.values():
        for first in range(0, len(group), batch_size):
            yield group[first : first + batch_size]


def move_to(inputs: Mapping[str, object], device: torch.device) -> JsonObject:
    """What a model takes, on its device."""
    moved = dict(inputs)
    for name, value in inputs.items():
        if isinstance(value, torch.Tensor):
            moved[name] = value.to(device)
    return moved


def in_dtype_of(model: PreTrainedModel, inputs: dict[str, Any]) -> JsonObject:
    """With sounds in the type of the model's weights: unlike towers for pictures, those for sounds convert nothing."""
    sounds = inputs.get(SOUNDS)
    return inputs if sounds is None else inputs | {SOUNDS: sounds.to(model.dtype)}


def _end_ids(model: PreTrainedModel, encoder: QuestionEncoder) -> list[int]:
    """The tokens that end an answer: those of the generation configuration, else those by which training ends one."""
    configured = model.generation_config.eos_token_id
    if configured is None:
        return encoder.end_ids
    return list(configured) if isinstance(configured, list | tuple) else [configured]
