"""From the `data` section to data sets: sources, validation, fingerprints, and what is refused at the start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from mindspeed_mm.core.errors import ConfigError, DataError
from mindspeed_mm.fsdp.data import build_mm_dataloader, build_mm_dataset
from mindspeed_mm.fsdp.data.dataset import MMDataset
from mindspeed_mm.fsdp.params.data_args import BasicParameters, DataloaderParam, DatasetParam
from mindspeed_mm.fsdp.utils.register import data_register
from tests.fsdp.data.conftest import conversation, write_jsonl

Param = Callable[..., DatasetParam]


def texts(count: int, word: str = "one") -> list[dict[str, Any]]:
    return [conversation(f"{word} {i}?", "two") for i in range(count)]


def names(dataset: Any) -> list[str]:
    return [dataset[i]["sample_id"] for i in range(len(dataset))]


class TestSources:
    def test_lists_commas_folders_and_names_relative_to_dataset_dir(self, tmp_path: Path, param: Param) -> None:
        a = write_jsonl(tmp_path / "a.jsonl", texts(2))
        (tmp_path / "more" / "deep").mkdir(parents=True)
        write_jsonl(tmp_path / "more" / "b.jsonl", texts(1))
        (tmp_path / "more" / "deep" / "c.json").write_text(json.dumps(texts(2)))
        (tmp_path / "more" / "notes.txt").write_text("no rows")
        expected = ["a.jsonl:1", "a.jsonl:2", "b.jsonl:1", "c.json:1", "c.json:2"]
        assert names(build_mm_dataset(param([a, "more"]))[0]) == expected
        assert names(build_mm_dataset(param(f"{a}, more"))[0]) == expected
        assert names(build_mm_dataset(param([a, "more"], max_samples=1))[0]) == ["a.jsonl:1", "b.jsonl:1"]

    def test_dataset_info_gives_each_name_its_own_columns(self, tmp_path: Path, param: Param) -> None:
        (tmp_path / "x.json").write_text(json.dumps([{"q": "one?", "a": "two"}]))
        info = {"mine": {"file_name": "x.json", "columns": {"prompt": "q", "response": "a"}}}
        (tmp_path / "dataset_info.json").write_text(json.dumps(info))
        write_jsonl(tmp_path / "y.jsonl", texts(1))
        dataset, _ = build_mm_dataset(param("mine,y.jsonl"))
        assert names(dataset) == ["x.json:1", "y.jsonl:1"]
        assert dataset.sample(0).messages[0]["content"] == "one?"

    def test_a_missing_file_names_the_nearest(self, tmp_path: Path, param: Param) -> None:
        write_jsonl(tmp_path / "train.jsonl", texts(1))
        with pytest.raises(DataError, match=r"'trains.jsonl' does not exist. Did you mean 'train.jsonl'"):
            build_mm_dataset(param("trains.jsonl"))
        (tmp_path / "empty").mkdir()
        with pytest.raises(DataError, match="the folder holds no"):
            build_mm_dataset(param("empty"))
        with pytest.raises(ConfigError, match="no data set is named"):
            build_mm_dataset(param([]))

    def test_parquet_shards_must_have_one_schema(self, tmp_path: Path, param: Param) -> None:
        pa = pytest.importorskip("pyarrow")
        import pyarrow.parquet as pq

        folder = tmp_path / "shards"
        folder.mkdir()
        pq.write_table(pa.Table.from_pylist(texts(2)), folder / "0.parquet")
        pq.write_table(pa.Table.from_pylist(texts(2)), folder / "1.parquet")
        options = {"cache_dir": str(tmp_path / "cache")}
        assert names(build_mm_dataset(param("shards", **options))[0])[-1] == "1.parquet:2"
        pq.write_table(pa.Table.from_pylist([{"other": 1}]), folder / "1.parquet")
        with pytest.raises(
            DataError, match=r"1.parquet .*has the columns other \(int64\), but 0.parquet has messages \("
        ):
            build_mm_dataset(param("shards", **options))


class TestFirstRows:
    ROWS = [{"dialogue": "x"}] * 3

    def test_a_first_row_that_does_not_fit_is_an_error_at_once(self, tmp_path: Path, param: Param) -> None:
        with pytest.raises(DataError, match=r"rows.jsonl:1 .*the row has \['dialogue'\]"):
            build_mm_dataset(param(write_jsonl(tmp_path / "rows.jsonl", self.ROWS)))

    def test_with_skip_the_first_fault_is_told_when_none_fits(self, tmp_path: Path, param: Param) -> None:
        path = write_jsonl(tmp_path / "rows.jsonl", self.ROWS)
        with pytest.raises(
            DataError, match=r"none of the first 3 rows can be used; the first:\n +rows.jsonl:1 "
        ) as caught:
            build_mm_dataset(param(path, on_bad_sample="skip"))
        assert "on_bad_sample" not in str(caught.value)
        path = write_jsonl(tmp_path / "rows.jsonl", [*self.ROWS, *texts(1)])
        assert len(build_mm_dataset(param(path, on_bad_sample="skip"))[0]) == 4


class TestValidation:
    def test_by_rate(self, tmp_path: Path, param: Param) -> None:
        path = write_jsonl(tmp_path / "rows.jsonl", texts(20))
        train, validation = build_mm_dataset(param(path, val_rate=0.25), seed=1)
        assert (len(train), len(validation)) == (15, 5)
        assert sorted([*names(train), *names(validation)]) == sorted(names(build_mm_dataset(param(path))[0]))
        again = build_mm_dataset(param(path, val_rate=0.25), seed=1)[1]
        other = build_mm_dataset(param(path, val_rate=0.25), seed=2)[1]
        assert names(again) == names(validation) != names(other)
        assert str(validation.place(0)) == names(validation)[0]
        assert train.fingerprint() != validation.fingerprint()
        assert len(build_mm_dataset(param(path, val_rate=0.25, val_max_samples=2))[1]) == 2
        assert len(build_mm_dataset(param(path, val_rate=0.01))[1]) == 1  # at least one, as other trainers
        with pytest.raises(ConfigError, match="leaves one side empty"):
            build_mm_dataset(param(path, val_rate=1.0))

    @pytest.mark.edge("R10")
    def test_no_rows_at_most_are_no_validation(self, tmp_path: Path, param: Param) -> None:
        path = write_jsonl(tmp_path / "rows.jsonl", texts(20))
        for source in ({"val_rate": 0.25}, {"val_dataset": str(path)}, {}):
            train, validation = build_mm_dataset(param(path, val_max_samples=0, **source))
            assert (len(train), validation) == (20, None)

    def test_a_part_goes_through_workers(self, tmp_path: Path, param: Param) -> None:
        path = write_jsonl(tmp_path / "rows.jsonl", texts(20))
        train, _ = build_mm_dataset(param(path, val_rate=0.5))
        split = {"gradient_accumulation_steps": 1, "dp_rank": 0, "dp_size": 1, "seed": 0}
        data = build_mm_dataloader(train, DataloaderParam(num_workers=1), micro_batch_size=10, **split)
        [batch] = next(iter(data))
        assert sorted(batch["sample_ids"]) == sorted(names(train))

    def test_by_files_or_by_a_section_of_its_own(self, tmp_path: Path, param: Param) -> None:
        train_rows = write_jsonl(tmp_path / "train.jsonl", texts(4))
        held_out = write_jsonl(tmp_path / "test.jsonl", texts(3))
        assert build_mm_dataset(param(train_rows))[1] is None
        by_files = build_mm_dataset(param(train_rows, val_dataset=str(held_out), max_samples=1))
        assert list(map(len, by_files)) == [1, 3]
        assert len(build_mm_dataset(param(train_rows, val_dataset=str(held_out), val_max_samples=2))[1]) == 2
        by_section = build_mm_dataset(param(train_rows), val_dataset_param=param(held_out))
        assert names(by_section[1]) == ["test.jsonl:1", "test.jsonl:2", "test.jsonl:3"]
        with pytest.raises(ConfigError, match=r"come from data.val_dataset_param and .*val_rate"):
            build_mm_dataset(param(train_rows, val_rate=0.5), val_dataset_param=param(held_out))


class TestFingerprint:
    def test_changes_with_rows_order_content_and_settings_only(self, tmp_path: Path, param: Param) -> None:
        path, rows = tmp_path / "rows.jsonl", texts(3)

        def print_of(rows: list[Any], **basic: Any) -> dict[str, Any]:
            return build_mm_dataset(param(write_jsonl(path, rows), **basic))[0].fingerprint()

        original = print_of(rows)
        assert print_of(rows) == original
        edited = [conversation("One 0?", "two"), *rows[1:]]
        assert len(json.dumps(edited)) == len(json.dumps(rows))
        others = [
            print_of([*rows, rows[0]]),
            print_of(edited),
            print_of(rows[::-1]),
            print_of(rows, cutoff_len=7),
            print_of(rows, mask_history=True),
        ]
        assert len({other["hash"] for other in [original, *others]}) == 6
        print_of(rows)
        os.utime(path, (0, 0))
        assert build_mm_dataset(param(path))[0].fingerprint() == original
        assert json.loads(json.dumps(original)) == original
        assert (original["rows"], original["files"][0]["rows"]) == (3, 3)


def test_no_processor_folder(tmp_path: Path, param: Param) -> None:
    section = param(write_jsonl(tmp_path / "rows.jsonl", texts(2)))
    with pytest.raises(ConfigError, match="no folder to take the processor from"):
        build_mm_dataset(section.model_copy(update={"preprocess_parameters": type(section.preprocess_parameters)()}))


SPLIT = {"micro_batch_size": 1, "gradient_accumulation_steps": 1, "dp_rank": 0, "dp_size": 1, "seed": 0}


@pytest.mark.parametrize(
    ("keys", "basic", "message"),
    [
        ({"sampler_type": "TokenBudgetSample"}, {}, "Did you mean 'TokenBudgetSampler'"),
        ({"dataloader_mode": "custom"}, {}, "'custom' is not built yet"),
        ({"max_patches_per_batch": 9}, {}, "max_patches_per_batch  micro-batches of 1 samples, .* keep no limit"),
        (
            {},
            {"mix": {"weights": {"row.jsonl": 1}}},
            "mix.weights.row.jsonl  'row.jsonl' is not an entry .*'rows.jsonl'",
        ),
        ({}, {"mix": {"weights": {}}}, "rows.jsonl has no weight"),
        ({}, {"mix": {"weights": {"rows.jsonl": 0}}}, "no weight is above 0"),
    ],
)
def test_what_a_loader_refuses(
    keys: dict[str, Any], basic: dict[str, Any], message: str, tmp_path: Path, param: Param
) -> None:
    write_jsonl(tmp_path / "rows.jsonl", texts(2))
    dataset, _ = build_mm_dataset(param("rows.jsonl", **basic))
    with pytest.raises(ConfigError, match=message):
        build_mm_dataloader(dataset, DataloaderParam(**keys), **SPLIT)


def test_a_limit_of_patches_takes_samples_that_tell_them() -> None:
    """Encoding a sample tells its tokens; with 0 patches for each, no micro-batch would be above the limit."""
    samples = 4 * [{"input_ids": [1, 2], "labels": [1, 2]}]
    keys = DataloaderParam(max_tokens_per_batch=8, max_patches_per_batch=9)
    with pytest.raises(ConfigError, match="max_patches_per_batch  list does not tell how many patches"):
        build_mm_dataloader(samples, keys, **SPLIT)


def test_a_loader_needs_a_global_batch(tmp_path: Path, param: Param) -> None:
    dataset, _ = build_mm_dataset(param(write_jsonl(tmp_path / "rows.jsonl", texts(2))))
    with pytest.raises(DataError, match="has 2 samples, fewer than one global batch of 3"):
        build_mm_dataloader(dataset, DataloaderParam(), **{**SPLIT, "micro_batch_size": 3})


def test_async_preprocess_is_a_worker_that_holds_samples_ready(tmp_path: Path, param: Param) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", texts(8))
    dataset, _ = build_mm_dataset(param(path, async_preprocess=True, async_preprocess_buffer_size=9))
    data = build_mm_dataloader(dataset, DataloaderParam(num_workers=0), **{**SPLIT, "micro_batch_size": 2})
    assert (data._workers.num_workers, data._workers.prefetch_factor) == (1, 5)
    inline = build_mm_dataloader(
        build_mm_dataset(param(path))[0], DataloaderParam(num_workers=0), **{**SPLIT, "micro_batch_size": 2}
    )
    assert [b["sample_ids"] for b in next(iter(data))] == [b["sample_ids"] for b in next(iter(inline))]


def test_preload_on_a_cpu_gives_the_same_steps(tmp_path: Path, param: Param) -> None:
    dataset, _ = build_mm_dataset(param(write_jsonl(tmp_path / "rows.jsonl", texts(8))))
    plain, ahead = (
        build_mm_dataloader(dataset, DataloaderParam(num_workers=0, enable_preload=preload), **SPLIT)
        for preload in (False, True)
    )
    for step, other in islice(zip(plain, ahead, strict=True), 5):
        assert [b["sample_ids"] for b in step] == [b["sample_ids"] for b in other]
        assert plain.position == ahead.position


def test_a_data_set_of_a_plugin(param: Param, processor: Any) -> None:
    rows = [{"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}] * 6

    @data_register.register("plugin-for-test")
    def build(basic_param: Any, preprocess_param: Any, dataset_param: Any) -> tuple[Any, Any]:
        assert dataset_param.basic_parameters is basic_param
        return rows[: basic_param.max_samples], rows

    section = param("unused", max_samples=4).model_copy(update={"dataset_type": "plugin-for-test"})
    train, validation = build_mm_dataset(section)
    assert (len(train), len(validation)) == (4, 6)
    split = {"micro_batch_size": 4, "gradient_accumulation_steps": 1, "dp_rank": 0, "dp_size": 1, "seed": 0}
    with pytest.raises(ConfigError, match="has no collate_fn"):
        build_mm_dataloader(train, DataloaderParam(), **split)
    data = build_mm_dataloader(train, DataloaderParam(num_workers=0), processor=processor, **split)
    [batch] = next(iter(data))
    assert batch["input_ids"].shape == (4, 3)


@pytest.mark.parametrize("keys", [{}, {"max_tokens_per_batch": 25}], ids=["rows", "budget"])
def test_pairs_of_a_plugin(param: Param, processor: Any, keys: dict[str, int]) -> None:
    answer = {"input_ids": [70, 71, 72], "labels": [-100, 71, 72]}
    longer = {"input_ids": [70, 71, 72, 73, 74], "labels": [-100, 71, 72, 73, 74]}

    @data_register.register("pairs-for-test")
    def build(basic_param: Any, preprocess_param: Any, dataset_param: Any) -> Any:
        return [{"chosen": answer, "rejected": longer}] * 6

    section = param("unused", stage="rm").model_copy(update={"dataset_type": "pairs-for-test"})
    train, _ = build_mm_dataset(section)
    split = {"micro_batch_size": 2, "gradient_accumulation_steps": 1, "dp_rank": 0, "dp_size": 1, "seed": 0}
    loader = DataloaderParam(num_workers=0, **keys)
    [batch] = next(iter(build_mm_dataloader(train, loader, processor=processor, dataset_param=section, **split)))
    assert batch["pairs"] == 2 and batch["attention_mask"].sum(1).tolist() == [3, 3, 5, 5]


def test_a_data_set_of_a_plugin_follows_the_settings_that_it_does_not_set(param: Param, processor: Any) -> None:
    """`packing: true` is one row of several samples, or an error: never a padded batch."""

    class Rows(MMDataset):
        def __len__(self) -> int:
            return 6

        def __getitem__(self, index: int) -> dict[str, list[int]]:
            return {"input_ids": [70, 71, 72], "labels": [-100, 71, 72]}

    class Joined(Rows):
        def collate_fn(self, samples: Sequence[Any]) -> dict[str, Any]:
            return {key: torch.tensor([sample[key] for sample in samples]) for key in samples[0]}

    class Packed(Joined):
        def __init__(self, basic_param: BasicParameters) -> None:
            self.basic_parameters = basic_param

    asked = {"packing": True, "cutoff_len": 9, "on_bad_sample": "skip", "max_bad_fraction": 0.5}
    section = param("unused", **asked).model_copy(update={"dataset_type": "plugin-for-test"})
    split = {"micro_batch_size": 1, "gradient_accumulation_steps": 1, "dp_rank": 0, "dp_size": 1, "seed": 0}
    for made in (Rows, Joined, Packed):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(data_register, "_entries", data_register._entries | {"plugin-for-test": made})
            if made is Joined:
                with pytest.raises(ConfigError, match="Joined has a collate_fn, which makes rows of its own"):
                    build_mm_dataset(section)
                continue
            train, _ = build_mm_dataset(section)
        assert (train.on_bad_sample, train.max_bad_fraction) == ("skip", 0.5)
        data = build_mm_dataloader(
            train, DataloaderParam(num_workers=0), processor=processor, dataset_param=section, **split
        )
        [batch] = next(iter(data))
        if made is Rows:
            assert (batch["input_ids"].shape, batch["cu_seq_lens_q"].tolist()) == ((1, 9), [0, 3, 6, 9])
        else:  # its own function gets the samples of a pack
            assert batch["input_ids"].shape == (3, 3)


def test_importing_is_light_and_json_needs_no_datasets(tmp_path: Path, vlm_folder: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", texts(2))
    code = f"""
import sys
import mindspeed_mm.fsdp.data
heavy = {{"torch", "transformers", "numpy", "PIL", "datasets"}} & set(sys.modules)
assert not heavy, heavy
from mindspeed_mm.fsdp.utils.torchvision_guard import prepare_for_transformers
prepare_for_transformers()
from transformers import AutoImageProcessor, AutoProcessor, AutoTokenizer
# transformers 5.17 imports scikit-learn with its auto classes where that is installed, which imports these two.
by_transformers = {{"pyarrow", "pandas"}} & set(sys.modules)
from mindspeed_mm.fsdp.data import build_mm_dataset
from mindspeed_mm.fsdp.params.data_args import DatasetParam
section = DatasetParam.model_validate({{
    "basic_parameters": {{"dataset": {str(path)!r}}},
    "preprocess_parameters": {{"model_name_or_path": {str(vlm_folder)!r}}},
}})
dataset, _ = build_mm_dataset(section)
dataset[0]
heavy = {{"datasets", "pyarrow", "pandas"}} & set(sys.modules) - by_transformers
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
