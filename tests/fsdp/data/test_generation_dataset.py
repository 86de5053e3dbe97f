"""The data set of generators through the loader: raw media and features, bad samples, validation, resume."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.core.errors import ConfigError, DataError
from mindspeed_mm.core.media_geometry import MediaSize
from mindspeed_mm.core.seeds import derive_seed
from mindspeed_mm.fsdp.data import DataPosition, MMDataLoader, build, build_mm_dataloader, build_mm_dataset
from mindspeed_mm.fsdp.data.dataloader import fetch
from mindspeed_mm.fsdp.data.dataloader.buckets import BucketOrder
from mindspeed_mm.fsdp.data.dataloader.transport import SharedSlots
from mindspeed_mm.fsdp.data.datasets.generation import feature_source, generation_dataset, media_marks, raw_source
from mindspeed_mm.fsdp.data.datasets.generation.generation_dataset import GenerationDataset
from mindspeed_mm.fsdp.params.data_args import DataloaderParam, DatasetParam
from tests.fsdp.data.conftest import picture, write_jsonl
from tests.helpers.tiny_generators import make_tiny_flux, make_tiny_wan
from tests.helpers.tiny_media import write_video

PLANES = ((16, 16), (16, 32), (32, 16))


@pytest.fixture(scope="session")
def flux(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_flux(tmp_path_factory.mktemp("flux"))


@pytest.fixture(scope="session")
def wan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_wan(tmp_path_factory.mktemp("wan"))


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """23 pictures of three sizes in two folders that hold the same names; every third row has two captions."""
    rows = []
    for n in range(23):
        height, width = PLANES[n % 3]
        path = tmp_path / f"folder{n % 2}" / f"{n // 2}.png"
        path.parent.mkdir(exist_ok=True)
        picture(width, height, seed=n).save(path)
        captions = [f"{n}", f"{n} again"] if n % 3 == 0 else f"{n}"
        rows.append({"path": str(path.relative_to(tmp_path)), "cap": captions})
    return write_jsonl(tmp_path / "rows.jsonl", rows)


@pytest.fixture
def param(tmp_path: Path, flux: Path) -> Callable[..., DatasetParam]:
    def make(dataset: Path | None, model: Path = flux, sizes: dict[str, Any] | None = None, **basic: Any) -> Any:
        buckets = {"buckets": [f"{height}x{width}" for height, width in PLANES]}
        return DatasetParam.model_validate(
            {
                "dataset_type": "generation",
                "basic_parameters": {
                    "dataset": str(dataset) if dataset else None, "dataset_dir": str(tmp_path), **basic,
                },
                "preprocess_parameters": {
                    "model_name_or_path": str(model), **(buckets if sizes is None else sizes),
                },
            }
        )  # fmt: skip

    return make


def loader(dataset: Any, dp_rank: int = 0, dp_size: int = 1, accumulation: int = 1, **changes: Any) -> MMDataLoader:
    keys = {name: changes.pop(name) for name in list(changes) if name in DataloaderParam.model_fields}
    section = DataloaderParam(**{"num_workers": 0, "drop_last": False, **keys})
    micro = changes.pop("micro_batch_size", 2)
    return build_mm_dataloader(
        dataset,
        section,
        micro_batch_size=micro,
        gradient_accumulation_steps=accumulation,
        dp_rank=dp_rank,
        dp_size=dp_size,
        seed=5,
        **changes,
    )


def epoch_of(data: MMDataLoader) -> list[Batch]:
    return [batch for step in islice(data, data.steps_per_epoch) for batch in step]


def ids(batches: Sequence[Batch]) -> list[str]:
    return [name for b in batches for name in b["sample_ids"][: len(b["sample_ids"]) - b.get("blank_rows", 0)]]


class TestRaw:
    def test_samples(self, pictures: Path, param: Callable[..., DatasetParam]) -> None:
        dataset, _ = build_mm_dataset(param(pictures))
        assert isinstance(dataset, GenerationDataset)
        assert dataset.is_raw
        assert dataset.null_text() is None
        assert dataset.sizes == [MediaSize(1, *PLANES[n % 3]) for n in range(23)]
        sample = dataset[1]
        assert sample["pixels"].shape == (3, 1, 16, 32)
        assert (sample["epoch"], sample["caption"]) == (0, "1")
        assert str(dataset.place(1)) == "rows.jsonl:2"

    def test_same_named_files_never_collide(self, pictures: Path, param: Callable[..., DatasetParam]) -> None:
        dataset, _ = build_mm_dataset(param(pictures))
        names = [dataset[n]["sample_id"] for n in range(23)]
        assert len(set(names)) == 23
        assert all(len(name) == 32 for name in names)

    def test_one_caption_of_a_list_is_drawn_per_epoch(self, pictures: Path, param: Callable[..., DatasetParam]) -> None:
        dataset, _ = build_mm_dataset(param(pictures))
        name = dataset[3]["sample_id"]
        drawn = [dataset.item(3, epoch)["caption"] for epoch in range(40)]
        assert drawn == [("3", "3 again")[derive_seed(42, epoch, name, "caption") % 2] for epoch in range(40)]
        assert 8 < drawn.count("3") < 32
        assert dataset[3]["caption"] == drawn[0]

    @pytest.mark.parametrize("workers", [0, 2])
    def test_batches(self, workers: int, pictures: Path, param: Callable[..., DatasetParam]) -> None:
        dataset, _ = build_mm_dataset(param(pictures))
        reference = {dataset[n]["sample_id"]: n for n in range(23)}
        data = loader(dataset, num_workers=workers)
        batches = epoch_of(data) + epoch_of(data)
        assert sorted(ids(batches)) == sorted([*reference] * 2)
        for batch in batches:
            assert batch.keys() == {"sample_ids", "epochs", "captions", "pixels", "fps"}
            assert batch["pixels"].dtype == torch.uint8
            for name, epoch, caption, pixels in zip(
                batch["sample_ids"], batch["epochs"], batch["captions"], batch["pixels"], strict=True
            ):
                expected = dataset.item(reference[name], epoch)
                assert torch.equal(pixels, expected["pixels"])
                assert caption == expected["caption"]
        assert {epoch for batch in batches for epoch in batch["epochs"]} == {0, 1}

    def test_clips_and_pictures_together(self, tmp_path: Path, wan: Path, param: Callable[..., DatasetParam]) -> None:
        rows = []
        for n in range(4):
            write_video(tmp_path / f"{n}.mp4", [n * 20 + i for i in range(9 - n)])
            rows.append({"video": f"{n}.mp4", "caption": f"{n}"})
        picture(48, 32).save(tmp_path / "4.png")
        rows.append({"image": "4.png", "caption": "4"})
        rows[1] |= {"num_frames": 8, "fps": 16, "resolution": {"height": 32, "width": 48}}
        path = write_jsonl(tmp_path / "rows.jsonl", rows)
        dataset, _ = build_mm_dataset(param(path, wan, {"height": 32, "width": 48, "num_frames": [5, 9]}))
        assert [size.frames for size in dataset.sizes] == [9, 5, 5, 5, 1]
        shapes = {batch["pixels"].shape[2:] for batch in epoch_of(loader(dataset))}
        assert shapes == {(9, 32, 48), (5, 32, 48), (1, 32, 48)}

    def test_sizes_are_checked_at_start(self, pictures: Path, param: Callable[..., DatasetParam], wan: Path) -> None:
        with pytest.raises(ConfigError, match=r"num_frames  80×32×48 .* Use 81×32×48"):
            build_mm_dataset(param(pictures, wan, {"height": 32, "width": 48, "num_frames": 80}))
        with pytest.raises(ConfigError, match="there is no size to bring the media to"):
            build_mm_dataset(param(pictures, sizes={}))

    def test_headers_are_looked_up_once(
        self, tmp_path: Path, pictures: Path, param: Callable[..., DatasetParam], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked: list[str] = []
        probe = raw_source.probe_media
        monkeypatch.setattr(raw_source, "probe_media", lambda row, media: asked.append(row.media) or probe(row, media))
        build_mm_dataset(param(pictures, cache_dir=str(tmp_path / "cache")))
        assert len(asked) == 23
        picture(34, 16, seed=99).save(tmp_path / "folder1" / "1.png")
        sizes = build_mm_dataset(param(pictures, cache_dir=str(tmp_path / "cache")))[0].sizes
        assert asked[23:] == ["folder1/1.png"]
        assert sizes[3] == MediaSize(1, 16, 32)
        for times, broken in enumerate(("{broken", "[1, 2]"), 1):
            (tmp_path / "cache" / media_marks.FILE).write_text(broken)
            build_mm_dataset(param(pictures, cache_dir=str(tmp_path / "cache")))
            assert len(asked) == 24 + times * 23

    def test_declared_sizes_need_no_look_into_files(
        self, tmp_path: Path, param: Callable[..., DatasetParam], wan: Path
    ) -> None:
        declared = {"num_frames": 9, "fps": 16, "resolution": {"height": 32, "width": 48}}
        rows = [{"path": f"absent{n}.mp4", "cap": "a", **declared} for n in range(3)]
        path = write_jsonl(tmp_path / "rows.jsonl", rows)
        dataset, _ = build_mm_dataset(param(path, wan, {"height": 32, "width": 48, "num_frames": 5}))
        assert dataset.sizes == [MediaSize(5, 32, 48)] * 3
        with pytest.raises(DataError, match=r"rows.jsonl:1 +'absent0.mp4' not found"):
            dataset[0]

    def test_fingerprint(self, tmp_path: Path, pictures: Path, param: Callable[..., DatasetParam]) -> None:
        found = build_mm_dataset(param(pictures))[0].fingerprint()
        assert json.loads(json.dumps(found)) == found
        assert build_mm_dataset(param(pictures))[0].fingerprint() == found
        other_size = build_mm_dataset(param(pictures, sizes={"height": 16, "width": 16}))[0].fingerprint()
        lines = pictures.read_text().splitlines()
        pictures.write_text("\n".join(lines[::-1]))
        reordered = build_mm_dataset(param(pictures))[0].fingerprint()
        assert len({each["hash"] for each in (found, other_size, reordered)}) == 3

    def test_fingerprint_tells_which_rows_were_left_out(
        self, tmp_path: Path, pictures: Path, param: Callable[..., DatasetParam]
    ) -> None:
        """Another row in its place shifts all between them, and the number stays."""
        made = param(pictures, on_bad_sample="skip", max_bad_fraction=0.1)
        hashes = set()
        for name in ("3.png", "4.png"):
            path = tmp_path / "folder1" / name
            content = path.read_bytes()
            path.write_bytes(b"<html>")
            found = build_mm_dataset(made)[0].fingerprint()
            path.write_bytes(content)
            assert found["rows"] == 22
            hashes.add(found["hash"])
        assert len(hashes) == 2


@pytest.mark.edge("G3")
def test_the_seed_of_the_run_decides_about_captions(pictures: Path, param: Callable[..., DatasetParam]) -> None:
    """Each seed draws its own, in both parts of a split too, and the same again."""
    sets = [build_mm_dataset(param(pictures), seed=seed)[0] for seed in (5, 6, 5)]
    drawn = [[each.item(3, epoch)["caption"] for epoch in range(40)] for each in sets]
    assert drawn[0] == drawn[2] != drawn[1]
    name = sets[0][3]["sample_id"]
    assert drawn[1] == [("3", "3 again")[derive_seed(6, epoch, name, "caption") % 2] for epoch in range(40)]
    parts = build_mm_dataset(param(pictures, val_rate=0.5), seed=6)
    by_name = {each["sample_id"]: each["caption"] for p in parts for each in (p.item(n, 1) for n in range(len(p)))}
    assert by_name[name] == drawn[1][1]


class TestBadSamples:
    def test_before_the_start(self, tmp_path: Path, pictures: Path, param: Callable[..., DatasetParam]) -> None:
        (tmp_path / "folder1" / "3.png").write_bytes(b"<html>")
        with pytest.raises(
            DataError, match=r"media of 1 of 23 rows(.|\n)*rows.jsonl:8 +'folder1/3.png' is not an image"
        ):
            build_mm_dataset(param(pictures))
        with pytest.raises(
            DataError, match=r"2 of 23 samples are bad, more than 0\.100%.*\n  rows.jsonl:8 .*\n  rows.*:10 "
        ):
            (tmp_path / "folder1" / "4.png").unlink()
            build_mm_dataset(param(pictures, on_bad_sample="skip"))
        dataset, _ = build_mm_dataset(param(pictures, on_bad_sample="skip", max_bad_fraction=0.1))
        assert list(dataset.left_out) == ["rows.jsonl:8", "rows.jsonl:10"]
        assert len(dataset) == len(dataset.sizes) == 21
        data = loader(dataset)
        assert len(set(ids(epoch_of(data)))) == 21
        assert data.counts.bad.keys() == {"rows.jsonl:8", "rows.jsonl:10"}

    @pytest.mark.parametrize("key", ["dataset_dir", "data_folder"])
    def test_an_absent_folder_is_said_once(self, key: str, pictures: Path, param: Callable[..., DatasetParam]) -> None:
        with pytest.raises(DataError, match=rf"{key}  '.*nowhere' is not a folder\. Name the folder") as caught:
            build_mm_dataset(param(pictures, **{key: "nowhere"}, on_bad_sample="skip"))
        assert len(caught.value.problems) == 1

    def test_a_replacement_has_the_same_size_on_every_split(
        self, tmp_path: Path, pictures: Path, param: Callable[..., DatasetParam]
    ) -> None:
        path = tmp_path / "folder1" / "3.png"  # its header stays good
        path.write_bytes(path.read_bytes()[:200])
        with pytest.raises(DataError, match=r"rows.jsonl:8 +'folder1/3.png' is broken"):
            epoch_of(loader(build_mm_dataset(param(pictures))[0]))
        dataset, _ = build_mm_dataset(param(pictures, on_bad_sample="skip", max_bad_fraction=0.1))
        whole = loader(dataset, micro_batch_size=1, accumulation=4)
        found = epoch_of(whole)
        assert len(ids(found)) == 23
        assert len(set(ids(found))) == 22
        assert list(whole.counts.bad) == ["rows.jsonl:8"]
        ranks = [epoch_of(loader(dataset, rank, 4, micro_batch_size=1)) for rank in range(4)]
        assert ids([batch for group in zip(*ranks, strict=True) for batch in group]) == ids(found)

    def test_a_size_without_a_usable_sample_is_replaced_by_another(
        self, tmp_path: Path, pictures: Path, param: Callable[..., DatasetParam], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rows = pictures.read_text().splitlines()
        picture(64, 16, seed=50).save(tmp_path / "alone.png")
        (tmp_path / "alone.png").write_bytes((tmp_path / "alone.png").read_bytes()[:200])
        pictures.write_text("\n".join([*rows, json.dumps({"path": "alone.png", "cap": "x"})]))
        sizes = {"buckets": ["16x16", "16x32", "32x16", "16x64"]}
        made = param(pictures, sizes=sizes, on_bad_sample="skip", max_bad_fraction=0.1)
        found = epoch_of(loader(build_mm_dataset(made)[0]))
        assert len(ids(found)) == 24
        assert set(ids(found)) == set(ids(epoch_of(loader(build_mm_dataset(made)[0], accumulation=2))))
        monkeypatch.setattr(fetch.SamplePeers, "of_another_size", lambda *_: [])
        with pytest.raises(DataError, match="1 samples in a row cannot be used"):
            epoch_of(loader(build_mm_dataset(made)[0]))


class TestLoader:
    def test_resume_mid_epoch_under_other_ranks(self, pictures: Path, param: Callable[..., DatasetParam]) -> None:
        dataset, _ = build_mm_dataset(param(pictures))
        whole, ledger, position = loader(dataset, accumulation=2), [], DataPosition(0, 0)
        expected = ids([batch for step in islice(whole, 12) for batch in step])
        for dp_size, steps in ((2, 1), (1, 3), (2, 5), (1, 3)):
            split = {"accumulation": 2 // dp_size, "position": position}
            ranks = [loader(dataset, rank, dp_size, **split) for rank in range(dp_size)]
            taken = [[batch for step in islice(data, steps) for batch in step] for data in ranks]
            ledger += ids([batch for group in zip(*taken, strict=True) for batch in group])
            position = DataPosition.from_dict(ranks[0].position.to_dict())
        assert ledger == expected
        assert position == whole.position
        assert whole.batching == loader(dataset, 0, 2).batching != {}

    def test_the_token_budget(self, pictures: Path, param: Callable[..., DatasetParam]) -> None:
        dataset, _ = build_mm_dataset(param(pictures))
        tokens = dataset.geometry.tokens(dataset.geometry.latent_shape(MediaSize(1, 16, 32)))
        batches = epoch_of(loader(dataset, max_tokens_per_batch=3 * tokens))
        assert sorted(len(b["sample_ids"]) for b in batches if b["pixels"].shape[-2:] != (16, 16)) == [1, 2, 3, 3, 3, 3]
        assert max(len(b["sample_ids"]) for b in batches if b["pixels"].shape[-2:] == (16, 16)) == 6
        with pytest.raises(ConfigError, match="max_tokens_per_batch  a sample of"):
            loader(dataset, max_tokens_per_batch=1)

    @pytest.mark.parametrize("dp_size", [1, 2, 3])
    def test_one_pass(self, dp_size: int, pictures: Path, param: Callable[..., DatasetParam]) -> None:
        dataset, _ = build_mm_dataset(param(pictures))
        ranks = [[b for step in loader(dataset, rank, dp_size).one_pass() for b in step] for rank in range(dp_size)]
        assert len({len(batches) for batches in ranks}) == 1
        found = [name for batches in ranks for name in ids(batches)]
        assert len(found) == len(set(found)) == 23
        for batch in (batch for batches in ranks for batch in batches):
            assert len(batch["pixels"]) == len(batch["sample_ids"]) >= 1
            assert batch.get("blank_rows", 0) in (0, len(batch["sample_ids"]))

    @pytest.mark.parametrize("name", ["BucketBatchSampler", "VariableVideoBatchSampler", "LengthGroupedSampler"])
    def test_all_names_mean_this_order(self, name: str, pictures: Path, param: Callable[..., DatasetParam]) -> None:
        dataset, _ = build_mm_dataset(param(pictures))
        expected = ids(epoch_of(loader(dataset)))
        assert ids(epoch_of(loader(dataset, sampler_type=name))) == expected
        assert ids(epoch_of(loader(dataset, sampler_type=name, dataloader_mode="variable"))) == expected
        in_order = ids(epoch_of(loader(dataset, sampler_type="SequentialSampler")))
        assert in_order == ids(epoch_of(loader(dataset, shuffle=False))) != expected
        with pytest.raises(ConfigError, match="Did you mean 'BucketBatchSampler'"):
            loader(dataset, sampler_type="BucketBatchSampling")
        with pytest.raises(ConfigError, match="TokenBudgetSampler has no budget"):
            loader(dataset, sampler_type="TokenBudgetSampler")
        with pytest.raises(ConfigError, match="'custom' is not built yet"):
            loader(dataset, dataloader_mode="custom")

    def test_clips_travel_through_shared_memory(
        self, tmp_path: Path, wan: Path, param: Callable[..., DatasetParam], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """However large they are: what torch would take instead is small in containers."""
        monkeypatch.setattr(build, "SLOT_BYTES", 1000)
        write_video(tmp_path / "a.mp4", range(0, 200, 20))
        path = write_jsonl(tmp_path / "rows.jsonl", [{"path": "a.mp4", "cap": f"{n}"} for n in range(4)])
        dataset, _ = build_mm_dataset(param(path, wan, {"height": 32, "width": 48, "num_frames": 9}))
        sent: list[Any] = []
        read = SharedSlots.read
        monkeypatch.setattr(SharedSlots, "read", lambda *args, **keys: sent.append(args) or read(*args, **keys))
        batches = epoch_of(loader(dataset, num_workers=1))
        assert len(sent) >= len(batches) == 2
        assert torch.equal(batches[0]["pixels"][0], dataset[0]["pixels"])

    def test_a_part_keeps_sizes_and_epochs(self, pictures: Path, param: Callable[..., DatasetParam]) -> None:
        train, held_out = build_mm_dataset(param(pictures, val_rate=0.3))
        assert len(train) + len(held_out) == 23
        for part in (train, held_out):
            assert part.is_raw
            assert [part[n]["pixels"].shape[-2:] for n in range(len(part))] == [
                (size.height, size.width) for size in part.sizes
            ]
            assert isinstance(loader(part).order, BucketOrder)
        everything = ids(epoch_of(loader(train))) + ids(epoch_of(loader(held_out)))
        assert len(set(everything)) == 23
        captions = {train.item(n, epoch)["caption"] for n in range(len(train)) for epoch in range(8)}
        assert any(caption.endswith("again") for caption in captions)


@dataclass
class Record:
    key: str
    path: str
    captions: tuple[str, ...]
    size: MediaSize
    place: str = "rows.jsonl:1"
    cut_captions: int = 0
    repeats: int = 1
    views: int = 1
    is_prior: bool = False
    fps: float | None = None


class Store:
    """A feature store as `open_features` gives one; its numbers are all different."""

    components: Any = None
    skipped: Any = None
    preprocessing: Any = None
    provenance: Any = {"vae": {"config.json": "00"}}

    def __init__(self, count: int = 7) -> None:
        self.folder = Path("features")
        sizes = [MediaSize(1, 16, 16), MediaSize(1, 16, 32)]
        self.records = [
            Record(f"{n:032x}", f"{n}.png", ("a", "b")[: 1 + n % 2], sizes[n % 3 == 0]) for n in range(count)
        ]
        self.null_text = {"prompt_embeds": torch.zeros(16, 32), "pooled_prompt_embeds": torch.zeros(32)}

    def __len__(self) -> int:
        return len(self.records)

    def read(self, index: int, caption_index: int, view: int = 0) -> dict[str, torch.Tensor]:
        size = self.records[index].size
        return {
            "latents": torch.full((4, size.height // 2, size.width // 2), float(index)),
            "prompt_embeds": torch.full((16, 32), index + 0.5 * caption_index),
            "pooled_prompt_embeds": torch.full((32,), float(index)),
        }


class TestFeatures:
    @pytest.fixture
    def store(self, monkeypatch: pytest.MonkeyPatch) -> Store:
        found = Store()
        monkeypatch.setattr(generation_dataset, "open_features", lambda folder, adapter: found)
        monkeypatch.setattr(feature_source, "check_provenance", lambda store, adapter: None)
        return found

    @pytest.mark.parametrize("workers", [0, 1])
    def test_batches(self, workers: int, store: Store, param: Callable[..., DatasetParam]) -> None:
        dataset, _ = build_mm_dataset(param(None, sizes={}, features_dir="features"))
        assert not dataset.is_raw
        assert dataset.sizes == [record.size for record in store.records]
        assert set(dataset.null_text()) == {"prompt_embeds", "pooled_prompt_embeds"}
        assert dataset.null_text()["prompt_embeds"].shape == (16, 32)
        assert dataset.place(2) == "features:2.png"
        batches = epoch_of(loader(dataset, num_workers=workers))
        assert sorted(ids(batches)) == [record.key for record in store.records]
        for batch in batches:
            assert batch.keys() == {"sample_ids", "epochs", "fps", "latents", "prompt_embeds", "pooled_prompt_embeds"}
            for row, name in enumerate(batch["sample_ids"]):
                number = int(name, 16)
                drawn = derive_seed(42, 0, name, "caption") % (1 + number % 2)
                assert batch["latents"][row].unique().tolist() == [number]
                assert batch["prompt_embeds"][row].unique().tolist() == [number + 0.5 * drawn]

    def test_conditions_are_stacked_and_padding_is_the_familys(
        self, store: Store, param: Callable[..., DatasetParam], monkeypatch: pytest.MonkeyPatch, wan: Path
    ) -> None:
        """Wan pads texts of uneven length; what is not text is stacked."""
        store.records = [Record(f"{n:032x}", f"{n}.mp4", ("a",), MediaSize(5, 16, 16)) for n in range(2)]
        store.null_text = {"prompt_embeds": torch.zeros(1, 32)}
        monkeypatch.setattr(
            store,
            "read",
            lambda index, caption, view: {
                "latents": torch.zeros(16, 2, 2, 2),
                "prompt_embeds": torch.ones(2 + index, 32),
                "condition_latents": torch.full((16, 2, 2, 2), float(index)),
            },
        )
        dataset, _ = build_mm_dataset(param(None, wan, sizes={}, features_dir="features"))
        (batch,) = epoch_of(loader(dataset))
        lengths = (batch["prompt_embeds"].abs().sum(-1) > 0).sum(1).tolist()
        assert sorted(lengths) == [2, 3]
        assert batch["prompt_embeds"].shape[1:] == dataset.null_text()["prompt_embeds"].shape
        assert batch["condition_latents"].shape == (2, 16, 2, 2, 2)

    def test_sizes_that_the_yaml_asks_for_must_be_there(self, store: Store, param: Callable[..., DatasetParam]) -> None:
        build_mm_dataset(param(None, sizes={"buckets": ["16x16", "16x32"]}, features_dir="features"))
        with pytest.raises(DataError, match=r"holds samples of 16×32; asked for are 16×16"):
            build_mm_dataset(param(None, sizes={"height": 16, "width": 16}, features_dir="features"))

    def test_fingerprint_and_duplicates(self, store: Store, param: Callable[..., DatasetParam]) -> None:
        made = param(None, sizes={}, features_dir="features")
        found = build_mm_dataset(made)[0].fingerprint()
        assert build_mm_dataset(made)[0].fingerprint() == found
        store.provenance = {"vae": {"config.json": "11"}}
        other_weights = build_mm_dataset(made)[0].fingerprint()
        store.records = store.records[::-1]
        reordered = build_mm_dataset(made)[0].fingerprint()
        assert len({each["hash"] for each in (found, other_weights, reordered)}) == 3
        store.records = [*store.records, store.records[0]]
        with pytest.warns(UserWarning, match="1 of 8 samples repeats another"):
            build_mm_dataset(made)

    def test_most_samples_and_an_empty_set(self, store: Store, param: Callable[..., DatasetParam]) -> None:
        assert len(build_mm_dataset(param(None, sizes={}, features_dir="features", max_samples=3))[0]) == 3
        store.records = []
        with pytest.raises(DataError, match="the feature set is empty"):
            build_mm_dataset(param(None, sizes={}, features_dir="features"))

    def test_features_that_are_not_there(self, tmp_path: Path, param: Callable[..., DatasetParam]) -> None:
        with pytest.raises(DataError, match=r"does not exist. Run mm extract"):
            build_mm_dataset(param(None, sizes={}, features_dir=str(tmp_path / "nothing")))

    def test_validation_rows_have_features_of_their_own(
        self, store: Store, pictures: Path, param: Callable[..., DatasetParam], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        opened: list[str] = []
        monkeypatch.setattr(generation_dataset, "open_features", lambda folder, _: opened.append(str(folder)) or store)
        train, held_out = build_mm_dataset(param(None, sizes={}, features_dir="a", val_features_dir="b"))
        assert opened == ["a", "b"]
        assert len(train) == len(held_out) == 7
        train, held_out = build_mm_dataset(param(None, sizes={}, features_dir="a", val_rate=0.3))
        assert (len(train), len(held_out)) == (5, 2)
        assert held_out.null_text is not None
        with pytest.raises(ConfigError, match=r"val_features_dir .* has no features"):
            build_mm_dataset(param(pictures, sizes={}, features_dir="a", val_dataset="rows.jsonl"))


def test_a_folder_is_needed(pictures: Path, param: Callable[..., DatasetParam], tmp_path: Path) -> None:
    made = param(pictures)
    bare = made.preprocess_parameters.model_copy(update={"model_name_or_path": None})
    with pytest.raises(ConfigError, match="no model to read the data for"):
        build_mm_dataset(made.model_copy(update={"preprocess_parameters": bare}))
