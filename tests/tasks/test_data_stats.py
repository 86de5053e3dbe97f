"""`mm data stats`: its numbers are those of samples encoded one by one, and of packs and batches formed by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mindspeed_mm.core.errors import DataError
from mindspeed_mm.fsdp.data import build_mm_dataset
from mindspeed_mm.fsdp.params.data_args import BasicParameters, DataloaderParam
from mindspeed_mm.fsdp.params.loader import load_config
from mindspeed_mm.tasks.data import stats
from mindspeed_mm.tasks.data.histogram import histogram, percentiles
from mindspeed_mm.tasks.data.page import stats_page
from mindspeed_mm.tasks.data.stats import DataStats, PackingEstimate, packing_at, padded_fill
from mindspeed_mm.tasks.data.words import Paint, bars, stats_lines
from mindspeed_mm.tasks.requests.data import DataStatsRequest
from tests.tasks.data_rows import add_rows, basics, conversation, make_run
from tests.tasks.test_report import Page, external


@pytest.fixture(scope="module")
def yaml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("stats"))


@pytest.fixture(scope="module")
def found(yaml: Path) -> DataStats:
    return stats.run(DataStatsRequest(yaml))


@pytest.fixture(scope="module")
def encoded(yaml: Path) -> list[Any]:
    """Every sample, encoded: what the statistics are held against."""
    dataset, _ = build_mm_dataset(load_config(yaml).arguments.data.dataset_param)
    return [dataset[index] for index in range(len(dataset))]


def test_lengths_and_trained_share_are_those_of_the_encoded_samples(found: DataStats, encoded: list[Any]) -> None:
    lengths = [len(sample["input_ids"]) for sample in encoded]
    assert found.tokens["total"] == sum(lengths)
    assert (found.tokens["min"], found.tokens["max"]) == (min(lengths), max(lengths))
    assert found.tokens["p50"] == sorted(lengths)[len(lengths) // 2 - 1]
    trained = sum(int((sample["labels"][1:] != -100).sum()) for sample in encoded)
    assert found.trained_share == pytest.approx(trained / sum(lengths), abs=1e-4)
    assert sum(each.rows for each in found.token_bins) == 24


def test_media_are_counted_and_measured(found: DataStats) -> None:
    [images] = found.media
    assert (images.kind, images.items, images.rows, images.most_in_a_row) == ("image", 24, 16, 2)
    assert images.per_row == {0: 8, 1: 8, 2: 8}
    assert images.sizes == [(32, 32, 24)]
    assert found.patches["total"] == 24 * 16  # of 8 × 8 pixels
    assert found.roles == {"user": 24, "assistant": 24}


def test_fills_by_hand(found: DataStats) -> None:
    lengths = np.array([10, 30, 20, 40])
    assert packing_at(lengths, 50, 50) == PackingEstimate(50, rows_kept=1.0, packs=2, fill=1.0)
    assert packing_at(lengths, 25, 50) == PackingEstimate(25, rows_kept=0.5, packs=2, fill=0.6)
    assert packing_at(lengths, 50, 25) == PackingEstimate(50, rows_kept=0.5, packs=1, fill=0.6)
    assert packing_at(lengths, 5, 50) is None
    assert padded_fill(lengths, 4, seed=0) == 100 / 160
    assert padded_fill(lengths, 1, seed=0) == 1.0
    assert padded_fill(np.zeros(0, dtype=np.int64), 4, seed=0) == 0.0
    assert [each.tokens for each in found.packing] == [1024, 2048, 4096, 8192]  # a micro-batch has two rows of 1024


def test_long_rows_count_before_truncation_and_a_length_is_suggested(yaml: Path, encoded: list[Any]) -> None:
    short = stats.run(DataStatsRequest(yaml, basics(cutoff_len=45)))
    lengths = sorted(len(sample["input_ids"]) for sample in encoded)
    assert short.usable == sum(length <= 45 for length in lengths)
    assert sum(each.rows for each in short.token_bins) == 24
    assert short.suggestions[0].startswith("cutoff_len=128 keeps 99% of the rows")


def test_lines_and_json(found: DataStats) -> None:
    text = "\n".join(stats_lines(found, Paint(colour=False)))
    for part in (
        "24 rows read, 24 usable",
        "images  24 in 16 rows",
        "32 × 32 (24)",
        "full  ← as configured\n  packed",
        "trained: ",
    ):
        assert part in text
    told = json.loads(json.dumps(found.to_dict()))
    assert (told["usable"], told["tokens"]["total"]) == (24, found.tokens["total"])


@pytest.mark.parametrize(
    ("basic", "loader", "told"),
    [
        ({"packing": True}, {}, "packed"),
        ({}, {"max_tokens_per_batch": 64}, ""),
        ({}, {"sampler_type": "LengthGroupedSampler"}, ""),
        ({}, {"sampler_type": "SequentialSampler"}, "padded"),
    ],
)
def test_what_is_configured_is_what_training_does(
    found: DataStats, basic: dict[str, Any], loader: dict[str, Any], told: str
) -> None:
    configured = stats._configured(DataloaderParam(**loader), BasicParameters(**basic))
    marked = [line for line in stats_lines(replace(found, configured=configured), Paint(colour=False)) if "←" in line]
    assert configured == told and len(marked) == bool(told)
    assert all(("packed,     2,048" in line) == (told == "packed") for line in marked)


def test_pairs_have_no_packs_and_no_row_longer_than_a_row(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    answers = {"chosen": {"role": "assistant", "content": "one"}, "rejected": {"role": "assistant", "content": "two"}}
    pair = {"messages": [{"role": "user", "content": "Which digit?"}], **answers}
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(pair)}\n" * 2)
    told = stats.run(DataStatsRequest(run, (*basics(stage="rm", cutoff_len=25), "posttrain.method=dpo")))
    assert told.usable == 2 and told.tokens["min"] > 25 and not told.packing and not told.suggestions
    assert "how full" not in "\n".join(stats_lines(told, Paint(colour=False)))
    assert "How full" not in stats_page(told)


def test_the_page_is_whole(found: DataStats) -> None:
    html = stats_page(found)
    page = Page(html)
    assert external(page, html) == []
    for part in ("24 in 16 rows", "32 × 32 (24)", "rows padded to the longest ← as configured", "Tokens of a row"):
        assert part in page


def test_no_usable_row_is_an_error_that_names_one(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    (tmp_path / "rows.jsonl").write_text("")
    add_rows(tmp_path, [conversation("<image>?", images=["none.png"])])
    with pytest.raises(DataError, match=r"rows.jsonl:1 .*none of the 1 rows can be used.*'none.png' not found"):
        stats.run(DataStatsRequest(run))


def test_a_part_of_the_rows(yaml: Path) -> None:
    assert (stats.run(DataStatsRequest(yaml, limit=6)).read, stats.run(DataStatsRequest(yaml, limit=6)).rows) == (6, 24)


class TestHistogram:
    @pytest.mark.parametrize(
        "values", [[5], [1, 1, 2], [0, 3, 1000], list(range(1000)), [7] * 9, [1, 10**7], [23, 70], [0]]
    )
    def test_every_value_is_in_one_range(self, values: list[int]) -> None:
        bins = histogram(values)
        assert sum(each.rows for each in bins) == len(values)
        for low, high, rows in bins:
            assert rows == sum(low <= value < high for value in values)
        assert [a.high for a in bins[:-1]] == [b.low for b in bins[1:]]
        assert len(bins) <= 24

    @pytest.mark.edge("U5")
    def test_a_terminal_shows_few_ranges(self) -> None:
        shown = bars("tokens", histogram(list(range(24, 38))), Paint(colour=False))
        assert len(shown) - 2 <= 8
        shown = bars("patches", histogram([16] * 8 + [32] * 8), Paint(colour=False))
        assert [line.split()[0] for line in shown[2:]] == ["16–17", "18–31", "32–33"]

    def test_none(self) -> None:
        assert histogram([]) == []
        assert percentiles([]) == {}

    def test_percentiles_are_values_that_occur(self) -> None:
        assert percentiles([1, 2, 3, 100]) == {
            "total": 106, "mean": 26.5, "min": 1, "p5": 1, "p50": 2, "p95": 100, "p99": 100, "max": 100,
        }  # fmt: skip
