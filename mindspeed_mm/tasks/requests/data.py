"""What `mm data check`, `mm data preview` and `mm data stats` are asked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mindspeed_mm.core.errors import UsageError
from mindspeed_mm.core.request import Request, argument, option

_LIMIT = "Number of rows to read, spread evenly over the data."
_WORKERS = "Number of processes that read; default: by the number of cores."
_VALIDATION = "Use the validation rows instead of the training rows."
_PAGE = "Write the result as one self-contained HTML page."


@dataclass(frozen=True)
class DataCheckRequest(Request):
    """A configuration whose rows are judged."""

    config: Path = argument()
    overrides: tuple[str, ...] = argument(default=())
    decode: bool = option("Decode every image, clip and sound; otherwise only its header is read.", False)
    limit: int | None = option(_LIMIT, least=1)
    bad_rows: Path | None = option("File that every bad row is written to, one JSON object per line.")
    nproc: int | None = option("Number of ranks that share the global batch; default: WORLD_SIZE, or 1.", least=1)
    workers: int | None = option(_WORKERS, least=0)
    validation: bool = option(_VALIDATION, False)
    html: Path | None = option(_PAGE)
    as_json: bool = option("Print the result as JSON.", False, flag="--json")


@dataclass(frozen=True)
class DataPreviewRequest(Request):
    """A configuration, and rows of it that are shown as the tokens that the model gets."""

    config: Path = argument()
    overrides: tuple[str, ...] = argument(default=())
    rows: str | None = option("Row numbers, counted from 0 and separated by commas: 0,5.")
    row_ids: tuple[str, ...] = option("A row by its id, or by its location: train.jsonl:12.", (), flag="--row-id")
    count: int | None = option("Number of rows to show, in the order of training; default: 3.", least=1)
    tokens: bool = option("List every token with its id and weight.", False)
    nproc: int = option("Number of ranks that steps are divided among.", 1, least=1)
    validation: bool = option(_VALIDATION, False)
    html: Path | None = option("Write one self-contained HTML page with the media.")
    as_json: bool = option("Print ids, labels and everything else as JSON.", False, flag="--json")

    @property
    def row_numbers(self) -> list[int]:
        """The rows that are named by their numbers.

        Raises:
            UsageError: They are no numbers.
        """
        if self.rows is None:
            return []
        words = [word.strip() for word in self.rows.split(",") if word.strip()]
        if not words or not all(word.isdigit() for word in words):
            raise UsageError(f"'{self.rows}' is not a list of numbers", key="--rows", way_out="Write --rows 0,5.")
        return list(map(int, words))


@dataclass(frozen=True)
class DataStatsRequest(Request):
    """A configuration whose rows are described."""

    config: Path = argument()
    overrides: tuple[str, ...] = argument(default=())
    limit: int | None = option(_LIMIT, least=1)
    workers: int | None = option(_WORKERS, least=0)
    validation: bool = option(_VALIDATION, False)
    html: Path | None = option(_PAGE)
    as_json: bool = option("Print the result as JSON.", False, flag="--json")
