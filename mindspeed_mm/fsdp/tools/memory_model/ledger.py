"""The books of a simulated step: what was taken, under which label, until when; and the moment when most was held."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
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


class BookedWork(NamedTuple):
    """What is done for which block."""

    work: str
    """A word for it."""
    number: int
    """For which time it is done for this block."""
    block: str
    """Name of the block; empty: of none."""


@dataclass
class Log:
    """What a ledger holds: its entries, and when they came and went."""

    labels: list[Label] = field(default_factory=list)
    """Of each entry."""
    sizes: list[int] = field(default_factory=list)
    """Bytes of each entry."""
    events: list[int] = field(default_factory=list)
    """An entry + 1 when it is taken, its negative when it is given back."""
    phases: list[tuple[int, str]] = field(default_factory=list)
    """Number of events before a phase, and its name."""
    places: list[tuple[int, BookedWork]] = field(default_factory=list)
    """Number of events before a place is come to."""
    moments: list[int] = field(default_factory=list)
    """Those that were noted."""


class MemoryLedger:
    """Entries of bytes that come and go in order.

    Args:
        log: What stands in it already.
    """

    def __init__(self, log: Log | None = None) -> None:
        self.log = log or Log()

    def take(self, label: Label, size: int) -> int:
        """Note bytes that are taken now; returns the entry's number."""
        self.log.labels.append(label)
        self.log.sizes.append(size)
        self.log.events.append(len(self.log.sizes))
        return len(self.log.sizes) - 1

    def give_back(self, entry: int) -> None:
        """Note that an entry's bytes are free again."""
        self.log.events.append(-entry - 1)

    def label(self, entry: int) -> Label:
        """What an entry is, as far as it is known by now."""
        return self.log.labels[entry]

    def relabel(self, entry: int, label: Label) -> None:
        """Only now it is known what an entry was from its beginning."""
        self.log.labels[entry] = label

    def resize(self, entry: int, size: int) -> None:
        """Only now it is known how much an entry was from its beginning."""
        self.log.sizes[entry] = size

    def begin(self, phase: str) -> None:
        """What comes now belongs to this phase."""
        self.log.phases.append((self.now, phase))

    @property
    def now(self) -> int:
        """The present moment, for `alive_at`."""
        return len(self.log.events)

    @property
    def taken(self) -> int:
        """How many entries there are."""
        return len(self.log.sizes)

    def enter(self, place: BookedWork) -> None:
        """What comes now is done there."""
        self.log.places.append((self.now, place))

    def note(self) -> None:
        """Note the present moment, for `alive_at`."""
        self.log.moments.append(self.now)

    def peak(self) -> int:
        """The moment when most bytes were held."""
        held = most = moment = 0
        for position, change in enumerate(self._changes(), start=1):
            held += change
            if held > most:
                most, moment = held, position
        return moment

    def resident(self) -> int:
        """Most bytes that a process keeps on a host, above what is there already: glibc hands large blocks back when
        they are free, and keeps up to 1 GiB of small ones for the next step (`utils.host_memory`)."""
        changes = self._changes()
        # First how high the heap of small blocks gets in the whole step, then what is resident when.
        small = highest = 0
        for change in changes:
            if abs(change) < FROM_HEAP_BYTES:
                small += change
                highest = max(highest, small)
        small = large = most = 0
        for change in changes:
            if abs(change) < FROM_HEAP_BYTES:
                small += change
            else:
                large += change
            most = max(most, large + min(highest, small + KEPT_BYTES))
        return most

    def _changes(self) -> list[int]:
        """Bytes that each event adds to what is held."""
        sizes = [0]
        for label, size in zip(self.log.labels, self.log.sizes, strict=True):
            sizes.append(0 if label.category == HOST else size)
        return [sizes[event] if event > 0 else -sizes[-event] for event in self.log.events]

    def alive_at(self, moment: int) -> Counter[Label]:
        """Bytes by label that were held at a moment."""
        held: dict[int, None] = {}
        for event in self.log.events[:moment]:
            if event > 0:
                held[event] = None
            else:
                held.pop(-event, None)
        alive: Counter[Label] = Counter()
        for entry in held:
            alive[self.log.labels[entry - 1]] += self.log.sizes[entry - 1]
        return Counter({label: size for label, size in alive.items() if size and label.category != HOST})

    def phase_at(self, moment: int) -> str:
        """The phase that a moment belongs to."""
        for start, phase in reversed(self.log.phases):
            if start < max(moment, 1):
                return phase
        return ""
