"""Row formats: one table of the columns by which each is recognised. `attr` only overrides what is found here.

Names of columns are those of LLaMA-Factory (`data/parser.py`), ms-swift (`dataset/preprocessor/core.py`), TRL
(`dataset_formats.md`), verl (`rl_dataset.py`), LLaVA, InternVL and the Qwen-VL fine-tuning scripts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from mindspeed_mm.core.errors import ConfigError, DataError
from mindspeed_mm.core.json_file import JsonMapping, JsonObject
from mindspeed_mm.core.suggest import nearest
from mindspeed_mm.fsdp.data.data_utils.rows.row_fields import ATTR_KEY, Row, wrong_field
from mindspeed_mm.fsdp.data.data_utils.sample import RowLocation
from mindspeed_mm.fsdp.params.data_args import DatasetAttr
from mindspeed_mm.fsdp.params.value_types import Section


class FormatColumns(NamedTuple):
    """The columns of a format: key of `attr` → the usual names of its column."""

    formatting: str
    """Which converter reads it: a word of `attr.formatting`."""
    needed: Mapping[str, tuple[str, ...]]
    """Columns that tell the format. A row must have exactly one column for each key."""
    optional: Mapping[str, tuple[str, ...]] = {}
    """Columns that the format may have."""


_ANSWERS = ("response", "output", "answer", "answers", "completion", "target", "targets", "solution")
TURN_COLUMNS = ("messages", "conversations", "conversation")
TEXT_COLUMN = "text"
SHAPES: dict[str, FormatColumns] = {
    "list of turns": FormatColumns("sharegpt", {"messages": TURN_COLUMNS}),
    "instruction": FormatColumns("alpaca", {"prompt": ("instruction",), "response": _ANSWERS}, {"query": ("input",)}),
    "question": FormatColumns(
        "alpaca", {"prompt": ("query", "prompt", "question", "problem", "input"), "response": _ANSWERS}, {"query": ()}
    ),
    "transcript": FormatColumns(
        "transcript",
        {"audios": ("audio", "audios"), "response": ("sentence", "transcription", "transcript", TEXT_COLUMN)},
    ),
    "document": FormatColumns("text", {TEXT_COLUMN: (TEXT_COLUMN,)}),
}
"""Format → its columns, in the order in which they are tried. Columns of media, `system`, `tools` and `history` may
stand in each. Preference rows (see `PAIRS`) and prompts for rollouts have the columns of a question without an
answer."""

PAIRS: dict[str, tuple[str, ...]] = {
    "chosen": ("chosen", "chosen_response", "chosen_messages"),
    "rejected": ("rejected", "rejected_response", "rejected_messages"),
}
"""Columns of the two answers of a preference row. Where there is no better one, it is the row's own answer."""

FORMAT_WORDS = ("sharegpt", "openai", "multimodal_tool", "alpaca", "transcript", "text")
"""Words of `attr.formatting`; the first three name the same."""
_TURNS = frozenset(FORMAT_WORDS[:3])
EXTRAS: dict[str, tuple[str, ...]] = {
    "system": ("system", "system_prompt"),
    "history": ("history",),
    "tools": ("tools",),
    "images": ("images", "image"),
    "videos": ("videos", "video"),
    "audios": ("audios", "audio"),
}
"""Columns that a row of any format may have: key of `attr` → the usual names."""

CALL = "function_call"
"""The role of a turn that is nothing but tool calls, written as text."""
USUAL_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "system": "system",
    "developer": "system",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "observations": "tool",
    "function_response": "tool",
    "tool_response": "tool",
    CALL: CALL,
    "tool_call": CALL,
}
"""Who speaks, as rows of all tools write it → the role that chat templates know."""


@dataclass(frozen=True)
class RowFormat:
    """Where a row keeps what. A column: `None`: its usual names are tried; empty: the rows have none."""

    formatting: str | None = None
    """None: recognised by the columns of each row."""
    ranking: bool | None = None
    """Whether rows are preference pairs; None: as the stage of training says."""
    messages: str | None = None
    system: str | None = None
    tools: str | None = None
    images: str | None = None
    videos: str | None = None
    audios: str | None = None
    prompt: str | None = None
    query: str | None = None
    response: str | None = None
    history: str | None = None
    chosen: str | None = None
    rejected: str | None = None
    is_recognised: bool = False
    """Whether columns are those of one row, as `recognised` found them."""
    role_tag: str = "from"
    content_tag: str = "value"
    user_tag: str = "human"
    assistant_tag: str = "gpt"
    observation_tag: str = "observation"
    function_tag: str = "function_call"
    system_tag: str = "system"

    @classmethod
    def from_attr(cls, attr: Section) -> RowFormat:
        """From the `attr` section of the configuration; what equals its default overrides nothing."""
        defaults = {name: field.default for name, field in DatasetAttr.model_fields.items()}
        names = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in _given(attr, names).items() if value != defaults.get(name)})

    @classmethod
    def from_dataset_info(cls, name: str, entry: JsonMapping, where: str) -> RowFormat:
        """From an entry of a LLaMA-Factory `dataset_info.json`.

        As there, an entry that lists its columns has only those, and its format is alpaca unless it says otherwise.

        Raises:
            ConfigError: A format, column or tag is unknown.
        """
        where = f"{where}: {name}"
        columns, tags = entry.get("columns"), entry.get("tags") or {}
        formatting = entry.get("formatting", None if columns is None else "alpaca")
        if formatting is not None:
            _check_names([formatting], FORMAT_WORDS, where, "formatting")
        found: JsonObject = {}
        if columns is not None:
            _check_names(columns, _COLUMNS, where, "columns")
            found = dict.fromkeys(_OPTIONAL_COLUMNS, "") | _given(columns, _COLUMNS)
        _check_names(tags, _TAGS, where, "tags")
        found |= _given(tags, _TAGS)
        return cls(**found, formatting=formatting, ranking=bool(entry.get("ranking")) or None)

    def of_stage(self, stage: str) -> RowFormat:
        """The format with `ranking` decided by `basic_parameters.stage`, unless it is given."""
        if self.ranking is not None:
            return self
        return self._of_pairs if stage == "rm" else self._of_answers

    @cached_property
    def _of_pairs(self) -> RowFormat:
        return replace(self, ranking=True)

    @cached_property
    def _of_answers(self) -> RowFormat:
        return replace(self, ranking=False)

    @cached_property
    def columns(self) -> frozenset[str]:
        """Columns that every row of this format, which is known, may have."""
        keys = ("messages", "prompt", "response", *EXTRAS, *(PAIRS if self.ranking else ()))
        return frozenset(vars(self)[key] for key in keys if key != "history")

    @cached_property
    def roles(self) -> dict[str, str]:
        """Who speaks, as rows write it → the role that chat templates know."""
        return USUAL_ROLES | {
            self.user_tag: "user",
            self.assistant_tag: "assistant",
            self.system_tag: "system",
            self.observation_tag: "tool",
            self.function_tag: CALL,
        }

    def role_of(self, tag: str) -> str | None:
        """Who speaks in a turn of this tag, as chat templates know the role; None: nobody that is known."""
        return self.roles.get(tag) or USUAL_ROLES.get(tag.strip("<|>").lower().replace("-", "_"))

    @property
    def needed_columns(self) -> tuple[str, ...]:
        """Columns without which no row converts, as far as they are named."""
        keys = ("chosen", "rejected") if self.ranking else ("messages", "prompt", "response")
        return tuple(filter(None, (vars(self)[key] for key in keys)))

    def needed_of(self, columns: Collection[str], null: Collection[str]) -> str | None:
        """A column of a table that rows need and that no row has a value in; None: there is none.

        Args:
            columns: Of the table.
            null: Those of them without any value.
        """
        for name in self.needed_columns:
            if name in null:
                return name

        def fits(names: Iterable[str], *, needs_answer: bool) -> bool:
            of_kinds = [tuple((name, kind) for name in names) for kind in ("text", "list")]
            return any(isinstance(_recognise(each, self, needs_answer), RowFormat) for each in of_kinds)

        full = [name for name in columns if name not in null]
        if fits(full, needs_answer=self.formatting == "alpaca") or not fits(columns, needs_answer=True):
            return None
        return next((name for name in null if fits([*full, name], needs_answer=True)), None)

    @property
    def holds_turns(self) -> bool:
        """Whether a row of this format, which is known, has a list of turns."""
        return self.formatting in _TURNS


_TAGS = tuple(f.name for f in fields(RowFormat) if f.name.endswith("_tag"))
_COLUMNS = tuple(f.name for f in fields(RowFormat) if f.name not in ("formatting", "ranking", "is_recognised", *_TAGS))
_OPTIONAL_COLUMNS = ("system", "tools", "images", "videos", "audios", "query", "history")


def _given(section: JsonMapping | Section, names: Collection[str]) -> dict[str, Any]:
    """Those of these entries that are there and not null."""
    return {name: value for name, value in section.items() if name in names and value is not None}


def _check_names(names: Iterable[str], known: Sequence[str], where: str, key: str) -> None:
    for name in names:
        if name not in known:
            near = nearest(str(name), known)
            way_out = f"Did you mean '{near[0]}'?" if near else f"Known: {', '.join(known)}."
            raise ConfigError(f"'{name}' is not known here", where=where, key=key, way_out=way_out)


# --- recognition -----------------------------------------------------------------------------------------------------


def recognised(row: Row, row_format: RowFormat, place: RowLocation, *, needs_answer: bool = True) -> RowFormat:
    """The format of a row, every column that it has by its name, those that it lacks empty.

    Args:
        row: The raw row.
        row_format: What is configured, which overrides what the columns tell.
        place: Where the row stands.
        needs_answer: Whether a question without an answer is no format.

    Raises:
        DataError: No format fits, or several columns may be meant.
    """
    if row_format.is_recognised:
        return row_format
    columns = tuple((name, _kind(value)) for name, value in row.items() if value is not None)
    found = _recognise(columns, row_format, needs_answer and not row_format.ranking)
    if isinstance(found, RowFormat):
        return found
    for column in _turn_columns(row_format):
        if column in row and not isinstance(row[column], list):
            raise wrong_field(column, row[column], row, place, "a list of messages")
    key, what, way_out = found
    raise DataError(what, where=str(place), key=key, way_out=way_out)


def _kind(value: object) -> str:
    """What is told of a value by which a format is recognised."""
    if isinstance(value, str | list | tuple | dict) and not len(value):
        return "empty"
    if isinstance(value, str):
        return "text"
    if isinstance(value, list | tuple):
        return "list"
    return "other"


_Columns = Mapping[str, str]
"""Column that is not null → the kind of its value."""


class _Problem(NamedTuple):
    key: str
    what: str
    way_out: str


@lru_cache(maxsize=4096)
def _recognise(columns: tuple[tuple[str, str], ...], row_format: RowFormat, needs_answer: bool) -> RowFormat | _Problem:
    kinds = dict(columns)
    pair = _pair(kinds, row_format)
    extras = {key: _only(kinds, vars(row_format)[key], usual) for key, usual in EXTRAS.items()}
    others: JsonObject = {**_NONE, **extras, **pair, "is_recognised": True}
    for shape in SHAPES.values():
        if not _may_be(row_format, shape, needs_answer):
            continue
        found = _fit(kinds, row_format, shape, needs_answer)
        if isinstance(found, _Problem):
            return found
        if found is not None:
            return replace(row_format, **{**others, **found, "formatting": shape.formatting})
    if row_format.ranking and pair["chosen"] and pair["rejected"]:  # each is a whole conversation
        return replace(row_format, **(others | {"formatting": "sharegpt"}))
    for name in _turn_columns(row_format):
        if kinds.get(name) == "empty":  # a conversation without turns
            return replace(row_format, **(others | {"messages": name, "formatting": "sharegpt"}))
    return _unknown(kinds, row_format, pair)


def _turn_columns(row_format: RowFormat) -> Sequence[str]:
    return _names(row_format.messages, TURN_COLUMNS)


_NONE = dict.fromkeys(("messages", "prompt", "query", "response"), "")


def _may_be(row_format: RowFormat, shape: FormatColumns, needs_answer: bool) -> bool:
    """Whether what is configured leaves a format open."""
    if row_format.formatting is None:
        if _is_named(row_format, "messages"):
            return shape.formatting == "sharegpt"
        if _is_named(row_format, "prompt"):
            return shape.formatting == "alpaca"
        if _is_named(row_format, "response"):
            return shape.formatting in ("alpaca", "transcript")
        return True
    if row_format.formatting not in _TURNS:
        return shape.formatting == row_format.formatting
    # Prompts of TRL and verl, and pairs behind them, have their turns in a column of another name.
    return shape.formatting == "sharegpt" or (shape.formatting == "alpaca" and not needs_answer)


def _is_named(row_format: RowFormat, *keys: str) -> bool:
    """Whether a column is configured by a name of its own."""
    return any(vars(row_format)[key] and vars(row_format)[key] not in _USUAL[key] for key in keys)


def _fit(
    kinds: _Columns, row_format: RowFormat, shape: FormatColumns, needs_answer: bool
) -> dict[str, str] | _Problem | None:
    """Key of `attr` → the column of a row that has this format; None: it does not."""
    found: dict[str, str] = {}
    for key, usual in shape.needed.items():
        configured = vars(row_format).get(key)
        names = _candidates(kinds, configured, usual, _KINDS[key])
        if not names and shape.optional.get("query"):  # an instruction may be empty where there is an input
            names = _candidates(kinds, configured, usual, (*_KINDS[key], "empty"))
        if not names and key == "response" and not needs_answer:
            found[key] = ""
            continue
        if not names:
            return None
        if key == "prompt" and not needs_answer and "prompt" in names:
            names = ["prompt"]  # the column that TRL's and verl's trainers read, whatever it was made of
        if len(names) > 1 and not (key == "response" and not needs_answer):
            return _ambiguous(key, names)
        if key != TEXT_COLUMN:
            found[key] = names[0]
    for key, usual in shape.optional.items():
        found[key] = _only(kinds, vars(row_format)[key], usual)
    return found


_USUAL = {
    key: [name for shape in SHAPES.values() for name in shape.needed.get(key, ())]
    for key in ("messages", "prompt", "response")
}
"""Key of `attr` → all usual names of its column."""
_KINDS = {
    "messages": ("list",),
    "prompt": ("text", "list"),
    "response": ("text", "list", "empty", "other"),
    "audios": ("text", "list", "other"),
    TEXT_COLUMN: ("text", "empty"),
}
"""Key of `attr` → what its column may hold for a row to have the format."""


def _candidates(kinds: _Columns, configured: str | None, usual: Sequence[str], allowed: Sequence[str]) -> list[str]:
    """Columns that may hold a field: the configured one, or each of those that are tried."""
    if configured is not None and kinds.get(configured) in allowed:
        return [configured]
    found = [name for name in _names(configured, usual) if kinds.get(name) in allowed]
    return found[:1] if usual[0] == "messages" else found  # of several lists of turns the first, as ever


def _names(configured: str | None, usual: Sequence[str]) -> Sequence[str]:
    """Names that are tried: the configured one; where none is, or it is a usual one, all usual ones."""
    if configured is None:
        return usual
    if configured in usual:
        return (configured, *usual)
    return (configured,)


def _only(kinds: _Columns, configured: str | None, usual: Sequence[str]) -> str:
    """The column of a field that a row may lack, one that holds something before one that is empty; empty: it does."""
    names = [name for name in _names(configured, usual) if name in kinds]
    return min(names, key=lambda name: kinds[name] == "empty", default="")


def _pair(kinds: _Columns, row_format: RowFormat) -> dict[str, str]:
    return {key: _only(kinds, vars(row_format)[key], usual) for key, usual in PAIRS.items()}


def _ambiguous(key: str, names: Sequence[str]) -> _Problem:
    what = "what is asked" if key == "prompt" else "the answer"
    return _Problem(
        f"{ATTR_KEY}.{key}",
        f"several columns may hold {what}: {', '.join(names)}",
        f"Set {ATTR_KEY}.{key} to one of them.",
    )


def _unknown(kinds: _Columns, row_format: RowFormat, pair: Mapping[str, str]) -> _Problem:
    """The error for a row that no format fits."""
    has = f"the row has {sorted(kinds)}"
    for key in ("messages", "prompt", "response", "rejected"):
        column = vars(row_format)[key]
        if column and column not in kinds:
            return _Problem(column, f"the field is missing; {has}", f"Name the column in {ATTR_KEY}.{key}.")
    if not row_format.ranking and pair["chosen"] and pair["rejected"]:
        what = f"the row holds a preference pair and no answer of its own; {has}"
        return _Problem(pair["rejected"], what, "Set stage: rm and posttrain.method: dpo to compare the two answers.")
    asked = _candidates(kinds, row_format.prompt, _QUESTIONS, _KINDS["prompt"])
    if asked:
        way_out = f"Name the column of the answer in {ATTR_KEY}.response, or train on prompts: posttrain.method: grpo."
        return _Problem(
            f"{ATTR_KEY}.response", f"'{asked[0]}' holds a question, and nothing answers it; {has}", way_out
        )
    return _Problem(ATTR_KEY, f"no row format fits: {has}; tried: {_tried(row_format)}", _SETTLE)


_QUESTIONS = (*SHAPES["instruction"].needed["prompt"], *SHAPES["question"].needed["prompt"])


def _tried(row_format: RowFormat) -> str:
    described = []
    for name, shape in SHAPES.items():
        if _may_be(row_format, shape, needs_answer=True):
            needed = " and ".join("|".join(usual) for usual in shape.needed.values())
            described.append(f"{name} ({needed})")
    return "; ".join(described)


_SETTLE = (
    f"Name the columns: {ATTR_KEY}.messages (a list of turns), or {ATTR_KEY}.prompt and {ATTR_KEY}.response (a "
    "question and its answer)."
)
