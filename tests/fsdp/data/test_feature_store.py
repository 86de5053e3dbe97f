"""Features on disk: files that tell damage, shards that do not depend on how the work went, a reader that refuses what
does not fit."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import xxhash
from safetensors.torch import save_file
from torch.utils.data import DataLoader

from mindspeed_mm.core.errors import DataError, UsageError
from mindspeed_mm.core.media_geometry import MediaGeometry, MediaSize
from mindspeed_mm.fsdp.data.feature_store import check_provenance, feature_file, open_features
from mindspeed_mm.fsdp.data.feature_store import folder as folder_module
from mindspeed_mm.fsdp.data.feature_store.description import (
    Description,
    check_same_work,
    measure_components,
    read_description,
)
from mindspeed_mm.fsdp.data.feature_store.feature_file import (
    DamagedFile,
    FeatureRecord,
    SkippedRow,
    check_file,
    check_tensors,
    checksum,
    has_checksum,
    read_facts,
    read_tensors,
    tensor_name,
    write_feature_file,
)
from mindspeed_mm.fsdp.data.feature_store.folder import FeatureFolder, read_index, read_skipped, write_index
from mindspeed_mm.fsdp.data.feature_store.writer import ShardBuilder

GEOMETRY = MediaGeometry(spatial_ratio=2, temporal_ratio=1, patch=(1, 2, 2), latent_channels=4, is_video=False)
BATCHES = 5
ROWS_OF_A_BATCH = 2


def record(row: int, key: str | None = None) -> FeatureRecord:
    captions = ("one", "two") if row % 2 else ("one",)
    return FeatureRecord(row, key or f"{row:032x}", f"rows.jsonl:{row + 1}", f"{row}.png", captions, MediaSize(1, 8, 8))


def tensors_of(records: Sequence[FeatureRecord]) -> dict[str, torch.Tensor]:
    tensors = {}
    for each in records:
        draw = torch.Generator().manual_seed(int(each.key, 16))
        tensors[tensor_name(each.key, "latents")] = torch.randn(4, 4, 4, generator=draw)
        for number in range(len(each.captions)):
            length = 3 + number
            embeds = torch.randn(length, 6, generator=draw).bfloat16()
            tensors[tensor_name(each.key, "prompt_embeds", number)] = embeds
    return tensors


def write_batch(folder: FeatureFolder, number: int, *, keys: dict[int, str] | None = None) -> None:
    rows = range(number * ROWS_OF_A_BATCH, (number + 1) * ROWS_OF_A_BATCH)
    records = [record(row, (keys or {}).get(row)) for row in rows]
    write_feature_file(folder.batch(number), tensors_of(records), (number, number), records)


@pytest.fixture
def folder(tmp_path: Path) -> FeatureFolder:
    made = FeatureFolder(tmp_path / "features")
    made.prepare()
    made.open_work()
    return made


def contents(folder: FeatureFolder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.path.glob("*.*") if path.is_file()}


# --- one file --------------------------------------------------------------------------------------------------------


def test_a_file_says_what_is_in_it(tmp_path: Path) -> None:
    path, records = tmp_path / "a.safetensors", [record(0), record(1)]
    skipped = [SkippedRow(7, "rows.jsonl:8", "é.png", "is broken")]
    write_feature_file(path, tensors_of(records), (3, 4), records, skipped)
    facts, shapes = read_facts(path)
    assert (facts.first_batch, facts.last_batch) == (3, 4)
    assert list(facts.records) == records
    assert list(facts.skipped) == skipped
    assert shapes[tensor_name(records[1].key, "prompt_embeds", 1)] == ("bfloat16", (4, 6))
    for name, tensor in tensors_of(records).items():
        assert torch.equal(read_tensors(path)[name], tensor)
    check_file(path, "hash")
    assert [each.name for each in tmp_path.iterdir()] == ["a.safetensors"]


def test_files_follow_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_feature_file(tmp_path / "a.safetensors", {})
    finally:
        os.umask(before)
    assert (tmp_path / "a.safetensors").stat().st_mode & 0o777 == 0o640


def flipped(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "cut": lambda path: os.truncate(path, path.stat().st_size - 1),
    "empty": lambda path: path.write_bytes(b""),
    "a caption changed": lambda path: path.write_bytes(path.read_bytes().replace(b'\\"one\\"', b'\\"onE\\"', 1)),
    "a checksum changed": lambda path: flipped(path, path.read_bytes().index(b"checksums") + 60),
    "gone": lambda path: path.unlink(),
    "no file of ours": lambda path: save_file({"x": torch.zeros(2)}, path),
    "a page": lambda path: path.write_text("<html>not found</html>" * 100),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_of_the_header_is_always_found(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "a.safetensors"
    write_feature_file(path, tensors_of([record(0)]), (0, 0), [record(0)])
    DAMAGE[damage](path)
    with pytest.raises(DamagedFile) as caught:
        check_file(path, "size")
    assert str(path) in str(caught.value)


def test_a_flipped_bit_of_a_tensor_is_found_by_its_hash(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_feature_file(path, tensors_of([record(0)]), (0, 0), [record(0)])
    flipped(path, path.stat().st_size - 1)
    check_file(path, "size")
    with pytest.raises(DamagedFile, match=r"the bytes of .* have changed"):
        check_file(path, "hash")


def test_bytes_are_verified_in_the_order_of_the_file_whatever_that_of_its_header(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_feature_file(path, tensors_of([record(1)]), (0, 0), [record(1)])
    content = path.read_bytes()
    begin = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:begin])
    turned = json.dumps(dict(reversed(header.items())), ensure_ascii=False).encode()
    path.write_bytes(len(turned).to_bytes(8, "little") + turned + content[begin:])
    check_file(path, "hash")
    shapes = read_facts(path)[1]
    assert [*shapes] == [name for name in header if name != "__metadata__"]
    last = [*shapes][-1]
    flipped(path, path.stat().st_size - 1)
    with pytest.raises(DamagedFile, match=f"the bytes of '{last}' have changed"):
        check_file(path, "hash")


def test_a_file_that_is_cut_after_its_header_was_read_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_feature_file(path, tensors_of([record(0)]), (0, 0), [record(0)])
    read = read_facts(path)
    for size, told in ((path.stat().st_size - 1, "the bytes of .* have changed"), (0, "empty file")):
        os.truncate(path, size)
        with pytest.raises(DamagedFile, match=told):
            check_tensors(path, *read)


def sha_256(tensor: torch.Tensor) -> str:
    """The checksum of format version 1."""
    told = f"{str(tensor.dtype).removeprefix('torch.')}{tuple(tensor.shape)}".encode()
    return hashlib.sha256(told + tensor.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()[:32]


def test_files_of_the_older_format_are_verified_by_sha_256(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.safetensors"
    monkeypatch.setattr(feature_file, "checksum", sha_256)
    write_feature_file(path, tensors_of([record(0)]), (0, 0), [record(0)])
    monkeypatch.undo()
    assert {len(told) for told in read_facts(path)[0].checksums.values()} == {32}
    check_file(path, "hash")
    flipped(path, path.stat().st_size - 1)
    with pytest.raises(DamagedFile, match=r"the bytes of .* have changed"):
        check_file(path, "hash")


def test_a_checksum_is_xxh3_of_type_shape_and_bytes() -> None:
    tensor = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
    told = xxhash.xxh3_128_hexdigest(b"bfloat16(2, 3)" + tensor.view(torch.uint8).numpy().tobytes())
    assert checksum(tensor) == f"xxh3_128:{told}"
    assert has_checksum(tensor, checksum(tensor)) and not has_checksum(tensor.T.contiguous(), checksum(tensor))


def test_a_file_is_parsed_once_until_it_changes(folder: FeatureFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[str] = []
    monkeypatch.setattr(folder_module, "read_facts", lambda path: parsed.append(path.name) or read_facts(path))
    for number in (0, 1):
        write_batch(folder, number)
    first = folder.batch(0)
    for _ in range(3):
        assert folder.drop_damaged("hash") == []
        assert folder.facts(first)[0] == read_facts(first)[0]
    assert parsed == [first.name, folder.batch(1).name]
    write_batch(folder, 0, keys={0: f"{7:032x}"})
    assert folder.facts(first)[0].records[0].key == f"{7:032x}"
    flipped(first, first.read_bytes().index(b"checksums") + 60)
    assert [error.problems[0].where for error in folder.drop_damaged("size")] == [str(first)]
    monkeypatch.setattr(folder_module, "_HELD_BYTES", 10)
    without_room = FeatureFolder(folder.path)
    parsed.clear()
    for _ in range(2):
        without_room.facts(folder.batch(1))
    assert len(parsed) == 2


# --- shards ----------------------------------------------------------------------------------------------------------


def build(folder: FeatureFolder, order: Sequence[int], restart_at: int = -1, shard_bytes: int = 3000) -> None:
    """Batches finish in some order; the builder looks after each, and once it is made anew."""
    shards = ShardBuilder(folder, BATCHES, shard_bytes)
    for step, number in enumerate(order):
        write_batch(folder, number)
        if step == restart_at:
            shards = ShardBuilder(folder, BATCHES, shard_bytes)
        shards.compact()


@pytest.mark.parametrize(("order", "restart_at"), [((4, 3, 2, 1, 0), -1), ((1, 0, 3, 2, 4), 2), ((0, 2, 4, 1, 3), 4)])
def test_shards_do_not_depend_on_how_the_work_went(
    tmp_path: Path, folder: FeatureFolder, order: Sequence[int], restart_at: int
) -> None:
    other = FeatureFolder(tmp_path / "other")
    other.prepare()
    other.open_work()
    build(folder, range(BATCHES))
    build(other, order, restart_at)
    assert len(folder.shards()) > 1
    assert contents(folder) == contents(other)
    assert not folder.pending() and folder.done() == set(range(BATCHES))


def test_a_shard_made_again_is_the_same(folder: FeatureFolder) -> None:
    build(folder, range(BATCHES))
    before, middle = contents(folder), folder.shards()[1]
    middle.path.unlink()
    missing = sorted(set(range(BATCHES)) - folder.done())
    assert missing == list(range(middle.first, middle.last + 1))
    build(folder, missing)
    assert contents(folder) == before


def test_a_sample_that_is_there_twice_is_kept_once(folder: FeatureFolder) -> None:
    twin = f"{0:032x}"
    shards = ShardBuilder(folder, BATCHES, 1)
    for number in range(BATCHES):
        write_batch(folder, number, keys={8: twin})
        shards.compact()
    held = [
        span.path.name for span in folder.shards() if any(name.startswith(twin) for name in read_tensors(span.path))
    ]
    assert held == [folder.shards()[0].path.name]
    write_index(folder, description(folder.path))
    rows = read_index(folder.index)
    assert [row.row for row in rows] == list(range(BATCHES * ROWS_OF_A_BATCH))
    assert (rows[8].key, rows[8].shard) == (rows[0].key, rows[0].shard)
    assert rows[8].path != rows[0].path


def test_a_header_is_not_let_grow_without_bound(folder: FeatureFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mindspeed_mm.fsdp.data.feature_store.writer.HEADER_BYTES", 1)
    build(folder, range(BATCHES), shard_bytes=1 << 30)
    assert len(folder.shards()) == BATCHES


def test_leftovers_of_a_kill_go_away(folder: FeatureFolder) -> None:
    build(folder, range(BATCHES))
    write_batch(folder, 0)  # killed between the shard's name and this file's end
    (folder.work / ".batch-000001.safetensors.tmp").write_bytes(b"half")
    (folder.path / ".shard-000000-000001.safetensors.tmp").write_bytes(b"half")
    folder.open_work()
    assert not list(folder.work.iterdir())
    assert not list(folder.path.glob(".*"))


def test_the_index_needs_the_features_of_every_row(folder: FeatureFolder) -> None:
    records = [record(0), record(1)]
    write_feature_file(folder.shard(0, 0), tensors_of(records[:1]), (0, 0), records)
    with pytest.raises(DataError, match=r"rows\.jsonl:2.*'1\.png' changed while features were made.*--overwrite"):
        write_index(folder, description(folder.path))


# --- the folder ------------------------------------------------------------------------------------------------------


def test_a_folder_of_something_else_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    for name in ("work/batch-000000.safetensors", "shard-000000-000000.safetensors", "index.jsonl"):
        (tmp_path / name).write_text("mine")
    folder = FeatureFolder(tmp_path)
    folder.clear()
    with pytest.raises(UsageError, match=r"is not a folder of features, and holds index\.jsonl"):
        folder.prepare()
    assert len(list(tmp_path.rglob("*.*"))) == 3


def test_clearing_takes_only_what_is_ours(folder: FeatureFolder) -> None:
    build(folder, range(BATCHES))
    description(folder.path).write(folder.description)
    write_index(folder, description(folder.path))
    (folder.path / "notes.txt").write_text("mine")
    write_batch(folder, 0)
    folder.clear()
    assert [path.name for path in folder.path.iterdir()] == ["notes.txt"]


# --- what made a set -------------------------------------------------------------------------------------------------


def description(path: Path, **changes: Any) -> Description:
    made = Description(
        family="FluxTransformer2DModel",
        task="t2i",
        geometry={**vars(GEOMETRY)},
        model_folder=str(path),
        components={},
        preprocessing={"height": 8, "width": 8},
        dtype=None,
        batch_size=None,
        rows=BATCHES * ROWS_OF_A_BATCH,
        rows_fingerprint="0",
    )
    return replace(made, **changes)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"dtype": "bf16"}, r" dtype  not set then, bf16 now"),
        ({"task": "t2v"}, r" task  t2i then, t2v now"),
        ({"geometry": {**vars(GEOMETRY), "spatial_ratio": 4}}, r" geometry\.spatial_ratio  2 then, 4 now"),
    ],
)
def test_work_goes_on_only_with_the_same(tmp_path: Path, change: dict[str, Any], told: str) -> None:
    path = tmp_path / "features.json"
    description(tmp_path).write(path)
    check_same_work(read_description(path), description(tmp_path), path)
    added = {"rows": 11, "rows_fingerprint": "1", "preprocessing": {"height": 16, "width": 8}}
    check_same_work(read_description(path), description(tmp_path, **added), path)
    with pytest.raises(DataError, match=told) as caught:
        check_same_work(read_description(path), description(tmp_path, **change), path)
    assert "--overwrite" in str(caught.value)
    assert len(caught.value.problems) == 1


@pytest.mark.edge("S13")
@pytest.mark.parametrize(
    "text",
    [b"", b"[]", b"{}", b'{"format": "mindspeed-mm-features", "format_version": 1}', b"\0", b"\xff", b"[" * 100_000],
    ids=lambda text: text[:20].decode(errors="replace"),
)
def test_a_broken_description_is_named(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "features.json").write_bytes(text)
    with pytest.raises(DataError, match="describes no features"):
        read_description(tmp_path / "features.json")


def test_a_newer_format_is_named(tmp_path: Path) -> None:
    description(tmp_path, format_version=3).write(tmp_path / "features.json")
    with pytest.raises(DataError, match="format version 3, this installation reads up to 2"):
        read_description(tmp_path / "features.json")


# --- reading ---------------------------------------------------------------------------------------------------------


def adapter(model: Path, **changes: Any) -> Any:
    """What the store asks of an adapter."""
    facts = {"folder": model, "transformer_class": "FluxTransformer2DModel", "task": "t2i", "geometry": GEOMETRY}
    nothing = {"require": lambda name: None, "note_components": lambda configs: None}
    return SimpleNamespace(**nothing, **facts | changes)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model folder of two encoders."""
    files = {"vae": ["config.json", "model.safetensors"], "text_encoder": ["config.json", "model.safetensors"]}
    for name, own in files.items():
        (tmp_path / "model" / name).mkdir(parents=True)
        for file in own:
            (tmp_path / "model" / name / file).write_text(f"{name} {file}")

    def encoder_files(adapter: Any, absent: Sequence[str] = ()) -> dict[str, list[Path]]:
        return {name: sorted((adapter.folder / name).iterdir()) for name in files if name not in absent}

    provenance = "mindspeed_mm.fsdp.data.feature_store.description"
    monkeypatch.setattr(f"{provenance}.encoder_files", encoder_files)
    monkeypatch.setattr(f"{provenance}.absent_encoders", lambda adapter: set())
    return tmp_path / "model"


@pytest.fixture
def finished(folder: FeatureFolder, model: Path) -> FeatureFolder:
    build(folder, range(BATCHES))
    write_feature_file(folder.null_text, {"prompt_embeds": torch.ones(1, 6)})
    made = description(model, components=measure_components(adapter(model)))
    made.write(folder.description)
    write_index(folder, made)
    folder.drop_work()
    return folder


def test_rows_come_back_as_they_were(finished: FeatureFolder, model: Path) -> None:
    store = open_features(finished.path, adapter(model))
    assert len(store) == BATCHES * ROWS_OF_A_BATCH
    expected = tensors_of([record(row) for row in range(len(store))])
    for index, each in enumerate(store.records):
        assert replace(each, shard="", tensors={}) == record(index)
        for number in range(len(each.captions)):
            found = store.read(index, number)
            assert found.keys() == {"latents", "prompt_embeds"}
            assert torch.equal(found["latents"], expected[tensor_name(each.key, "latents")])
            assert torch.equal(found["prompt_embeds"], expected[tensor_name(each.key, "prompt_embeds", number)])
    assert store.null_text is not None and torch.equal(store.null_text["prompt_embeds"], torch.ones(1, 6))


class Rows(torch.utils.data.Dataset[Any]):
    def __init__(self, store: Any) -> None:
        self.store = store

    def __len__(self) -> int:
        return len(self.store)

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        own = self.store._owner if self.store._open else 0
        return own, self.store.read(index, 0)["latents"]


def test_a_spawned_worker_gets_a_store_without_open_shards(finished: FeatureFolder, model: Path) -> None:
    store = open_features(finished.path, adapter(model))
    store.read(0, 0)
    copy = pickle.loads(pickle.dumps(store))
    assert copy._open == {}
    assert torch.equal(copy.read(3, 0)["latents"], store.read(3, 0)["latents"])


def test_forked_workers_open_the_shards_themselves(finished: FeatureFolder, model: Path) -> None:
    store = open_features(finished.path, adapter(model))
    here = [store.read(index, 0)["latents"].clone() for index in range(len(store))]
    loader = DataLoader(Rows(store), batch_size=None, num_workers=2, multiprocessing_context="fork")
    seen = list(loader)
    assert all(torch.equal(latents, here[index]) for index, (_, latents) in enumerate(seen))
    assert os.getpid() not in {owner for owner, _ in seen[2:]}


def test_a_folder_without_features(tmp_path: Path, model: Path) -> None:
    with pytest.raises(DataError, match=r"does not exist.*Run mm extract"):
        open_features(tmp_path / "none", adapter(model))
    with pytest.raises(DataError, match=r"holds no features.*Run mm extract"):
        open_features(model, adapter(model))


def test_an_unfinished_set_says_how_much_is_missing(folder: FeatureFolder, model: Path) -> None:
    description(model).write(folder.description)
    build(folder, [0, 1, 2, 4])
    with pytest.raises(DataError, match=r"not finished: 2 of 10 rows are missing\. Run mm extract again"):
        open_features(folder.path, adapter(model))


def test_a_missing_or_cut_shard_is_named(finished: FeatureFolder, model: Path) -> None:
    shard = finished.shards()[1].path
    size = shard.stat().st_size
    os.truncate(shard, size - 3)
    with pytest.raises(DataError, match=rf"{shard.name}.*has {size - 3} bytes, {size} were written.*mm extract again"):
        open_features(finished.path, adapter(model))
    shard.unlink()
    with pytest.raises(DataError, match=rf"{shard.name}.*is missing.*mm extract again"):
        open_features(finished.path, adapter(model))


def test_changed_bytes_are_found_when_they_are_read(finished: FeatureFolder, model: Path) -> None:
    shard = sorted(finished.path.glob("shard-*"))[0]
    flipped(shard, shard.stat().st_size - 3)
    store = open_features(finished.path, adapter(model))
    told = []
    for index, each in enumerate(store.records):
        for caption in range(len(each.captions)):
            for _ in range(2):  # not only the first time
                try:
                    store.read(index, caption)
                except DataError as error:
                    told.append(str(error))
    assert told and all("have changed" in text and "mm extract" in text for text in told)
    assert len(told) % 2 == 0


@pytest.mark.edge("S13")
@pytest.mark.parametrize("line", [b'{"row"', b"\xff\xfe", b"[" * 100_000], ids=["cut", "binary", "deep"])
def test_a_broken_index_line_is_named(line: bytes, finished: FeatureFolder, model: Path) -> None:
    lines = finished.index.read_bytes().splitlines()
    finished.index.write_bytes(b"\n".join([lines[0], line, *lines[2:]]) + b"\n")
    with pytest.raises(DataError, match=r"index\.jsonl:2.*mm extract again"):
        open_features(finished.path, adapter(model))
    finished.skipped.write_bytes(line + b"\n")
    with pytest.raises(DataError, match=r"skipped\.jsonl:1.*mm extract again"):
        read_skipped(finished.skipped)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"transformer_class": "WanTransformer3DModel"}, "family FluxTransformer2DModel, the model has Wan"),
        ({"task": "i2v"}, "task t2i, the model has i2v"),
        ({"geometry": replace(GEOMETRY, latent_channels=16)}, "latent_channels 4, the model has 16"),
        ({"geometry": replace(GEOMETRY, patch=(1, 1, 1))}, r"patch \[1, 2, 2\], the model has \[1, 1, 1\]"),
    ],
)
def test_features_for_another_model_are_refused(
    finished: FeatureFolder, model: Path, change: dict[str, Any], told: str
) -> None:
    with pytest.raises(DataError, match=told):
        open_features(finished.path, adapter(model, **change))


# --- provenance ------------------------------------------------------------------------------------------------------


def test_the_encoders_that_made_them_are_accepted_wherever_they_lie(finished: FeatureFolder, model: Path) -> None:
    store = open_features(finished.path, adapter(model))
    check_provenance(store, adapter(model))
    elsewhere = shutil.copytree(model, model.with_name("copy"))
    for path in elsewhere.rglob("*.*"):
        os.utime(path)
    check_provenance(store, adapter(elsewhere))


def test_untouched_files_are_not_read_again(
    finished: FeatureFolder, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Path] = []

    def sha256(path: Path) -> str:
        read.append(path)
        return "another"

    monkeypatch.setattr("mindspeed_mm.fsdp.data.feature_store.description.kept_sha256", sha256)
    store = open_features(finished.path, adapter(model))
    check_provenance(store, adapter(model))
    assert read == []
    os.utime(model / "vae" / "config.json", (1, 1))
    with pytest.raises(DataError, match="vae"):
        check_provenance(store, adapter(model))
    assert read == [model / "vae" / "config.json"]


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda vae: flipped(vae / "model.safetensors", 3), "the features were made with"),
        (lambda vae: (vae / "config.json").unlink(), "is missing, the features were made with it"),
        (lambda vae: (vae / "added.json").write_text("{}"), "is new, the features were made without it"),
    ],
)
def test_another_component_is_named_with_the_way_out(
    finished: FeatureFolder, model: Path, spoil: Callable[[Path], object], told: str
) -> None:
    elsewhere = shutil.copytree(model, model.with_name("copy"))
    spoil(elsewhere / "vae")
    store = open_features(finished.path, adapter(model))
    with pytest.raises(DataError) as caught:
        check_provenance(store, adapter(elsewhere))
    text = str(caught.value)
    assert told in text and "  vae  " in text and "text_encoder" not in text.replace(str(elsewhere), "")
    assert "mm extract with --overwrite" in text and f"point model.model_name_or_path to {model}" in text


def test_provenance_is_plain_and_does_not_know_times(finished: FeatureFolder, model: Path) -> None:
    store = open_features(finished.path, adapter(model))
    assert store.provenance == json.loads(json.dumps(store.provenance))
    assert store.provenance is not None and len(store.provenance["vae"]["vae/config.json"]) == 64
