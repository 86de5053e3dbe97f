"""What work is proportional to: rows of a sequence, or the pairs that attention looks at.

A batch is described by the lengths of its sequences alone (documents, images, clips, captions): numbers that the host
has before a step begins.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Literal, NamedTuple

Lengths = Mapping[str, Sequence[float]]
"""Sequence → the length of each piece that attention does not look beyond."""

TEXT = "text"
"""Tokens of documents."""
LABELS = "labels"
"""Rows that the output head is run on."""
CODES = "codes"
"""What a code predictor reads of each frame of speech, one code behind the other."""
FRAMES = "frames"
"""Frames of speech, each of which every head of a code predictor sees once."""
SAMPLES = "samples"
"""One row a sample: time steps, pooled captions."""
PASSES = "passes"
"""One for each micro-batch: work that does not depend on what is in it."""
PATCHES = "patches"
"""Patches of each image, or of each frame of a video."""
CUTS = "cut patches"
"""The same, without the token that some towers put in front."""
WINDOWS = "patch windows"
"""The same patches, cut into a tower's windows."""
MEDIA = "media tokens"
"""What a vision tower hands to the decoder."""
SOUND = "sound"
"""Positions of an audio encoder, by the windows of its attention; of sound that is denoised."""
SOUND_TOKENS = "sound tokens"
"""What it hands to the decoder."""
LATENTS = "latents"
"""Tokens of an image or a clip that is denoised."""
LATENT_TOKENS = "latent tokens"
"""Those of pictures in a document of words, which have layers of their own."""
CAPTION = "caption"
"""Text features that a generator reads."""
PICTURE = "picture"
"""Features of an image that a video goes on from."""

CAUSAL = (TEXT, CODES)
"""Sequences whose attention does not look ahead."""

Mask = Literal["none", "causal", "sliding", "chunked"]


class Amount(NamedTuple):
    """How much of a unit a batch has, by the two conventions."""

    full: float
    """Every pair is counted, as a product of whole matrices does."""
    causal: float
    """Pairs that a mask hides are left out; half of all for a causal one."""


class WorkUnit(NamedTuple):
    """Rows of a sequence; with `keys`, pairs of a row and what it looks at."""

    rows: str
    """A sequence, or several that stand one behind the other, joined by `+`."""
    keys: str = ""
    mask: Mask = "none"
    """`causal` without keys: rows whose work a triangular mask halves (chunks of linear attention)."""
    window: int = 0
    """Window of a sliding or chunked mask, in tokens."""

    def amount(self, lengths: Lengths) -> Amount:
        """Of a batch; 0 where it lacks the sequence."""
        rows = _joined(self.rows, lengths)
        if not self.keys:
            full = float(sum(rows))
            return Amount(full, full / 2 if self.mask == "causal" else full)
        keys = rows if self.keys == self.rows else _joined(self.keys, lengths)
        full = float(sum(map(operator.mul, rows, keys)))
        if self.mask == "none":
            return Amount(full, full)
        return Amount(full, sum(map(self._visible, rows)))

    def _visible(self, length: float) -> float:
        """Pairs that a causal mask with or without a window leaves of length², the diagonal counted by half."""
        window = self.window
        if self.mask == "causal" or not window or length <= window:
            return length * length / 2
        # The first rows do not see a whole window yet.
        if self.mask == "sliding":
            return window * length - window * window / 2
        # Each chunk is causal by itself, the last one may be shorter.
        chunks, rest = divmod(length, window)
        return chunks * window * window / 2 + rest * rest / 2


def _joined(names: str, lengths: Lengths) -> Sequence[float]:
    first, *others = (lengths.get(name, ()) for name in names.split("+"))
    if not others:
        return first
    return list(map(sum, zip_longest(first, *others, fillvalue=0)))
