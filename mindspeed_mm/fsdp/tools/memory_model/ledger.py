"""The books of a simulated step: what was taken, under which label, until when; and the moment when most was held."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from mindspeed_mm.fsdp.utils.host_memory import FROM_HEAP_BYTES, KEPT_BYTES


class Label(NamedTuple):
    """What some bytes are: their category, and the module that took them."""

    category: str
    """One of the names in `CATEGORIES`."""
    module: str = ""
    """Pattern of the module that took them (`model.layers.{*}.mlp`), where it is known."""


ACTIVATIONS, RECOMPUTED, TEMPORARY = "activations", "recomputed", "temporary"
GRADIENTS, GATHERED, REDUCTION, BATCH, HOST = "gradients", "gathered parameters", "reduction buffers", "batch", "host"
CATEGORIES = (ACTIVATIONS, RECOMPUTED, TEMPORARY, GRADIENTS, GATHERED, REDUCTION, BATCH)
"""What a ledger of a device may hold; `HOST` beside them is memory that lies elsewhere and counts for nothing."""


class MemoryLedger:
    """Entries of bytes that come and go in order."""

    def __init__(self) -> None:
        self._labels: list[Label] = []
        self._bytes: list[int] = []
        self._events: list[int] = []  # entry + 1 when taken, its negative when given back
        self._phases: list[tuple[int, str]] = []

    def take(self, label: Label, size: int) -> int:
        """Note bytes that are taken now; returns the entry's number."""
        self._labels.append(label)
        self._bytes.append(size)
        self._events.append(len(self._bytes))
        return len(self._bytes) - 1

    def give_back(self, entry: int) -> None:
        """Note that an entry's bytes are free again."""
        self._events.append(-entry - 1)

    def label(self, entry: int) -> Label:
        """What an entry is, as far as it is known by now."""
        return self._labels[entry]

    def relabel(self, entry: int, label: Label) -> None:
        """Only now it is known what an entry was from its beginning."""
        self._labels[entry] = label

    def resize(self, entry: int, size: int) -> None:
        """Only now it is known how much an entry was from its beginning."""
        self._bytes[entry] = size

    def begin(self, phase: str) -> None:
        """What comes now belongs to this phase."""
        self._phases.append((len(self._events), phase))

    @property
    def now(self) -> int:
        """The present moment, for `alive_at`."""
        return len(self._events)

    def peak(self) -> int:
        """The moment when most bytes were held."""
        held = most = moment = 0
        for position, event in enumerate(self._events, start=1):
            entry = abs(event) - 1
            if self._labels[entry].category == HOST:
                continue
            held += self._bytes[entry] if event > 0 else -self._bytes[entry]
            if held > most:
                most, moment = held, position
        return moment

    def resident(self) -> int:
        """Most bytes that a process keeps on a host, above what is there already: glibc hands large blocks back when
        they are free, and keeps up to 1 GiB of small ones for the next step (`utils.host_memory`)."""
        small, highest = 0, 0
        held = []  # (large, small) after each event
        large = 0
        for event in self._events:
            entry = abs(event) - 1
            if self._labels[entry].category == HOST:
                continue
            change = self._bytes[entry] if event > 0 else -self._bytes[entry]
            if self._bytes[entry] >= FROM_HEAP_BYTES:
                large += change
            else:
                small += change
                highest = max(highest, small)
            held.append((large, small))
        return max((big + min(highest, little + KEPT_BYTES) for big, little in held), default=0)

    def alive_at(self, moment: int) -> Counter[Label]:
        """Bytes by label that were held at a moment."""
        alive: Counter[Label] = Counter()
        for event in self._events[:moment]:
            entry = abs(event) - 1
            alive[self._labels[entry]] += self._bytes[entry] if event > 0 else -self._bytes[entry]
        return Counter({label: size for label, size in alive.items() if size and label.category != HOST})

    def phase_at(self, moment: int) -> str:
        """The phase that a moment belongs to."""
        for start, phase in reversed(self._phases):
            if start < max(moment, 1):
                return phase
        return ""
