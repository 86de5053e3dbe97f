"""The benchmarks of data: unequal work is found, memory that grows is told from a warm-up, rates from times."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from PIL import Image

from benchmarks import conversations, data_memory, data_rate
from benchmarks.contenders import UnequalWorkError
from benchmarks.data_contenders import CHECKED, FLOOR, Contenders, check_batches
from benchmarks.rounds import spread


def test_rows_name_media_that_are_there(tmp_path: Path) -> None:
    (tmp_path / "media").mkdir()
    files = conversations.write_pictures(tmp_path, 2)
    assert [Image.open(tmp_path / name).size for name in files] == [(112, 112)] * 2
    made = list(conversations.rows("image", files, 5))
    assert [row["images"] for row in made] == [[files[i % 2]] for i in range(5)]
    assert len({json.dumps(row["messages"]) for row in made}) == 5


@pytest.mark.slow
def test_every_way_gives_the_batches_of_the_processor(tmp_path: Path) -> None:
    conversations.main("pictures", tmp_path, 32)
    contenders = Contenders(tmp_path)
    contenders.check_equal()
    assert contenders.cache_bytes() < 40_000 + 4000  # settings and table, spread over few rows
    found = [contenders.plain(), contenders.ours(), contenders.cache(), contenders.mapped()]
    assert all(one["value"] > 0 for one in found)
    assert min(contenders.in_turn().values()) > 0
    assert not (tmp_path / "mapped").exists()


def test_unequal_batches_are_found() -> None:
    batch = {name: torch.arange(4) for name in CHECKED}
    check_batches("ours", [batch], [batch])
    with pytest.raises(UnequalWorkError, match="ours: pixel_values of batch 1 is another"):
        check_batches("ours", [batch, batch], [batch, batch | {"pixel_values": torch.arange(4) + 1}])


def test_a_leak_is_a_rise_and_a_warm_up_is_none() -> None:
    samples = list(range(100, 20_001, 100))
    warmed = [300.0 + min(count, 1500) / 100 for count in samples]
    assert data_memory.rise(samples, warmed) == pytest.approx(0, abs=1e-6)
    leaking = [held + count / 1000 for held, count in zip(warmed, samples, strict=True)]
    assert data_memory.rise(samples, leaking) == pytest.approx(20)
    leak, still = {"held_mb": [leaking, warmed], "rise_mb": [20.0, 0.0], "samples_per_s": 9.0}, None
    assert [figure.met for figure in data_memory.figures_of("clips", leak)] == [False, still, still]
    assert 1 < data_memory.own_mb(os.getpid()) < 10_000


def test_rates_are_inverse_times() -> None:
    rounds = {
        "ratio_to_floor": {"on the fly": spread([0.5, 0.8]), "datasets.map": spread([6.0])},
        "rounds": [{"counts": True, "bytes_per_sample": 300_000.0, "map_s": 2.0, "reread_s": 8.0}],
    }
    result = {
        "samples": 2000,
        "cache_bytes_per_sample": 38_000.0,
        "in_turn": [{FLOOR: 1.0, "on the fly": time, "cache, batches": 0.1} for time in (0.5, 0.8)],
        "reread": [{"samples_per_s": rate} for rate in (5000.0, 10_000.0)],
    }
    found = {f.name: f for f in data_rate.figures(result | {"mapping": rounds, "workers": rounds})}
    ratio = found["on the fly / plain DataLoader"]
    assert (ratio.low, ratio.high, ratio.met) == (1.25, 2.0, True)
    cache = found["cache, samples"]
    assert (cache.low, cache.high, cache.met) == (5000, 10_000, False)
    assert (found["cache, on disk"].value, found["cache, on disk"].met) == (38.0, True)
    assert found["on the fly / datasets.map and one pass"].met
    assert found["datasets.map, one pass over it"].value == 250
