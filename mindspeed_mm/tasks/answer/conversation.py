"""`mm chat`: a conversation of several turns, shown to the model as training shows its rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from mindspeed_mm.core.artifacts import append_jsonl, make_writable_folder
from mindspeed_mm.core.errors import DataError
from mindspeed_mm.core.file_writing import check_output_file, first_line_has
from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.core.whole_text import check_whole_characters
from mindspeed_mm.fsdp.data.data_utils.sample import MediaItem, MediaKind, RowLocation, Sample
from mindspeed_mm.fsdp.sampling.answers.choosing import Sampling
from mindspeed_mm.fsdp.sampling.answers.generator import Generator
from mindspeed_mm.fsdp.sampling.answers.live import Answer
from mindspeed_mm.fsdp.sampling.answers.questions import user_turn
from mindspeed_mm.tasks.answer.generation import load_generator
from mindspeed_mm.tasks.answer.view import rows_view
from mindspeed_mm.tasks.model_source import resolve_model, with_adapters

_COLUMNS = {"image": "images", "video": "videos", "audio": "audios"}
_is_saved = first_line_has("messages", *_COLUMNS.values())


class Talker(Protocol):
    """Answers conversations: a model of this process, or one that a server answers for."""

    def answer(
        self,
        messages: Sequence[JsonObject],
        media: Sequence[MediaItem],
        sampling: Sampling,
        tell: Callable[[str], None],
    ) -> Answer:
        """The answer to the last of some turns.

        Args:
            messages: As chat templates take them.
            media: The files that they show, in order.
            sampling: How tokens are chosen.
            tell: Is given the answer piece by piece.

        Raises:
            MMError: A medium cannot be read, or the model takes none of its kind.
        """


@dataclass(frozen=True)
class LoadedModel:
    """A model of this process."""

    generator: Generator

    def answer(
        self,
        messages: Sequence[JsonObject],
        media: Sequence[MediaItem],
        sampling: Sampling,
        tell: Callable[[str], None],
    ) -> Answer:
        """Answer the last turn with this process's model; `tell` is called with each piece of the answer.

        Raises:
            MMError: A medium cannot be read, or the model takes none of its kind.
        """
        place = RowLocation("chat", sum(message["role"] == "user" for message in messages))
        encoder = self.generator.encoder
        loader = encoder.media(Path.cwd(), [Path(item.source).parent for item in media])
        question = self.generator.encode(Sample(place, list(messages), [0.0] * len(messages), list(media)), loader)
        return self.generator.answer_streamed(question, tell, sampling)


@dataclass
class Conversation:
    """What was said so far.

    Args:
        model: Answers.
        sampling: How it chooses tokens.
        system: Stands before all turns; empty: what the model's template puts there.
    """

    model: Talker
    sampling: Sampling
    system: str = ""
    turns: list[JsonObject] = field(default_factory=list)
    """As chat templates take them."""
    media: list[MediaItem] = field(default_factory=list)
    """Of all turns, in order."""
    waiting: list[MediaItem] = field(default_factory=list)
    """They go with what the user says next."""

    def show(self, kind: MediaKind, path: Path) -> None:
        """Put a file before what the user says next.

        Raises:
            DataError: It is not there.
        """
        if not path.is_file():
            way_out = f"Relative paths start at '{Path.cwd()}'."
            raise DataError("there is no such file", where=str(path), way_out=way_out)
        self.waiting.append(MediaItem(kind, str(path.absolute())))

    def say(self, text: str, tell: Callable[[str], None]) -> Answer:
        """Say something and have it answered. When that fails, or is interrupted, nothing was said.

        Args:
            text: What the user says.
            tell: Is given the answer piece by piece.

        Raises:
            DataError: A medium cannot be read, the model takes none of its kind, or the text marks more or fewer.
        """
        turn, waiting = user_turn(text, self.waiting, "chat")
        media = [*self.media, *waiting]
        messages = [*self._begun(), turn]
        check_whole_characters(messages, "chat")
        answer = self.model.answer(messages, media, self.sampling, tell)
        self.turns += [turn, {"role": "assistant", "content": answer.text}]
        self.media, self.waiting = media, []
        return answer

    def reset(self) -> None:
        """Forget all turns; the system prompt stays."""
        self.turns, self.media, self.waiting = [], [], []

    def row(self) -> JsonObject:
        """The conversation as a row that training takes."""
        messages = [{**turn, "content": _with_marks(turn["content"])} for turn in self._begun()]
        columns: dict[str, list[Any]] = {column: [] for column in _COLUMNS.values()}
        for item in self.media:
            columns[_COLUMNS[item.kind]].append(item.source)
        return {"messages": messages, **columns}

    def _begun(self) -> list[JsonObject]:
        """What was said so far, with the system prompt."""
        if not self.system:
            return self.turns
        return [{"role": "system", "content": self.system}, *self.turns]

    def save(self, path: Path) -> None:
        """Add the conversation to a file of such rows.

        Raises:
            UsageError: The file holds something else.
            MachineError: It cannot be written.
        """
        target = check_output_file(path, _is_saved)
        make_writable_folder(target.parent)
        append_jsonl(target, self.row())


def begin(
    model: Path, sampling: Sampling, *, system: str = "", lora: Path | None = None, config: Path | None = None
) -> Conversation:
    """Load a model to talk to.

    Args:
        model: A Hugging Face folder or a run.
        sampling: How it chooses tokens.
        system: Stands before all turns.
        lora: Adapters to put beside the weights; None: the run's `inference.adapter`.
        config: Says how rows are shown, instead of the run's own.

    Raises:
        MMError: The folder is not a model.
    """
    source = with_adapters(resolve_model(model), lora)
    generator = load_generator(source.folder, source.lora, rows_view(source, config).of_people())
    return Conversation(LoadedModel(generator), sampling, system)


def _with_marks(content: str | list[JsonObject]) -> str:
    if isinstance(content, str):
        return content
    text = ""
    for part in content:
        text += part["text"] if part["type"] == "text" else f"<{part['type']}>"
    return text
