"""Few configurations in which every two features that may meet do meet (a covering array of strength 2), and, where one
of them fails, the fewest features that make it fail."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

Names = tuple[str, ...]


def pairs_in(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Every two of them, in the order given."""
    return itertools.combinations(names, 2)


def covering(
    names: Sequence[str],
    may_meet: Callable[[str, str], bool],
    limit: int,
    shows: Callable[[Names, tuple[str, str]], bool] = lambda _names, _pair: True,
) -> list[Names]:
    """Configurations in which every pair occurs, the same at each call.

    Each begins with the first pair that is still missing and takes in, one by one, the feature that meets most of those
    there for the first time; of equals, the one that is named first.

    Args:
        names: The features.
        may_meet: Whether two of them may stand in one configuration. Symmetric.
        limit: Most features of a configuration, at least 2: with too many, one could hide what another does.
        shows: Whether a configuration shows something about a pair in it; that of the pair alone must.
    """
    order = {name: index for index, name in enumerate(names)}
    missing = {pair: None for pair in pairs_in(names) if may_meet(*pair)}
    configurations = []
    while missing:
        chosen = list(next(iter(missing)))
        while len(chosen) < limit:
            candidates = [name for name in names if name not in chosen and all(may_meet(name, c) for c in chosen)]
            gains = {name: _gain(name, chosen, missing, order, shows) for name in candidates}
            best = max(candidates, key=lambda name: gains[name], default=None)
            if best is None or not gains[best]:
                break
            chosen.append(best)
        found = tuple(sorted(chosen, key=order.__getitem__))
        for pair in pairs_in(found):
            if shows(found, pair):
                missing.pop(pair, None)
        configurations.append(found)
    return configurations


def _gain(
    name: str,
    chosen: list[str],
    missing: dict[tuple[str, str], None],
    order: dict[str, int],
    shows: Callable[[Names, tuple[str, str]], bool],
) -> int:
    """How many missing pairs a configuration shows with this feature more than without it."""
    before, after = (tuple(sorted(names, key=order.__getitem__)) for names in (chosen, [*chosen, name]))
    shown_before, shown_after = (
        sum(pair in missing and shows(found, pair) for pair in pairs_in(found)) for found in (before, after)
    )
    return max(0, shown_after - shown_before)


def smallest_failing(names: Names, fails: Callable[[Names], bool]) -> Names:
    """The fewest of these features, at most two, that fail by themselves; all of them where it takes more than two.

    Args:
        names: A configuration that fails.
        fails: Runs a part of it.
    """
    parts = itertools.chain(itertools.combinations(names, 1), pairs_in(names))
    return next(filter(fails, parts), names)
