"""Answers in batches from a Hugging Face folder, with transformers' own `generate`.

Questions of similar length share a batch; rows are padded on the left, so that every answer starts at the same place.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from mindspeed_mm.checkpoint.dequantized import sections_of
from mindspeed_mm.checkpoint.hf_folder import config_dtype
from mindspeed_mm.checkpoint.recognise import is_megatron_folder
from mindspeed_mm.checkpoint.safetensors_folder import find_entries
from mindspeed_mm.checkpoint.stored_weights import open_stored
from mindspeed_mm.core.errors import ModelFolderError, UsageError
from mindspeed_mm.fsdp.data.data_utils.encode import EncodedQuestion
from mindspeed_mm.fsdp.data.data_utils.media import MediaLoader
from mindspeed_mm.fsdp.data.data_utils.transcript_language import is_whisper
from mindspeed_mm.fsdp.models.behaviour.experts import fit_experts
from mindspeed_mm.fsdp.models.loading.folder import check_all_loaded, load_model_config, native_class, read_config
from mindspeed_mm.fsdp.models.loading.part import OTHERS, trained_config
from mindspeed_mm.fsdp.utils.device import current_device
from mindspeed_mm.fsdp.utils.quiet import quiet
from mindspeed_mm.tasks.answer.asking import QuestionEncoder, RowsView
from mindspeed_mm.tasks.answer.choosing import RowChoices, Sampling, TokenChoice
from mindspeed_mm.tasks.answer.live import Answer, LiveAnswer
from mindspeed_mm.tasks.answer.peft_loading import load_peft
from mindspeed_mm.tasks.answer.questions import Question
from mindspeed_mm.tasks.answer.spoken import BEGIN_THOUGHT, take_apart
from mindspeed_mm.tasks.answer.transcription import transcripts

SORTED_BATCHES = 8
"""Questions are sorted by length in windows of so many batches: the media of one window are in memory at a time."""
LIKELIEST = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None, "min_p": None}
ONE_BY_ONE = {**LIKELIEST, "num_beams": 1, "repetition_penalty": 1.0}
"""`generate` itself takes the likeliest token, whatever the model's generation configuration says: `RowChoices` sees to
it that the likeliest is the one that is chosen."""
SOUNDS = "input_features"
"""What models call the spectra of sounds."""


class Generator:
    """A model with its processor, ready to answer.

    Args:
        model: A transformers model that generates.
        encoder: Shows it questions as training did.
        adapters: Names of adapters that rows may choose; a row that chooses none is answered without any.
    """

    def __init__(self, model: Any, encoder: QuestionEncoder, adapters: Sequence[str] = ()) -> None:
        self.model = model.eval()
        self.adapters = tuple(adapters)
        self.encoder, self.tokenizer = encoder, encoder.tokenizer
        self._end_ids = _end_ids(model, encoder)

    def answer(
        self,
        questions: Sequence[Question],
        media: MediaLoader,
        *,
        sampling: Sampling,
        batch_size: int,
        hides_thoughts: bool = False,
    ) -> Iterator[list[tuple[Question, Answer]]]:
        """Answers, batch by batch; within a window of eight batches the questions come sorted by length.

        Args:
            questions: To answer.
            media: Of `QuestionEncoder.media`.
            sampling: How tokens are chosen; with a seed, each row has its own of it.
            batch_size: Questions answered at a time.
            hides_thoughts: Leave what the model thinks out of the texts.

        Raises:
            DataError: A medium cannot be read, or the model takes none of its kind.
        """
        window = batch_size * SORTED_BATCHES
        for start in range(0, len(questions), window):
            encoded = [
                (question, self.encoder.encode(question.sample, media)) for question in questions[start:][:window]
            ]
            for batch in _batches(encoded, batch_size):
                rows = [
                    LiveAnswer(each, sampling.of_row(question.row), adapter=question.adapter)
                    for question, each in batch
                ]
                answers = self.answer_live(rows)
                if hides_thoughts:
                    answers = [
                        self.without_thoughts(*pair) for pair in zip((e for _, e in batch), answers, strict=True)
                    ]
                yield list(zip((question for question, _ in batch), answers, strict=True))

    def answer_batch(self, questions: Sequence[EncodedQuestion], max_new_tokens: int) -> list[Answer]:
        """The answers to encoded questions, in order."""
        rows = [LiveAnswer(question, Sampling(max_new_tokens, temperature=0)) for question in questions]
        return self.answer_live(rows)

    def answer_streamed(self, question: EncodedQuestion, tell: Callable[[str], None], sampling: Sampling) -> Answer:
        """The answer to one question, told piece by piece while it is made."""
        return self.answer_live([LiveAnswer(question, sampling, tell)])[0]

    def answer_live(self, rows: Sequence[LiveAnswer]) -> list[Answer]:
        """Make answers together, each with its own settings; what one says does not depend on the others.

        Transcripts are greedy, told when they are whole, and all of one longest length. Rows of one call choose the
        same adapters: those of a vision tower could not tell rows apart.
        """
        (adapter,) = {row.adapter for row in rows}
        with self._using(adapter):
            return self._answer_alike(rows)

    def _using(self, adapter: str | None) -> AbstractContextManager[Any]:
        """The model with these adapters alone."""
        if not self.adapters:
            return nullcontext()
        if adapter is None:
            context: AbstractContextManager[Any] = self.model.disable_adapter()
            return context
        self.model.set_adapter(adapter)
        return nullcontext()

    def _answer_alike(self, rows: Sequence[LiveAnswer]) -> list[Answer]:
        for row in rows:
            row.begin(self._text_of)
        inputs = in_dtype_of(self.model, move_to(self.encoder.collate([r.question for r in rows]), self.model.device))
        if is_whisper(self.encoder.processor):
            (most,) = {row.sampling.max_new_tokens for row in rows}
            found = transcripts(self.model, inputs, max_new_tokens=most)
            for row, (token_ids, finished) in zip(rows, found, strict=True):
                row.token_ids, row.ending = list(token_ids), "stop" if finished else "length"
        elif (beams := self._beams(rows)) > 1:
            self._search(inputs, rows, beams)
        else:
            self._generate(inputs, rows)
        return [row.close(self._text_of) for row in rows]

    def thinks(self, question: EncodedQuestion) -> bool:
        """Whether a question ends within a thought, so that the answer begins in it."""
        return self._text_of(question.input_ids[-4:].tolist()).rstrip().endswith(BEGIN_THOUGHT)

    def without_thoughts(self, question: EncodedQuestion, answer: Answer) -> Answer:
        """The same answer, its text without what the model thought."""
        return replace(answer, text=take_apart(answer.text, thinks=self.thinks(question)).words)

    def _beams(self, rows: Sequence[LiveAnswer]) -> int:
        """How many beams all rows ask for; where they do not say, those of the generation configuration."""
        (asked,) = {row.sampling.beams for row in rows}
        configured = getattr(self.model.generation_config, "num_beams", None)
        return (configured or 1) if asked is None else asked

    def _search(self, inputs: dict[str, Any], rows: Sequence[LiveAnswer], beams: int) -> None:
        (most,) = {row.sampling.max_new_tokens for row in rows}
        ends = {"eos_token_id": self._end_ids or None, "pad_token_id": self.tokenizer.pad_token_id}
        with torch.inference_mode():
            found_BL = self.model.generate(**inputs, **ends, **LIKELIEST, num_beams=beams, max_new_tokens=most)
        for row, tokens in zip(rows, found_BL[:, inputs["input_ids"].shape[1] :].tolist(), strict=True):
            any(row.take(token, self._end_ids) for token in tokens)

    def _generate(self, inputs: dict[str, Any], rows: Sequence[LiveAnswer]) -> None:
        device, config = self.model.device, self.model.generation_config
        padding = [inputs["input_ids"].shape[1] - len(row.question.input_ids) for row in rows]
        choices = [TokenChoice.of(row.sampling, config) for row in rows]

        def is_over(input_ids: torch.Tensor, _scores: Any, **_: Any) -> torch.Tensor:
            tokens = input_ids[:, -1].tolist()
            return torch.tensor(
                [row.take(token, self._end_ids) for row, token in zip(rows, tokens, strict=True)], device=device
            )

        with torch.inference_mode():
            self.model.generate(
                **inputs,
                **ONE_BY_ONE,
                eos_token_id=self._end_ids or None,
                pad_token_id=self.tokenizer.pad_token_id,
                max_new_tokens=max(row.sampling.max_new_tokens for row in rows),
                logits_processor=[RowChoices(choices, padding, device)],
                stopping_criteria=[is_over],
            )

    def _text_of(self, token_ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True))


def _batches(
    encoded: Sequence[tuple[Question, EncodedQuestion]], batch_size: int
) -> Iterator[list[tuple[Question, EncodedQuestion]]]:
    """Questions of like length and of the same adapters."""
    groups: dict[str | None, list[tuple[Question, EncodedQuestion]]] = {}
    for pair in sorted(encoded, key=lambda pair: len(pair[1].input_ids)):
        groups.setdefault(pair[0].adapter, []).append(pair)
    for group in groups.values():
        for first in range(0, len(group), batch_size):
            yield group[first : first + batch_size]


def move_to(inputs: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """What a model takes, on its device."""
    return {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}


def in_dtype_of(model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """With sounds in the type of the model's weights: unlike towers for pictures, those for sounds convert nothing."""
    sounds = inputs.get(SOUNDS)
    return inputs if sounds is None else inputs | {SOUNDS: sounds.to(model.dtype)}


def load_generator(
    folder: Path,
    lora: Path | None = None,
    view: RowsView | None = None,
    adapters: Mapping[str, Path] | None = None,
) -> Generator:
    """The model of a Hugging Face folder on this process's device, in the type that its weights are stored in.

    Args:
        folder: With weights, configuration and processor; the weights may be in Megatron's layout.
        lora: Adapters to put beside the weights, as PEFT has them.
        view: How rows were shown to the model; None: as the folder says.
        adapters: Folders of adapters that rows may choose by these names, as PEFT has them.

    Raises:
        UsageError: There are adapters for all rows as well.
        ModelFolderError: Weights, configuration or processor are missing or broken, or the adapters of another model.
    """
    if lora is not None and adapters:
        raise UsageError(
            "there are adapters for all rows as well", where=str(lora), key="--adapter", way_out="Name them."
        )
    encoder = QuestionEncoder(folder, view)  # first: it makes torchvision importable
    model = load_model(folder)
    if lora is not None:
        model = load_peft(model, lora)
    for name, path in (adapters or {}).items():
        model = load_peft(model, path, name, "--adapter")
    return Generator(model.to(current_device()), encoder, tuple(adapters or ()))


def load_model(folder: Path) -> Any:
    """The model of a Hugging Face folder, in the type that its weights are stored in.

    Raises:
        ModelFolderError: Weights or configuration are missing or broken.
    """
    divided = is_megatron_folder(folder)
    if not divided:
        find_entries(folder)  # says what is wrong with weight files in words
    joins = divided or any(sections_of(read_config(folder)))
    config = trained_config(load_model_config(folder))
    model_class: Any = native_class(config, folder)
    try:
        with quiet("transformers"):
            if joins:
                model, report = _joined_model(model_class, config, folder)
            else:
                model, report = model_class.from_pretrained(
                    folder, config=config, dtype="auto", local_files_only=True, output_loading_info=True
                )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        raise ModelFolderError(f"the model cannot be loaded: {first_line}", where=str(folder)) from error
    unexpected = [key for key in report.get("unexpected_keys") or () if not re.match(OTHERS, key)]
    check_all_loaded({**report, "unexpected_keys": unexpected}, folder)
    fit_experts(model, model.dtype)
    _choose_attention_everywhere(model.config)
    return model


def _choose_attention_everywhere(config: Any) -> None:
    """Give sections of a configuration that have no attention implementation that of the whole.

    transformers 5.23 chooses none for a section whose modules are no model of their own, as Fun-ASR-Nano's adaptor. Its
    masks then have the wrong form: padding is heard, and a row's answer depends on what shares its batch.
    """
    for name in config.sub_configs:
        section = getattr(config, name, None)
        if section is not None and getattr(section, "_attn_implementation", "") is None:
            section._attn_implementation = config._attn_implementation


def _joined_model(model_class: Any, config: Any, folder: Path) -> tuple[Any, dict[str, Any]]:
    """The model of a folder in Megatron's layout, or of quantised weights, and transformers' report of its loading."""
    from transformers import GenerationConfig  # seconds

    with open_stored(folder, config.to_dict()) as stored:
        weights = {key: tensor.read() for key, tensor in stored.items()}
    dtype = config_dtype(folder) or next(iter(weights.values())).dtype
    model, report = model_class.from_pretrained(
        None, config=config, state_dict=weights, dtype=dtype, output_loading_info=True
    )
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    return model, report


def _end_ids(model: Any, encoder: QuestionEncoder) -> list[int]:
    """The tokens that end an answer: those of the generation configuration, else those by which training ends one."""
    configured = model.generation_config.eos_token_id
    if configured is None:
        return encoder.end_ids
    return list(configured) if isinstance(configured, list | tuple) else [configured]
