"""Packs keep both caps, waste little, and are what plain best fit would make."""

from __future__ import annotations

import bisect
from collections.abc import Iterator

import numpy as np
import pytest

from mindspeed_mm.fsdp.data.data_utils import packing
from mindspeed_mm.fsdp.data.data_utils.packing import best_fit


def log_normal(count: int, most: int, seed: int = 0) -> list[int]:
    lengths = np.random.default_rng(seed).lognormal(mean=6.0, sigma=1.0, size=count)
    return np.clip(lengths, 16, most).astype(int).tolist()


def written_out(tokens: list[int], capacity: int) -> list[list[int]]:
    """Best fit decreasing in its plainest form: a sorted list of (room, number of the pack's first sample)."""
    packs: list[list[int]] = []
    free: list[tuple[int, int]] = []
    for index in sorted(range(len(tokens)), key=lambda i: (-tokens[i], i)):
        at = bisect.bisect_left(free, (tokens[index], -1))
        if at == len(free):
            packs.append([])
            free.append((capacity, len(packs) - 1))
            at = len(free) - 1
        room, pack = free.pop(at)
        packs[pack].append(index)
        bisect.insort(free, (room - tokens[index], pack))
    return packs


def test_every_sample_once_and_both_caps_kept() -> None:
    draw = np.random.default_rng(1)
    tokens = log_normal(600, 2048)
    patches = [int(draw.integers(0, 3)) * 300 + length // 4 for length in tokens]
    packs = best_fit(tokens, 2048, patches, 1400).lists()
    assert sorted(index for pack in packs for index in pack) == list(range(600))
    assert all(sum(tokens[i] for i in pack) <= 2048 for pack in packs)
    assert all(sum(patches[i] for i in pack) <= 1400 for pack in packs)
    assert packs[0][0] == 0 and packs == sorted(packs)
    # The cap on patches is what binds here: without it far fewer packs would do.
    assert len(packs) > 1.2 * len(best_fit(tokens, 2048))
    assert sum(patches) / (1400 * len(packs)) > 0.85


def test_as_many_packs_as_best_fit_written_out() -> None:
    tokens = log_normal(400, 1024, seed=3)
    plain, ours = written_out(tokens, 1024), best_fit(tokens, 1024).lists()
    used = [sorted(sum(tokens[i] for i in pack) for pack in packs) for packs in (plain, ours)]
    assert used[0] == used[1]


@pytest.mark.parametrize("capacity", [2048, 8192])
def test_useful_tokens_of_a_log_normal_mix(capacity: int) -> None:
    """What is left over of a buffer is packed with what comes next: the fullest packs count."""
    tokens = log_normal(64 * capacity // 600, capacity)
    filled = sorted((sum(tokens[i] for i in pack) for pack in best_fit(tokens, capacity).lists()), reverse=True)
    taken = filled[: len(filled) * 7 // 8]
    assert sum(taken) / (capacity * len(taken)) >= 0.995


def test_a_sample_above_a_cap_is_refused() -> None:
    with pytest.raises(ValueError, match="sample 1 does not fit a pack: 9 tokens"):
        best_fit([3, 9], 8)
    with pytest.raises(ValueError, match="sample 0 does not fit a pack: 3 tokens, 7 patches"):
        best_fit([3], 8, [7], 6)


def test_nothing_to_pack() -> None:
    assert best_fit([], 8).lists() == []


def by_the_rule(tokens: list[int], capacity: int, patches: list[int], most: int, first: int) -> list[list[int]]:
    """Both caps: each sample into the pack with the least room that takes it, of those the one that was filled last."""
    packs: list[list[int]] = []
    free: list[tuple[int, int, int]] = []  # room, when it was filled last (negative), spare patches
    shares = [max(length / capacity, work / most) for length, work in zip(tokens, patches, strict=True)]
    for turn, index in enumerate(sorted(range(len(tokens)), key=lambda i: (i >= first, -shares[i], i))):
        takes = [n for n, (room, _, spare) in enumerate(free) if room >= tokens[index] and spare >= patches[index]]
        if not takes:
            takes = [len(packs)]
            packs.append([])
            free.append((capacity, 0, most))
        pack = min(takes, key=lambda n: free[n])
        packs[pack].append(index)
        room, _, spare = free[pack]
        free[pack] = (room - tokens[index], -turn, spare - patches[index])
    return sorted(map(sorted, packs))


def cases(count: int) -> Iterator[tuple[list[int], int, list[int], int, int]]:
    """Random ones; in most of them many samples are of equal size, and packs equally full."""
    draw = np.random.default_rng(0)
    for _ in range(count):
        samples, capacity = int(draw.integers(1, 120)), int(draw.choice([7, 64, 300]))
        most = int(draw.choice([1, 30, 200]))
        sizes = draw.integers(0, capacity + 1, int(draw.choice([1, 3, 200])))
        works = draw.integers(0, most + 1, int(draw.choice([1, 3, 200])))
        tokens, patches = draw.choice(sizes, samples).tolist(), draw.choice(works, samples).tolist()
        yield tokens, capacity, patches, most, int(draw.choice([0, 0, 1, samples // 2]))


def test_they_are_those_of_the_rule_ties_included() -> None:
    """A run that is resumed packs what its own code packed before: the very same samples share a row."""
    for case in cases(400):
        assert best_fit(*case).lists() == by_the_rule(*case)


def test_blocks_of_packs_are_those_of_the_rule() -> None:
    """So many packs that they stand in many blocks."""
    draw = np.random.default_rng(1)
    patches = draw.integers(0, 90, 1200).tolist()
    for tokens in ([5] * 1200, draw.integers(1, 60, 1200).tolist()):
        assert best_fit(tokens, 100, patches, 100).lists() == by_the_rule(tokens, 100, patches, 100, 0)


def test_a_planted_fault_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pack with just as much room as is wanted is overlooked."""
    honest = packing._OpenPacks.take
    monkeypatch.setattr(packing._OpenPacks, "take", lambda self, tokens, patches: honest(self, tokens + 1, patches))
    with pytest.raises(AssertionError):
        test_they_are_those_of_the_rule_ties_included()
