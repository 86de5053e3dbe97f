"""Samples encoded up front equal those encoded on the fly, to the bit; only what changed is made again; nothing that a
kill, a second process or a damaged disk leaves is ever trained on."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mindspeed_mm.core.errors import ConfigError, DataError, MachineError
from mindspeed_mm.fsdp.data import build_mm_dataset
from mindspeed_mm.fsdp.data.data_utils.plugins.media_features import MediaFeatures
from mindspeed_mm.fsdp.data.dataset import as_mm_dataset
from mindspeed_mm.fsdp.data.sample_cache import CachedSamples, cached_samples, check_can_be_encoded_up_front, codec
from mindspeed_mm.fsdp.data.sample_cache.folder import (
    CacheFolder,
    DamagedSegment,
    RecordReader,
    SegmentWriter,
    read_entries,
)
from mindspeed_mm.fsdp.data.sample_cache.identity import digest_of, settings_of
from mindspeed_mm.fsdp.params.data_args import DatasetParam
from tests.fsdp.data.conftest import conversation, picture, write_jsonl

Rows = Callable[..., Path]
Param = Callable[..., DatasetParam]


def assert_same(left: Any, right: Any) -> None:
    """Equal in type, shape and every bit."""
    assert type(left) is type(right)
    if isinstance(left, dict):
        assert list(left) == list(right)
        for name in left:
            assert_same(left[name], right[name])
    elif isinstance(left, list | tuple):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            assert_same(one, other)
    elif isinstance(left, MediaFeatures):
        for name in ("kind", "token_ids", "tensors", "text"):
            assert_same(getattr(left, name), getattr(right, name))
    elif isinstance(left, np.ndarray):
        assert (left.dtype, left.shape, left.tobytes()) == (right.dtype, right.shape, right.tobytes())
    elif isinstance(left, torch.Tensor):
        assert left.dtype == right.dtype
        assert torch.equal(left, right)
    else:
        assert left == right


class Count:
    """How many samples were encoded."""

    def __init__(self) -> None:
        self.rows: list[int] = []


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> Count:
    """Counts what is encoded from now on, in this process."""
    from mindspeed_mm.fsdp.data.datasets.huggingface.qwen2vl_dataset import Qwen2VLDataset

    count, whole = Count(), Qwen2VLDataset.__getitem__

    def counted(dataset: Any, index: int) -> Any:
        count.rows.append(index)
        return whole(dataset, index)

    monkeypatch.setattr(Qwen2VLDataset, "__getitem__", counted)
    return count


def cached(param: DatasetParam) -> CachedSamples:
    basic = param.basic_parameters.model_copy(update={"preprocess_on_fly": False})
    dataset, _ = build_mm_dataset(param.model_copy(update={"basic_parameters": basic}))
    assert isinstance(dataset, CachedSamples)
    return dataset


def segments(folder: Path) -> list[Path]:
    return sorted(folder.glob(".mm-cache/*/segment-*.mmc"))


def read_all(dataset: Any) -> list[Any]:
    return [dataset[i] for i in range(len(dataset))]


class TestCodec:
    def test_every_type_comes_back_as_it_was(self) -> None:
        ids = np.array([5, 70000, 3, 9, 9], dtype=np.int64)
        sample = {
            "sample_id": "rows.jsonl:7 (chosen)",
            "labels": np.array([-100, 70000, -100, 9, 9], dtype=np.int64),
            "input_ids": ids,
            "shrunk": False,
            "nothing": None,
            "text": "日本 \ud83d\ude00".encode("utf-16", "surrogatepass").decode("utf-16"),
            "numbers": [1, -2, 2**40, 0.1, float("inf")],
            "media": [
                MediaFeatures(
                    "image",
                    np.full(4, 3, dtype=np.int64),
                    {
                        "patches": np.arange(48, dtype=np.uint8).reshape(4, 12),
                        "grid_thw": (1, 2, 2),
                        "halves": torch.tensor([1.5, -2.25], dtype=torch.bfloat16),
                        "wide": torch.arange(6).reshape(2, 3) - 3,
                        "floats": torch.tensor([0.1, float("nan")], dtype=torch.float32).nan_to_num(7),
                        "empty": torch.zeros(0, 5),
                        "single": np.array(300, dtype=np.int64),
                    },
                    text="<0.5 seconds>",
                )
            ],
            "loss_weights": np.array([0, 0.5, 1, 1, 1], dtype=np.float32),
        }
        record = codec.pack(sample, "rows.jsonl:7")
        assert len(record) % 8 == 0
        assert b"rows.jsonl" not in record
        back = codec.unpack(bytearray(record), "rows.jsonl:7")
        assert_same(back, sample)
        assert codec.unpack(bytearray(record), "other.jsonl:9")["sample_id"] == "other.jsonl:9 (chosen)"

    def test_labels_that_are_no_copy_of_the_tokens_are_kept_as_they_are(self) -> None:
        sample = {"input_ids": np.arange(4), "labels": np.array([-100, 7, 7, -100])}
        assert_same(codec.unpack(bytearray(codec.pack(sample, "x")), "x"), sample)

    def test_what_cannot_be_kept_is_named(self) -> None:
        with pytest.raises(codec.UnknownPart, match="set in a sample cannot be kept"):
            codec.pack({"a": {1, 2}}, "x")

    def test_an_image_takes_little_more_than_its_bytes(self) -> None:
        patches = np.random.default_rng(0).integers(0, 256, (196, 192), dtype=np.uint8)
        image = MediaFeatures("image", np.full(49, 7, dtype=np.int64), {"patches": patches, "grid_thw": (1, 14, 14)})
        ids = np.arange(100, dtype=np.int64)
        sample = {"sample_id": "a:1", "input_ids": ids, "labels": ids, "media": [image], "shrunk": False}
        assert len(codec.pack(sample, "a:1")) < 112 * 112 * 3 + 700


class TestReuse:
    def test_samples_and_sizes_equal_those_on_the_fly(self, make_rows: Rows, param: Param, encoded: Count) -> None:
        rows = make_rows(12)
        plain, _ = build_mm_dataset(param(rows))
        expected = read_all(plain)
        dataset = cached(param(rows))
        encoded.rows.clear()
        assert_same(read_all(dataset), expected)
        assert [dataset.measure(i) for i in range(12)] == [plain.measure(i) for i in range(12)]
        assert [tuple(size) for size in dataset.known_sizes().tolist()] == [tuple(plain.measure(i)) for i in range(12)]
        assert [size.tokens for size in map(dataset.measure, range(12))] == [len(s["input_ids"]) for s in expected]
        assert encoded.rows == []
        assert dataset.fingerprint() == plain.fingerprint()

    def test_a_second_start_encodes_nothing_and_added_rows_cost_themselves(
        self, tmp_path: Path, make_rows: Rows, param: Param, encoded: Count
    ) -> None:
        rows = make_rows(12)
        cached(param(rows))
        encoded.rows.clear()
        cached(param(rows))
        assert encoded.rows == []
        lines = rows.read_text().splitlines()
        rows.write_text("\n".join([json.dumps(conversation("new?", "yes")), *lines[3:], lines[0]]) + "\n")
        dataset = cached(param(rows))
        assert encoded.rows == [0]
        assert [sample["sample_id"] for sample in read_all(dataset)][:2] == ["rows.jsonl:1", "rows.jsonl:2"]
        assert_same(read_all(dataset), read_all(build_mm_dataset(param(rows))[0]))

    def test_a_changed_medium_is_encoded_again(
        self, tmp_path: Path, make_rows: Rows, param: Param, encoded: Count
    ) -> None:
        rows = make_rows(12)
        cached(param(rows))
        path = tmp_path / "3.png"
        status = path.stat()
        changed = bytearray(path.read_bytes())
        picture(48, 32, seed=99).save(path)
        assert path.stat().st_size == len(changed)  # noise: only the pixels differ
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))  # the time of the old one: rsync -t, tar
        encoded.rows.clear()
        dataset = cached(param(rows))
        assert encoded.rows == [3]
        assert_same(dataset[3], build_mm_dataset(param(rows))[0][3])

    @pytest.mark.parametrize("changed", ["setting", "template", "tokenizer file", "code", "package"])
    def test_changed_settings_never_meet_old_samples(
        self, changed: str, tmp_path: Path, make_rows: Rows, param: Param, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        template = tmp_path / "t.jinja"
        template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
        folder = tmp_path / "model"
        folder.mkdir()
        (folder / "tokenizer.json").write_text("{}")
        (folder / "model.safetensors").write_text("1")

        def name(**basic: Any) -> str:
            return digest_of(settings_of(param(tmp_path, model=folder, chat_template=str(template), **basic)))

        before = name()
        (folder / "model.safetensors").write_text("2")
        assert name(max_samples=3, val_rate=0.1, overwrite_cache=True) == before
        if changed == "setting":
            assert name(mask_history=True) != before
            return
        if changed == "template":
            template.write_text("{% for m in messages %}{{ m.content }}!{% endfor %}")
        elif changed == "tokenizer file":
            (folder / "tokenizer.json").write_text('{"a": 1}')
        elif changed == "package":
            monkeypatch.setattr("mindspeed_mm.fsdp.data.sample_cache.identity._version", lambda name: "0")
        else:
            monkeypatch.setattr("mindspeed_mm.fsdp.data.sample_cache.identity._code", lambda *_: "other")
        assert name() != before

    def test_overwrite_makes_all_again(self, tmp_path: Path, make_rows: Rows, param: Param, encoded: Count) -> None:
        rows = make_rows(4)
        cached(param(rows))
        before = segments(tmp_path)
        encoded.rows.clear()
        cached(param(rows, overwrite_cache=True))
        assert encoded.rows == [0, 1, 2, 3]
        assert not set(segments(tmp_path)) & set(before)

    def test_equal_rows_are_encoded_once(self, tmp_path: Path, param: Param, encoded: Count) -> None:
        rows = write_jsonl(tmp_path / "rows.jsonl", [conversation("a?", "b")] * 5 + [conversation("c?", "d")])
        dataset = cached(param(rows))
        assert encoded.rows == [0, 5]
        assert [sample["sample_id"] for sample in read_all(dataset)][4] == "rows.jsonl:5"

    def test_cache_dir_is_where_it_goes(self, tmp_path: Path, make_rows: Rows, param: Param) -> None:
        cached(param(make_rows(2), cache_dir=str(tmp_path / "elsewhere")))
        assert list((tmp_path / "elsewhere").glob("samples/*/segment-*.mmc"))
        assert not (tmp_path / ".mm-cache").exists()

    def test_a_folder_of_rows_does_not_read_its_cache_as_rows(self, tmp_path: Path, param: Param) -> None:
        (tmp_path / "rows").mkdir()
        write_jsonl(tmp_path / "rows" / "a.jsonl", [conversation("a?", "b")])
        assert len(cached(param(tmp_path / "rows"))) == len(cached(param(tmp_path / "rows"))) == 1

    def test_a_file_for_a_folder_is_named(self, tmp_path: Path, make_rows: Rows, param: Param) -> None:
        (tmp_path / "taken").write_text("")
        with pytest.raises(ConfigError, match=r"cache_dir"):
            cached(param(make_rows(2), cache_dir=str(tmp_path / "taken")))

    def test_a_data_set_without_rows_is_refused(self) -> None:
        with pytest.raises(ConfigError, match=r"list cannot be encoded up front"):
            check_can_be_encoded_up_front(as_mm_dataset([1, 2]))
        stream = as_mm_dataset(type("Stream", (), {"streams": True})())
        with pytest.raises(ConfigError, match=r"streamed rows are not known before.*streaming: false"):
            check_can_be_encoded_up_front(stream)


class TestBadRows:
    def rows(self, tmp_path: Path) -> Path:
        rows = [conversation(f"{i}?", "b") for i in range(4)]
        rows[1]["images"] = ["missing.png"]
        rows[1]["messages"][0]["content"] = "<image>1?"
        rows[2] = conversation("long?", "seven " * 500)
        rows[3] = {"messages": [{"role": "nobody", "content": "x"}]}
        return write_jsonl(tmp_path / "rows.jsonl", rows)

    def test_they_raise_what_they_raise_on_the_fly(self, tmp_path: Path, param: Param, encoded: Count) -> None:
        asked = param(self.rows(tmp_path), on_bad_sample="skip", max_bad_fraction=1.0, cutoff_len=256)
        plain, _ = build_mm_dataset(asked)
        dataset = cached(asked)
        assert_same(dataset[0], plain[0])
        for row in (1, 2, 3):
            with pytest.raises(DataError) as expected:
                plain[row]
            with pytest.raises(DataError) as found:
                dataset[row]
            assert (type(found.value), str(found.value)) == (type(expected.value), str(expected.value))
            assert dataset.known_sizes()[row].tolist() == [0, 0]
        encoded.rows.clear()
        cached(asked)
        assert encoded.rows == [1]  # its medium may have come; the too long one is known to stay so

    def test_a_medium_that_comes_later_is_used(self, tmp_path: Path, param: Param) -> None:
        asked = param(self.rows(tmp_path), on_bad_sample="skip", max_bad_fraction=1.0)
        cached(asked)
        picture(32, 32).save(tmp_path / "missing.png")
        assert len(cached(asked)[1]["media"]) == 1

    def test_the_policy_stops_before_training(self, tmp_path: Path, param: Param) -> None:
        rows = self.rows(tmp_path)
        with pytest.raises(DataError, match=r"rows.jsonl:2.*missing.png"):
            cached(param(rows))
        with pytest.raises(DataError, match=r"2 of 4 samples are bad, more than 10.000%"):
            cached(param(rows, on_bad_sample="skip", max_bad_fraction=0.1))
        with pytest.raises(DataError, match=r"rows.jsonl:3.*more than cutoff_len 256"):
            cached(param(rows, on_bad_sample="skip", max_bad_fraction=1.0, truncation="error", cutoff_len=256))


class TestDamage:
    def test_a_changed_byte_is_found_and_the_sample_made_anew(
        self, tmp_path: Path, make_rows: Rows, param: Param
    ) -> None:
        rows = make_rows(6)
        expected = read_all(build_mm_dataset(param(rows))[0])
        dataset = cached(param(rows))
        [segment] = segments(tmp_path)
        content = bytearray(segment.read_bytes())
        content[2000] ^= 1
        segment.write_bytes(content)
        with pytest.warns(UserWarning, match=r"has changed: rows.jsonl:\d is encoded again"):
            assert_same(read_all(dataset), expected)

    @pytest.mark.parametrize("damage", ["cut", "index", "foreign", "empty"])
    def test_a_damaged_segment_is_encoded_again(
        self, damage: str, tmp_path: Path, make_rows: Rows, param: Param, encoded: Count
    ) -> None:
        rows = make_rows(6)
        expected = read_all(cached(param(rows)))
        [segment] = segments(tmp_path)
        content = bytearray(segment.read_bytes())
        content[-60] ^= 1
        made = {"cut": content[:-20], "index": content, "foreign": b"x" * 400, "empty": b""}
        segment.write_bytes(made[damage])
        encoded.rows.clear()
        with pytest.warns(UserWarning, match="encoded again"):
            dataset = cached(param(rows))
        assert encoded.rows == list(range(6))
        assert_same(read_all(dataset), expected)

    def test_a_segment_that_vanishes_is_no_end(self, tmp_path: Path, make_rows: Rows, param: Param) -> None:
        rows = make_rows(3)
        dataset = cached(param(rows))
        segments(tmp_path)[0].unlink()
        with pytest.warns(UserWarning, match="cannot be read: No such file"):
            assert_same(read_all(dataset), read_all(build_mm_dataset(param(rows))[0]))

    def test_a_damaged_table_is_not_used(self, tmp_path: Path) -> None:
        folder = CacheFolder(tmp_path, {"a": 1})
        folder.prepare()
        folder.save_table("x", folder.look_up(np.array([b"k"], dtype="S16")))
        assert folder.load_table("x") is not None
        path = next(folder.path.glob("rows-*"))
        path.write_bytes(path.read_bytes()[:-1] + b"?")
        assert folder.load_table("x") is None

    def test_old_tables_go_away(self, tmp_path: Path) -> None:
        folder = CacheFolder(tmp_path, {"a": 1})
        folder.prepare()
        table = folder.look_up(np.array([b"k"], dtype="S16"))
        for name, age_s in (("old", 7200), ("young", 60)):
            folder.save_table(name, table)
            os.utime(folder.path / f"rows-{name}.table", (time.time() - age_s,) * 2)
        folder.save_table("new", table)
        assert sorted(path.stem for path in folder.path.glob("rows-*")) == ["rows-new", "rows-young"]

    def test_drafts_are_no_segments(self, tmp_path: Path) -> None:
        (tmp_path / ".segment-1.mmc.tmp").write_bytes(b"half")
        writer = SegmentWriter(tmp_path)
        writer.add(b"k" * 16, b"12345678", 3, 4)
        writer.write()
        writer.write()  # nothing more to write
        [path] = tmp_path.glob("segment-*")
        [entry] = read_entries(path)
        assert (entry["key"], entry["tokens"], entry["patches"]) == (b"k" * 16, 3, 4)
        reader = RecordReader([path])
        assert reader.read(0, int(entry["start"]), 8, int(entry["crc"])) == b"12345678"
        with pytest.raises(DamagedSegment, match="the record at byte 16 has changed"):
            reader.read(0, 16, 8, int(entry["crc"]))


def job(folder: Path, model: Path, pause_s: float) -> None:
    """A process that encodes up front, `pause_s` a sample, and writes what it read and what it encoded."""
    from torch.utils.data._utils import worker

    from mindspeed_mm.fsdp.data.datasets.huggingface.qwen2vl_dataset import Qwen2VLDataset

    os.setsid()
    worker.MP_STATUS_CHECK_INTERVAL = 0.1  # workers look so often whether their parent lives
    whole = Qwen2VLDataset.__getitem__

    def slow(dataset: Any, index: int) -> Any:
        time.sleep(pause_s)
        with (folder / "encoded.txt").open("a") as file:
            file.write(f"{index}\n")
        return whole(dataset, index)

    Qwen2VLDataset.__getitem__ = slow  # type: ignore[method-assign]
    basic = {
        "dataset": str(folder / "rows.jsonl"),
        "dataset_dir": str(folder),
        "preprocess_on_fly": False,
        "preprocessing_num_workers": 2,
        "preprocessing_batch_size": 8,
    }
    param = {"basic_parameters": basic, "preprocess_parameters": {"model_name_or_path": str(model)}}
    dataset, _ = build_mm_dataset(DatasetParam.model_validate(param))
    lengths = [len(sample["input_ids"]) for sample in read_all(dataset)]
    (folder / f"{os.getpid()}.json").write_text(json.dumps(lengths))


def start(*words: Any) -> Any:
    process = multiprocessing.get_context("fork").Process(target=job, args=words)
    process.start()
    return process


def encoded_rows(folder: Path) -> list[int]:
    path = folder / "encoded.txt"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


class TestTraining:
    def test_losses_are_those_of_training_on_the_fly(self, tmp_path: Path) -> None:
        from mindspeed_mm.fsdp.params.loader import load_config
        from mindspeed_mm.fsdp.train.trainer import Trainer
        from tests.helpers.tiny_run import make_tiny_run

        path = make_tiny_run(tmp_path)
        losses = []
        for name, words in (("fly", []), ("cache", ["data.dataset_param.basic_parameters.preprocess_on_fly=false"])):
            Trainer(load_config(path, [f"training.save={tmp_path / name}", *words])).train()
            lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
            losses.append([json.loads(line).get("loss") for line in lines])
        assert losses[0] == losses[1]
        assert segments(tmp_path)


class TestProcesses:
    def test_a_killed_job_keeps_what_it_wrote_and_two_share_the_rest(
        self, tmp_path: Path, vlm_folder: Path, param: Param
    ) -> None:
        count = 96
        rows = write_jsonl(tmp_path / "rows.jsonl", [conversation(f"{i}?", "b " * (i % 7 + 1)) for i in range(count)])
        first = start(tmp_path, vlm_folder, 0.02)
        while len(segments(tmp_path)) < 3:
            assert first.is_alive()
            time.sleep(0.01)
        first.kill()
        first.join()
        _wait_for_group(first.pid)
        kept = sum(len(read_entries(path)) for path in segments(tmp_path))
        assert 0 < kept < count
        (tmp_path / "encoded.txt").unlink()
        pair = [start(tmp_path, vlm_folder, 0.0) for _ in range(2)]
        for process in pair:
            process.join(120)
        assert [process.exitcode for process in pair] == [0, 0]
        done = encoded_rows(tmp_path)
        assert len(done) == len(set(done)) == count - kept  # each row by one of them, once
        plain, _ = build_mm_dataset(param(rows))
        expected = [len(sample["input_ids"]) for sample in read_all(plain)]
        assert [json.loads((tmp_path / f"{each.pid}.json").read_text()) for each in pair] == [expected, expected]

    def test_a_killed_worker_is_said(self, tmp_path: Path, param: Param, monkeypatch: pytest.MonkeyPatch) -> None:
        rows = write_jsonl(tmp_path / "rows.jsonl", [conversation(f"{i}?", "b") for i in range(80)])
        parent = os.getpid()

        def killed(self: Any, row: int, *_: Any) -> None:
            assert os.getpid() != parent
            os.kill(os.getpid(), signal.SIGKILL)

        monkeypatch.setattr(cached_samples._RowEncoder, "_add", killed)
        with pytest.raises(MachineError, match=r"encodes samples ended.*lower preprocessing_num_workers"):
            cached(param(rows, preprocessing_num_workers=1))

    def test_a_full_disk_is_said(self, make_rows: Rows, param: Param, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(self: Any) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(SegmentWriter, "write", full)
        with pytest.raises(MachineError, match=r"the disk is full.*cache_dir"):
            cached(param(make_rows(3)))

    def test_readers_of_a_fork_open_files_of_their_own(self, make_rows: Rows, param: Param) -> None:
        dataset = cached(param(make_rows(3)))
        first = dataset[0]["input_ids"].tolist()
        context = multiprocessing.get_context("fork")
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_read_one, args=(dataset, sender))
        process.start()
        assert receiver.recv() == (first, True)
        process.join()


def _read_one(dataset: CachedSamples, sender: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sender.send((dataset[0]["input_ids"].tolist(), dataset._reader._owner == os.getpid()))


def _wait_for_group(leader: int) -> None:
    """Until the killed job's workers have seen that it is gone: its process group is empty then."""
    while True:
        try:
            os.killpg(leader, 0)
        except ProcessLookupError:
            return
        time.sleep(0.02)
