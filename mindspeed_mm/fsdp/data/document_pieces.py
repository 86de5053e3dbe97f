"""Documents of plain text that are longer than `cutoff_len`, in pieces of that length: `truncation: split`.

A piece is a sample of its own: it is shuffled, packed and counted like any other. The pieces of a document, one after
the other, are its tokens. Where they begin follows from the length of the document, which has to be known: from a cache
of encoded samples, or by tokenising every document once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from typing_extensions import override

from mindspeed_mm.fsdp.data.data_utils.encode import SampleOutline
from mindspeed_mm.fsdp.data.data_utils.rows.row_table import Part
from mindspeed_mm.fsdp.data.data_utils.sample import SampleSize
from mindspeed_mm.fsdp.data.dataset import DatasetView, MMDataset
from mindspeed_mm.fsdp.data.sample_cache import measured_rows

MEASURED_ROWS = 2048
"""A data set of up to so many rows is measured whole even where an estimate would do."""
_PROBED_ROWS = 512
"""Rows of a larger one, evenly spread, that stand for those around them."""


class PieceLocation(NamedTuple):
    """Where a piece comes from, printed as `train.jsonl:12, piece 2 of 5`."""

    document: Any
    """The place of its document."""
    piece: int
    """From 1."""
    pieces: int

    def __str__(self) -> str:
        return f"{self.document}, piece {self.piece} of {self.pieces}"


def piece_counts(lengths: np.ndarray, most: int) -> np.ndarray:
    """Number of pieces of documents with these lengths; at least one."""
    return np.maximum(1, -(-lengths // most))


def piece_spans(pieces: np.ndarray, lengths: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Where pieces begin and end in their documents.

    All pieces of a document but the last have `most` tokens. A last piece of a single token would have nothing to
    predict, so it takes one from the piece before.

    Args:
        pieces: (N,) number of each piece in its document, from 0.
        lengths: (N,) tokens of its document.
        most: Maximum number of tokens in a piece.
    """
    counts = piece_counts(lengths, most)
    moves = (counts > 1) & (lengths % most == 1) & (most > 2)

    def border(number: np.ndarray) -> np.ndarray:
        return np.where(number >= counts, lengths, number * most - (moves & (number == counts - 1)))

    return border(pieces), border(pieces + 1)


def piece_lengths(lengths: np.ndarray, most: int) -> np.ndarray:
    """Tokens of every piece of documents that have these lengths."""
    _, pieces, of_document = _numbered(lengths, piece_counts(lengths, most))
    starts, ends = piece_spans(pieces, of_document, most)
    return ends - starts


def _numbered(lengths: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of every piece: its document, its number there, and the length of the document."""
    documents = np.repeat(np.arange(len(counts)), counts)
    firsts = np.cumsum(counts) - counts
    return documents, np.arange(len(documents)) - firsts[documents], lengths[documents]


def in_pieces(dataset: MMDataset, *, estimates: bool = False) -> MMDataset:
    """The data set with its long documents in pieces; itself where `truncation` does not split them.

    Args:
        dataset: Samples, each a whole row.
        estimates: Measure only some rows of a large data set whose lengths are not known: enough for a look at the
            first batches and for the number of steps.
    """
    if not dataset.cuts_documents:
        return dataset
    sizes, rows = dataset.known_sizes(), len(dataset)
    measured = np.arange(rows)
    if sizes is None:
        if estimates and rows > MEASURED_ROWS:
            measured = np.arange(_PROBED_ROWS) * rows // _PROBED_ROWS
        sizes = np.zeros((rows, 2), dtype=np.int64)
        sizes[measured] = measured_rows(dataset, measured)
    return DocumentPieces(dataset, sizes, measured)


class DocumentPieces(DatasetView):
    """The samples of a data set, those that are longer than `cutoff_len` in pieces.

    Args:
        whole: The data set; its samples that are longer are documents.
        sizes: (rows, 2) int64 tokens and patches; 0 tokens: the row cannot be used, or was not measured.
        measured: Rows that were measured, ascending; of any other the number of pieces is that of the row measured
            before it.
    """

    def __init__(self, whole: MMDataset, sizes: np.ndarray, measured: np.ndarray) -> None:
        super().__init__(whole)
        self.row_numbers, self.cuts_documents = None, False
        self._most = whole.basic_parameters.cutoff_len
        self._sizes, self._measured = sizes, measured
        nearest = np.searchsorted(measured, np.arange(len(whole)), side="right") - 1
        self._counts = piece_counts(sizes[measured, 0], self._most)[nearest]
        self._ends = np.cumsum(self._counts)
        self._is_exact = len(measured) == len(whole)
        self.parts = [Part(part.name, self._first(part.first), self._first(part.end)) for part in whole.parts]
        self._last: tuple[int, Any] = (-1, None)
        """The row that was encoded last, with its sample: a pass takes its pieces one after the other."""

    def __len__(self) -> int:
        if len(self._ends):
            return int(self._ends[-1])
        return 0

    def __getitem__(self, index: int) -> Any:
        """Sample `index`: a piece of a document, or any other sample as it is.

        Raises:
            DataError: The row cannot be used.
        """
        row = self._number(index)
        if self._last[0] != row:
            self._last = row, self._whole[row]
        sample = self._last[1]
        start, end = self._span(index, len(sample["input_ids"]))
        if end - start == len(sample["input_ids"]):
            return dict(sample)
        cut = {key: sample[key][start:end] for key in ("input_ids", "labels")}
        return {**sample, **cut, "sample_id": str(self.place(index))}

    @override
    def measure(self, index: int) -> SampleSize | None:
        row = self._number(index)
        tokens, patches = self._sizes[row].tolist()
        if not tokens:
            size = self._whole.measure(row)
            if size is None:
                return None
            tokens, patches = size
        start, end = self._span(index, tokens)
        return SampleSize(end - start, patches)

    @override
    def known_sizes(self) -> np.ndarray | None:
        if not self._is_exact:
            return None
        rows, pieces, lengths = _numbered(self._sizes[:, 0], self._counts)
        starts, ends = piece_spans(pieces, lengths, self._most)
        return np.stack([ends - starts, self._sizes[rows, 1]], axis=1)

    @override
    def place(self, index: int) -> Any:
        place, (piece, pieces) = super().place(index), self._piece(index)
        if pieces > 1:
            return PieceLocation(place, piece + 1, pieces)
        return place

    @override
    def outline(self, index: int) -> SampleOutline | tuple[SampleOutline, SampleOutline]:
        found = super().outline(index)
        if isinstance(found, tuple) and not isinstance(found, SampleOutline):
            return found
        start, end = self._span(index, len(found.input_ids))
        if end - start == len(found.input_ids):
            return found
        return found._replace(
            input_ids=found.input_ids[start:end],
            labels=found.labels[start:end],
            weights=found.weights[start:end],
            size=SampleSize(end - start, found.size.patches),
            full_tokens=end - start,
        )

    @override
    def row_notes(self) -> list[str]:
        notes = super().row_notes()
        longer = int((self._sizes[self._measured, 0] > self._most).sum())
        if longer and self._is_exact:
            notes.append(
                f"{longer:,} of {len(self._whole):,} documents have more tokens than cutoff_len {self._most:,} and are "
                f"cut: {len(self):,} samples"
            )
        elif longer:
            notes.append(f"documents are cut at cutoff_len {self._most:,}: about {len(self):,} samples")
        return notes

    @override
    def _number(self, index: int) -> int:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        return int(np.searchsorted(self._ends, index, side="right"))

    def _first(self, row: int) -> int:
        """The first sample of a row."""
        if row:
            return int(self._ends[row - 1])
        return 0

    def _piece(self, index: int) -> tuple[int, int]:
        """Number of a piece, from 0, and how many pieces its row has."""
        row = self._number(index)
        pieces = int(self._counts[row])
        return index - self._first(row), pieces

    def _span(self, index: int, length: int) -> tuple[int, int]:
        """The tokens of a row of this length that are sample `index`."""
        lengths = np.array([length])
        pieces = self._piece(index)[0] % piece_counts(lengths, self._most)  # an estimated row may have fewer
        (start,), (end,) = piece_spans(pieces, lengths, self._most)
        return int(start), int(end)
