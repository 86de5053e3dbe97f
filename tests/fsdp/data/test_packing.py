"""Packs keep both caps, waste little, and are what plain best fit would make."""

from __future__ import annotations

import bisect

import numpy as np
import pytest

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
    packs = best_fit(tokens, 2048, patches, 1400)
    assert sorted(index for pack in packs for index in pack) == list(range(600))
    assert all(sum(tokens[i] for i in pack) <= 2048 for pack in packs)
    assert all(sum(patches[i] for i in pack) <= 1400 for pack in packs)
    assert packs[0][0] == 0 and packs == sorted(packs)
    # The cap on patches is what binds here: without it far fewer packs would do.
    assert len(packs) > 1.2 * len(best_fit(tokens, 2048))
    assert sum(patches) / (1400 * len(packs)) > 0.85


def test_as_many_packs_as_best_fit_written_out() -> None:
    tokens = log_normal(400, 1024, seed=3)
    plain, ours = written_out(tokens, 1024), best_fit(tokens, 1024)
    used = [sorted(sum(tokens[i] for i in pack) for pack in packs) for packs in (plain, ours)]
    assert used[0] == used[1]


@pytest.mark.parametrize("capacity", [2048, 8192])
def test_useful_tokens_of_a_log_normal_mix(capacity: int) -> None:
    """What is left over of a buffer is packed with what comes next: the fullest packs count."""
    tokens = log_normal(64 * capacity // 600, capacity)
    filled = sorted((sum(tokens[i] for i in pack) for pack in best_fit(tokens, capacity)), reverse=True)
    taken = filled[: len(filled) * 7 // 8]
    assert sum(taken) / (capacity * len(taken)) >= 0.995


def test_a_sample_above_a_cap_is_refused() -> None:
    with pytest.raises(ValueError, match="sample 1 does not fit a pack: 9 tokens"):
        best_fit([3, 9], 8)
    with pytest.raises(ValueError, match="sample 0 does not fit a pack: 3 tokens, 7 patches"):
        best_fit([3], 8, [7], 6)


def test_nothing_to_pack() -> None:
    assert best_fit([], 8) == []
