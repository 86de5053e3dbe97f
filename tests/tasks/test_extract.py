"""`mm extract`: features are what the pipeline's encoders give, made once, and never of something else."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageSequence

from mindspeed_mm.core.artifacts import RunFolder
from mindspeed_mm.core.errors import (
    ConfigError,
    DataError,
    MachineError,
    ModelFolderError,
    StoppedAfterSave,
    UsageError,
)
from mindspeed_mm.fsdp.data.datasets.generation.rows import read_rows
from mindspeed_mm.fsdp.data.feature_store import check_provenance, open_features
from mindspeed_mm.fsdp.data.feature_store.feature_file import read_facts
from mindspeed_mm.fsdp.data.feature_store.folder import FeatureFolder
from mindspeed_mm.fsdp.models.diffusion.components import load_encoders
from mindspeed_mm.fsdp.models.diffusion.find import find_adapter
from mindspeed_mm.fsdp.train.configuration import load_with_plugins
from mindspeed_mm.fsdp.train.run.stop_signal import StopSignal
from mindspeed_mm.tasks.extract import extract
from mindspeed_mm.tasks.extract.batches import BatchEncoder, plan_batches
from tests.helpers.distributed import run_ranks
from tests.helpers.runs import lines
from tests.helpers.tiny_generator_run import generator_config, make_tiny_generator_run
from tests.tasks.extraction_run import SMALL, files, make_run, run, write_yaml

BASIC = "data.dataset_param.basic_parameters"


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose features were made; tests change copies of it."""
    folder = tmp_path_factory.mktemp("prepared")
    run(make_run(folder))
    return folder


@pytest.fixture
def features(prepared: Path, tmp_path: Path) -> Path:
    """A copy of the feature set, to be damaged."""
    return shutil.copytree(prepared / "features", tmp_path / "features")


def rewrite_rows(prepared: Path, rows: list[dict[str, Any]], target: Path) -> str:
    """The override that names other rows over the same pictures."""
    target.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"{BASIC}.dataset={target}"


# --- what is in them -------------------------------------------------------------------------------------------------


def range_of_models(frames: list[Image.Image]) -> torch.Tensor:
    """(1, 3, T, H, W) in -1..1."""
    pixels = np.stack([np.asarray(frame.convert("RGB")) for frame in frames])
    return torch.from_numpy(pixels).permute(3, 0, 1, 2)[None] / 127.5 - 1


def flux_features(pipe: Any, frames: list[Image.Image], caption: str) -> dict[str, torch.Tensor]:
    vae = pipe.vae
    latents = vae.encode(range_of_models(frames)[:, :, 0]).latent_dist.mode()
    prompt, pooled, _ = pipe.encode_prompt(caption, None, max_sequence_length=24)
    latents = (latents - vae.config.shift_factor) * vae.config.scaling_factor
    return {"latents": latents[0], "prompt_embeds": prompt[0], "pooled_prompt_embeds": pooled[0]}


def wan_features(pipe: Any, frames: list[Image.Image], caption: str) -> dict[str, torch.Tensor]:
    vae, video = pipe.vae, range_of_models(frames)
    mean, std = (torch.tensor(n).view(1, -1, 1, 1, 1) for n in (vae.config.latents_mean, vae.config.latents_std))
    prompt, _ = pipe.encode_prompt(caption, do_classifier_free_guidance=False, max_sequence_length=24)
    found = {"latents": (vae.encode(video).latent_dist.mode() - mean) / std, "prompt_embeds": prompt}
    if pipe.config.get("image_encoder") not in (None, (None, None)):
        first = torch.cat([video[:, :, :1], torch.zeros_like(video[:, :, 1:])], dim=2)
        found["condition_latents"] = (vae.encode(first).latent_dist.mode() - mean) / std
        found["image_embeds"] = pipe.encode_image([frames[0].convert("RGB")], "cpu")
    return {name: value[0] for name, value in found.items()}


@pytest.mark.parametrize("family", ["flux", "t2v", "i2v"])
@torch.no_grad()
def test_features_are_those_of_the_pipelines_encoders(tmp_path: Path, family: str) -> None:
    yaml = make_tiny_generator_run(tmp_path, family)
    rows = lines(tmp_path / "rows.jsonl")
    outcome = run(yaml, out=tmp_path / "features", batch_size=3)
    assert (outcome.samples, outcome.skipped, outcome.kept) == (len(rows), 0, 0)
    adapter = find_adapter(tmp_path / "model")
    pipe = load_encoders(adapter, torch.device("cpu"))
    store = open_features(tmp_path / "features", adapter)
    check_provenance(store, adapter)
    bare = flux_features if family == "flux" else wan_features
    for index, row in enumerate(rows):
        captions = row["cap"] if isinstance(row["cap"], list) else [row["cap"]]
        assert store.records[index].path == row["path"]
        assert store.records[index].captions == tuple(captions)
        frames = [frame.copy() for frame in ImageSequence.Iterator(Image.open(tmp_path / row["path"]))]
        for number, caption in enumerate(captions):
            expected, found = bare(pipe, frames, caption), store.read(index, number)
            assert found.keys() == expected.keys()
            for name, value in found.items():
                wanted = expected[name][: len(value)] if name == "prompt_embeds" else expected[name]
                torch.testing.assert_close(value, wanted, rtol=1e-5, atol=2e-6)
                if name == "prompt_embeds":  # what is left out is padding that training puts back
                    assert not expected[name][len(value) :].any()
    empty = bare(pipe, frames, "")
    assert store.null_text is not None
    assert set(store.null_text) == {name for name in empty if "prompt" in name}
    for name, value in store.null_text.items():
        torch.testing.assert_close(value, empty[name][: len(value)] if name == "prompt_embeds" else empty[name])


def test_a_sample_does_not_depend_on_its_batch(prepared: Path) -> None:
    yaml, adapter = prepared / "run.yaml", find_adapter(prepared / "model")
    alone = prepared / "alone"
    run(yaml, out=alone, batch_size=1)
    one, many = open_features(alone, adapter), open_features(prepared / "features", adapter)
    assert [r.key for r in one.records] == [r.key for r in many.records]
    for index in range(len(one)):
        left, right = one.read(index, 0), many.read(index, 0)
        torch.testing.assert_close(left["latents"], right["latents"], rtol=0, atol=2e-6)
        assert torch.equal(left["prompt_embeds"], right["prompt_embeds"])


def test_ids_and_sizes_are_those_of_training_on_raw_media(prepared: Path) -> None:
    config = load_with_plugins(prepared / "run.yaml", [f"{BASIC}.features_dir=null"])
    from mindspeed_mm.fsdp.data import build_mm_dataset

    raw, _ = build_mm_dataset(config.arguments.data.dataset_param)
    store = open_features(prepared / "features", find_adapter(prepared / "model"))
    assert [raw.item(i, 0)["sample_id"] for i in range(len(raw))] == [record.key for record in store.records]
    assert raw.sizes == [record.size for record in store.records]


def test_batches_are_of_one_size_in_the_order_of_the_rows(prepared: Path) -> None:
    sizes = [record.size for record in open_features(prepared / "features", find_adapter(prepared / "model")).records]
    batches = plan_batches(sizes, 4)
    assert [batch.number for batch in batches] == list(range(len(batches)))
    assert sorted(row for batch in batches for row in batch.rows) == list(range(len(sizes)))
    assert [batch.rows[0] for batch in batches] == sorted(batch.rows[0] for batch in batches)
    assert all(sizes[row] == batch.size for batch in batches for row in batch.rows)
    assert {len(batch.rows) for batch in batches} == {4, 2}


# --- rows ------------------------------------------------------------------------------------------------------------


def test_same_named_media_and_repeated_rows(prepared: Path, tmp_path: Path) -> None:
    for name, color in (("a", "red"), ("b", "blue")):
        (tmp_path / name).mkdir()
        Image.new("RGB", (16, 16), color).save(tmp_path / name / "clip.png")
    rows = [{"path": f"{name}/clip.png", "cap": "x"} for name in ("a", "b", "a")]
    override = rewrite_rows(prepared, rows, tmp_path / "rows.jsonl")
    with pytest.warns(UserWarning, match="1 of 3 rows repeats another"):
        outcome = run(prepared / "run.yaml", override, f"{BASIC}.dataset_dir={tmp_path}", out=tmp_path / "out")
    assert outcome.samples == 3
    red, blue, again = lines(tmp_path / "out" / "index.jsonl")
    assert red["key"] == again["key"] != blue["key"]
    assert red["shard"] == again["shard"]
    store = open_features(tmp_path / "out", find_adapter(prepared / "model"))
    assert torch.equal(store.read(0, 0)["latents"], store.read(2, 0)["latents"])
    assert not torch.equal(store.read(0, 0)["latents"], store.read(1, 0)["latents"])
    held = [name for span in FeatureFolder(tmp_path / "out").shards() for name in read_facts(span.path)[1]]
    assert sum(name.endswith("/latents") for name in held) == 2


@pytest.fixture
def with_bad_rows(prepared: Path, tmp_path: Path) -> tuple[str, ...]:
    """Of twelve rows one has a broken picture, one none at all."""
    shutil.copytree(prepared / "pictures", tmp_path / "pictures")
    os.truncate(tmp_path / "pictures" / "3.png", 200)
    (tmp_path / "pictures" / "7.png").unlink()
    return (f"{BASIC}.dataset_dir={tmp_path}", f"{BASIC}.max_bad_fraction=0.2")


def test_bad_rows_are_skipped_and_listed(prepared: Path, tmp_path: Path, with_bad_rows: tuple[str, ...]) -> None:
    out = tmp_path / "out"
    outcome = run(prepared / "run.yaml", *with_bad_rows, out=out)
    assert (outcome.samples, outcome.skipped, outcome.kept) == (10, 2, 0)
    assert "2 rows were skipped" in outcome.sentence()
    missing, broken = lines(out / "skipped.jsonl")
    assert (missing["row"], missing["place"]) == (None, "rows.jsonl:8") and "not found" in missing["reason"]
    assert (broken["row"], broken["place"], broken["path"]) == (3, "rows.jsonl:4", "pictures/3.png")
    assert "broken" in broken["reason"]
    with pytest.raises(DataError, match="2 of 12 rows cannot be used"):  # found by whichever start
        run(prepared / "run.yaml", *with_bad_rows, f"{BASIC}.max_bad_fraction=0.01", out=out)
    again = run(prepared / "run.yaml", *with_bad_rows, out=out)
    assert (again.samples, again.skipped, again.kept) == (10, 2, 10)
    assert [row["place"] for row in lines(out / "index.jsonl")] == [
        f"rows.jsonl:{n}" for n in range(1, 13) if n not in (4, 8)
    ]


@pytest.mark.parametrize(
    ("override", "told"),
    [
        (f"{BASIC}.on_bad_sample=error", r"rows\.jsonl:4.*'pictures/3\.png' is broken.*skip"),
        (f"{BASIC}.max_bad_fraction=0.01", r"2 of 12 rows cannot be used, more than 1\.0%"),
    ],
)
def test_too_many_bad_rows_stop_the_work(
    prepared: Path, tmp_path: Path, with_bad_rows: tuple[str, ...], override: str, told: str
) -> None:
    os.truncate(tmp_path / "pictures" / "4.png", 200)
    shutil.copy(prepared / "pictures" / "7.png", tmp_path / "pictures")
    with pytest.raises(DataError, match=told):
        run(prepared / "run.yaml", with_bad_rows[0], override, out=tmp_path / "out")
    assert not (tmp_path / "out" / "index.jsonl").exists()
    outcome = run(prepared / "run.yaml", *with_bad_rows, out=tmp_path / "out")  # more is allowed: it goes on
    assert (outcome.samples, outcome.skipped) == (10, 2)
    assert outcome.kept > 0


def test_latents_that_are_not_finite_are_bad(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = BatchEncoder._encode_media

    def overflowing(self: BatchEncoder, pixels: torch.Tensor) -> dict[str, torch.Tensor]:
        media = real(self, pixels)
        media["latents"][0, 0, 0, 0] = float("inf")
        return media

    monkeypatch.setattr(BatchEncoder, "_encode_media", overflowing)
    outcome = run(prepared / "run.yaml", f"{BASIC}.max_bad_fraction=1", out=tmp_path / "out")
    assert (outcome.samples, outcome.skipped) == (6, 6)
    assert "not finite" in lines(tmp_path / "out" / "skipped.jsonl")[0]["reason"]


def test_validation_rows_have_a_set_of_their_own(prepared: Path, tmp_path: Path) -> None:
    own = rewrite_rows(prepared, lines(prepared / "rows.jsonl")[:5], tmp_path / "val.jsonl").partition("=")[2]
    overrides = [f"{BASIC}.val_dataset={own}", f"{BASIC}.val_features_dir={tmp_path / 'val'}"]
    overrides.append(f"{BASIC}.features_dir={tmp_path / 'train'}")
    outcomes = extract.run(prepared / "run.yaml", overrides)
    assert [(outcome.out, outcome.samples) for outcome in outcomes] == [
        (str(tmp_path / "train"), 12),
        (str(tmp_path / "val"), 5),
    ]


# --- taken up again --------------------------------------------------------------------------------------------------


@pytest.fixture
def no_encoders(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def refuse(*_: Any) -> None:
        raise AssertionError("encoders are loaded although nothing is to be encoded")

    with monkeypatch.context() as patch:
        patch.setattr("mindspeed_mm.tasks.extract.feature_set.load_encoders", refuse)
        yield


@pytest.mark.edge("BU1")
def test_features_inside_the_folder_of_media(prepared: Path, tmp_path: Path) -> None:
    """They do not become data, for this command again or any other."""
    media = shutil.copytree(prepared / "pictures", tmp_path / "media")
    for path in media.glob("*.png"):
        path.with_suffix(".txt").write_text("a red box")
    words = (f"{BASIC}.dataset={media}", f"{BASIC}.features_dir={media / 'features'}")
    assert run(prepared / "run.yaml", *words).samples == 12
    assert run(prepared / "run.yaml", *words).kept == 12
    config = load_with_plugins(prepared / "run.yaml", words)
    raw = config.arguments.data.dataset_param.basic_parameters.model_copy(update={"features_dir": None})
    assert len(read_rows(raw)) == 12


@pytest.mark.usefixtures("no_encoders")
def test_what_is_done_is_kept(prepared: Path, features: Path) -> None:
    before = files(features)
    outcome = run(prepared / "run.yaml", out=features)
    assert (outcome.samples, outcome.kept, outcome.damaged) == (12, 12, ())
    assert files(features) == before


def test_what_is_damaged_is_made_again(prepared: Path, features: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = files(features)
    shards = FeatureFolder(features).shards()
    assert len(shards) > 2
    content = bytearray(shards[1].path.read_bytes())
    content[-9] ^= 4
    shards[1].path.write_bytes(content)
    shards[2].path.unlink()
    (features / "null-text.safetensors").write_bytes(b"")
    unnoticed = run(prepared / "run.yaml", out=shutil.copytree(features, features.with_name("copy")), verify="size")
    assert unnoticed.damaged == ()
    outcome = run(prepared / "run.yaml", out=features)
    assert outcome.damaged == (str(shards[1].path),)
    assert "have changed: it is extracted again" in capsys.readouterr().out
    assert 0 < outcome.kept < 12
    assert files(features) == before


def test_a_stop_that_was_asked_for(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = iter([False, False, True])
    with monkeypatch.context() as patch:
        patch.setattr(StopSignal, "requested", property(lambda self: next(asked)))
        with pytest.raises(StoppedAfterSave, match=r"stopped: \d of 12 samples are done\. Run the same command again"):
            run(prepared / "run.yaml", out=tmp_path / "out")
    assert len(FeatureFolder(tmp_path / "out").done()) == 2
    with pytest.raises(DataError, match="8 of 12 rows are missing"):
        open_features(tmp_path / "out", find_adapter(prepared / "model"))
    outcome = run(prepared / "run.yaml", out=tmp_path / "out")
    assert outcome.kept == 4
    assert files(tmp_path / "out") == files(prepared / "features")


def test_two_ranks_make_what_one_makes(prepared: Path, tmp_path: Path) -> None:
    assert run_ranks(2, extract_and_count, prepared / "run.yaml", tmp_path / "out") == [3, 3]
    assert files(tmp_path / "out") == files(prepared / "features")


def extract_and_count(yaml: Path, out: Path) -> int:
    """How many batches this rank encoded."""
    real, calls = BatchEncoder.__call__, list[int]()

    def counted(self: BatchEncoder, batch: Any) -> dict[str, torch.Tensor]:
        calls.append(batch.number)
        time.sleep(0.1 * int(os.environ["RANK"]))  # rank 0 is done first, and has to wait
        return real(self, batch)

    BatchEncoder.__call__ = counted  # type: ignore[method-assign]
    extract.run(yaml, out=out, **SMALL)
    return len(calls)


@pytest.mark.usefixtures("no_encoders")
def test_one_job_at_a_time(prepared: Path, features: Path) -> None:
    with RunFolder(features).lock("other"), pytest.raises(MachineError, match="features_dir  is in use by run other"):
        run(prepared / "run.yaml", out=features)


# --- something else --------------------------------------------------------------------------------------------------


def flip_a_weight(folder: Path, component: str) -> None:
    (path,) = (folder / component).glob("*.safetensors")
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("component", ["vae", "text_encoder", "text_encoder_2"])
def test_features_of_other_weights_are_refused(prepared: Path, features: Path, component: str) -> None:
    other = shutil.copytree(prepared / "model", features.parent / "other")
    flip_a_weight(other, component)
    model = f"model.model_name_or_path={other}"
    with pytest.raises(DataError, match=rf" {component} .*--overwrite|--overwrite.*\n.* {component} ") as begun:
        run(prepared / "run.yaml", model, out=features)
    assert len(begun.value.problems) == 1
    adapter = find_adapter(other)
    with pytest.raises(DataError, match="made by other weights") as caught:
        check_provenance(open_features(features, adapter), adapter)
    assert [problem.key for problem in caught.value.problems] == [component]
    if component == "vae":
        outcome = run(prepared / "run.yaml", model, out=features, overwrite=True)
        assert (outcome.samples, outcome.kept) == (12, 0)
        check_provenance(open_features(features, adapter), adapter)
        assert (features / "index.jsonl").read_bytes() == (prepared / "features" / "index.jsonl").read_bytes()


@pytest.mark.usefixtures("no_encoders")
def test_other_work_is_refused_by_name(prepared: Path, features: Path) -> None:
    before = files(features)
    with pytest.raises(DataError, match="dtype  not set then, bf16 now"):
        run(prepared / "run.yaml", out=features, dtype="bf16")
    with pytest.raises(DataError, match="batch_size  2 then, 3 now"):
        run(prepared / "run.yaml", out=features, batch_size=3)
    assert files(features) == before


def test_a_dtype_may_be_chosen(prepared: Path, tmp_path: Path) -> None:
    run(prepared / "run.yaml", out=tmp_path / "out", dtype="bf16")
    found = open_features(tmp_path / "out", find_adapter(prepared / "model")).read(0, 0)
    assert {value.dtype for value in found.values()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("overrides", "error", "told"),
    [
        ([f"{BASIC}.features_dir=null"], ConfigError, "no folder is given.*--out FOLDER"),
        (["model.model_name_or_path=null"], ConfigError, "no model"),
        (["model.model_name_or_path=model/vae"], ModelFolderError, "diffusers' layout"),
        ([f"{BASIC}.features_dir=pictures"], UsageError, "is not a folder of features"),
    ],
)
def test_what_cannot_be_extracted(
    prepared: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str], error: type[Exception], told: str
) -> None:
    monkeypatch.chdir(prepared)
    with pytest.raises(error, match=told):
        extract.run(prepared / "run.yaml", overrides)
    assert len(list((prepared / "pictures").iterdir())) == 12


def test_rows_of_other_models_have_no_features(prepared: Path, tmp_path: Path) -> None:
    config = generator_config(prepared, {})
    config["data"]["dataset_param"]["dataset_type"] = "huggingface"
    with pytest.raises(ConfigError, match="rows of 'huggingface' have no features to extract"):
        extract.run(write_yaml(tmp_path / "run.yaml", config))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({}, r"rows of 'internvlu' have no features to extract.*Go on with mm train: it encodes"),
        ({"features_dir": "features"}, r"Rows of dataset_type bagel or generation have it.* no features to extract"),
    ],
)
def test_what_to_do_where_there_are_no_features(change: dict[str, Any], told: str, tmp_path: Path) -> None:
    """Of a model that answers and draws, whose rows are read by a class that is built on BAGEL's."""
    (tmp_path / "config.json").write_text('{"model_type": "internvlu"}', encoding="utf-8")
    param = {"dataset_type": "internvlu", "basic_parameters": {"dataset": "rows.jsonl"} | change}
    config = {"model": {"model_name_or_path": str(tmp_path), "model_id": "internvlu"}, "data": {"dataset_param": param}}
    with pytest.raises(ConfigError) as raised:
        extract.run(write_yaml(tmp_path / "run.yaml", config))
    problems = "\n".join(map(str, (raised.value, *raised.value.problems)))
    assert re.search(told, problems, re.DOTALL), problems


# --- the disk --------------------------------------------------------------------------------------------------------


def test_a_full_disk_is_named_and_nothing_is_lost(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mindspeed_mm.fsdp.data.feature_store import writer

    real: Callable[..., None] = writer.write_feature_file

    def full_at_the_third(path: Path, *args: Any, **kwargs: Any) -> None:
        if path.name == "batch-000002.safetensors":
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        real(path, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(writer, "write_feature_file", full_at_the_third)
        with pytest.raises(MachineError, match=r"the disk is full \([\d.]+ GiB free\).*finished samples are kept"):
            run(prepared / "run.yaml", out=tmp_path / "out")
    assert run(prepared / "run.yaml", out=tmp_path / "out").kept >= 4
    assert files(tmp_path / "out") == files(prepared / "features")


@pytest.mark.usefixtures("no_encoders")
def test_too_little_room_is_seen_before_the_work(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mindspeed_mm.tasks.extract.limits.free_bytes", lambda path: 100)
    with pytest.raises(MachineError, match=r"the latents alone take .* are free"):
        run(prepared / "run.yaml", out=tmp_path / "out")


def test_too_little_room_for_all_is_warned_of(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("mindspeed_mm.tasks.extract.limits.free_bytes", lambda path: 20_000)
    run(prepared / "run.yaml", out=tmp_path / "out")
    assert "warning: " in capsys.readouterr().out
