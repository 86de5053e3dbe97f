"""Folders of media as people have them: any spelling of a suffix, formats that are not read, one caption for all, the
output of our own commands among the data, the layout of kohya's GUI."""

from __future__ import annotations

import io
import json
import tarfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mindspeed_mm.core.errors import DataError
from mindspeed_mm.core.media_geometry import MediaGeometry, MediaSize
from mindspeed_mm.fsdp.data.data_utils.rows.readers import open_reader
from mindspeed_mm.fsdp.data.data_utils.rows.sources import RowFormat, find_sources
from mindspeed_mm.fsdp.data.datasets.generation.raw_source import RawSource
from mindspeed_mm.fsdp.params.data_args import BasicParameters, DataEntry, PreprocessParameters
from tests.helpers.tiny_media import write_video

PICTURES = MediaGeometry(spatial_ratio=2, temporal_ratio=1, patch=(1, 2, 2), latent_channels=4, is_video=False)
CLIPS = MediaGeometry(spatial_ratio=2, temporal_ratio=4, patch=(1, 2, 2), latent_channels=4, is_video=True)


def picture(path: Path, caption: str | None = None, caption_suffix: str = ".txt") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = {".jfif": "JPEG", ".tif": "TIFF", ".tiff": "TIFF", ".avif": "AVIF", ".ppm": "PPM"}.get(path.suffix.lower())
    noise = np.random.default_rng(len(path.name)).integers(0, 255, (16, 16, 3), dtype=np.uint8)
    Image.fromarray(noise).save(path, kind)
    if caption is not None:
        path.with_suffix(caption_suffix).write_text(caption)


def source(dataset: Any, geometry: MediaGeometry = PICTURES, sizes: dict[str, Any] | None = None, **basic: Any) -> Any:
    entries = (dataset,) if isinstance(dataset, DataEntry) else dataset
    preprocess = PreprocessParameters(height=16, width=16, **(sizes or {}))
    return RawSource(BasicParameters(dataset=entries, **basic), preprocess, geometry)


def captions(found: Any) -> dict[str, tuple[str, ...]]:
    return {Path(str(row.place)).name: row.captions for row in found.rows}


@pytest.mark.edge("BN6")
class TestSuffixes:
    def test_what_pillow_opens_is_read(self, tmp_path: Path) -> None:
        names = ["a.tif", "b.tiff", "c.jfif", "d.avif", "e.TIF", "f.JPG", "g.ppm"]
        for name in names:
            picture(tmp_path / name, name)
        found = source(str(tmp_path))
        assert captions(found) == {name: (name,) for name in names}
        assert all(found.item(index, 0)["pixels"].shape == (3, 1, 16, 16) for index in range(len(names)))

    @pytest.mark.parametrize("name", ["b.heic", "b.HEIF", "b.jxl", "b.psd", "b.mpg"])
    def test_the_rest_is_counted_and_named(self, tmp_path: Path, name: str) -> None:
        picture(tmp_path / "set" / "a.png", "a")
        (tmp_path / "set" / name).write_bytes(b"\0" * 32)
        (tmp_path / "set" / "b.txt").write_text("b")
        with pytest.raises(
            DataError, match=rf"1 of 2 rows cannot be used(?s:.)*set/{name} .*files are not read.*Convert"
        ):
            source(str(tmp_path / "set"))
        found = source(str(tmp_path / "set"), on_bad_sample="skip", max_bad_fraction=0.5)
        assert list(captions(found)) == ["a.png"] and list(found.left_out) == [f"set/{name}"]
        (tmp_path / "set" / "b.txt").unlink()
        with pytest.raises(DataError, match=r"files are not read"):  # without a caption, too
            source(str(tmp_path / "set"))
        picture(tmp_path / "set" / "b.png", "b")
        assert list(captions(source(str(tmp_path / "set")))) == ["a.png", "b.png"]  # what b.png was made of

    def test_none_that_is_read(self, tmp_path: Path) -> None:
        for name in ("a.heic", "b.heic"):
            (tmp_path / name).write_bytes(b"\0")
            (tmp_path / name).with_suffix(".txt").write_text("x")
        with pytest.raises(DataError, match=r"none of the first 2 media can be used; .*'a.heic': .heic files are not"):
            source(str(tmp_path))

    def test_a_caption_without_a_medium_is_told(self, tmp_path: Path) -> None:
        picture(tmp_path / "set" / "a.png", "a")
        for name in ("b.txt", "c.caption", "d.txt", "e.txt"):
            (tmp_path / "set" / name).write_text("lost")
        told = r"4 text files have no picture or clip of the same name: set/b.txt, set/d.txt, set/e.txt …"
        with pytest.warns(UserWarning, match=told):
            assert len(source(str(tmp_path / "set"))) == 1

    def test_in_archives(self, tmp_path: Path) -> None:
        picture(tmp_path / "a.tiff")
        with tarfile.open(tmp_path / "x.tar", "w") as file:
            for name in ("a.tiff", "a.txt", "b.heic", "b.txt", "c.txt"):
                data = (tmp_path / name).read_bytes() if name == "a.tiff" else b"text"
                entry = tarfile.TarInfo(name)
                entry.size = len(data)
                file.addfile(entry, io.BytesIO(data))
        with pytest.warns(UserWarning, match="1 text file has no picture or clip of the same name: c"):
            found = source(str(tmp_path / "x.tar"), on_bad_sample="skip", max_bad_fraction=0.5)
        assert [row.captions for row in found.rows] == [("text",)]
        assert "'b.heic': .heic files are not read" in found.left_out["x.tar/b"]


@pytest.mark.edge("BR14")
class TestCaptionFiles:
    @pytest.mark.parametrize("suffix", [".TXT", ".Txt", ".CAPTION"])
    def test_in_any_case(self, tmp_path: Path, suffix: str) -> None:
        picture(tmp_path / "a.JPG", "a dog", suffix)
        assert captions(source(str(tmp_path))) == {"a.JPG": ("a dog",)}

    def test_which_of_several(self, tmp_path: Path) -> None:
        picture(tmp_path / "a.png", "first")
        for suffix in (".TXT", ".caption"):
            (tmp_path / "a").with_suffix(suffix).write_text("not this")
        assert captions(source(str(tmp_path))) == {"a.png": ("first",)}


def test_a_link_to_a_folder_of_media_is_told(tmp_path: Path) -> None:
    picture(tmp_path / "set" / "a.png", "a")
    picture(tmp_path / "more" / "inner" / "b.png", "b")
    (tmp_path / "set" / "linked").symlink_to(tmp_path / "more")
    with pytest.warns(UserWarning, match=r"linked' is a link to a folder: its media are not read"):
        assert captions(source(str(tmp_path / "set"))) == {"a.png": ("a",)}


@pytest.mark.edge("BR14")
def test_numbers_that_are_not_in_json_and_that_nobody_reads(tmp_path: Path) -> None:
    picture(tmp_path / "a.png")
    (tmp_path / "rows.jsonl").write_text('{"path": "a.png", "cap": "a", "score": NaN, "more": [-Infinity]}\n')
    assert len(source(str(tmp_path / "rows.jsonl"), dataset_dir=str(tmp_path))) == 1
    (tmp_path / "list.json").write_text('[{"path": "a.png", "cap": "a", "score": NaN}]')
    assert str(open_reader(tmp_path / "list.json").read(0)["score"]) == "nan"


@pytest.mark.edge("BR12")
class TestOneCaptionForAll:
    def test_the_trigger_word(self, tmp_path: Path) -> None:
        for name in ("a.png", "b.jpg"):
            picture(tmp_path / name)
        found = source(str(tmp_path), trigger_word="a photo of sks dog")
        assert set(captions(found).values()) == {("a photo of sks dog",)}
        picture(tmp_path / "b.jpg", "outside")  # one is captioned: the other's caption is missing
        with pytest.raises(DataError, match=r"a\.png .*there is no a\.txt beside it.*caption: TEXT"):
            source(str(tmp_path), trigger_word="sks")

    def test_the_caption_of_an_entry(self, tmp_path: Path) -> None:
        picture(tmp_path / "dog" / "a.png")
        picture(tmp_path / "dog" / "b.png", "a dog, outside")
        picture(tmp_path / "class" / "5_dogs" / "c.png")
        (tmp_path / "rows.jsonl").write_text('{"path": "dog/a.png"}\n{"path": "dog/b.png", "cap": "own"}\n')
        entries = (
            DataEntry(path=str(tmp_path / "dog"), caption="a photo of sks dog"),
            DataEntry(path=str(tmp_path / "class"), caption="a photo of a dog", prior=True),
            DataEntry(path=str(tmp_path / "rows.jsonl"), caption="of all"),
        )
        found = source(entries, dataset_dir=str(tmp_path))
        assert [row.captions[0] for row in found.rows] == [
            "a photo of sks dog", "a dog, outside", "a photo of a dog", "of all", "own",
        ]  # fmt: skip
        assert [row.is_prior for row in found.rows] == [False, False, True, False, False]
        assert found.repeats == [1, 1, 5, 1, 1]

    def test_the_trigger_word_is_not_of_the_class(self, tmp_path: Path) -> None:
        """Pictures of any dog, under the subject's word, would unlearn the subject."""
        picture(tmp_path / "dog" / "a.png")
        picture(tmp_path / "dogs" / "b.png", "a dog")
        entries = (DataEntry(path=str(tmp_path / "dog")), DataEntry(path=str(tmp_path / "dogs"), prior=True))
        found = source(entries, trigger_word="sks")
        assert [row.captions for row in found.rows] == [("sks",), ("a dog",)]

    def test_without_any_the_message_names_both_ways(self, tmp_path: Path) -> None:
        picture(tmp_path / "a.png")
        with pytest.raises(DataError, match=r"the medium has no caption.*caption: TEXT.*or trigger_word"):
            source(str(tmp_path))

    def test_is_for_generators(self, tmp_path: Path) -> None:
        (tmp_path / "rows.jsonl").write_text("{}\n")
        with pytest.raises(Exception, match=r"rows\.jsonl\.caption .*is for data of generators"):
            find_sources((DataEntry(path=str(tmp_path / "rows.jsonl"), caption="x"),), tmp_path, RowFormat())


@pytest.mark.edge("BU1")
class TestOurOwnOutput:
    @staticmethod
    def write_outputs(folder: Path) -> None:
        """Beginnings of what commands write, with tables, pictures and texts among them."""
        files = {
            "features/features.json": '{"format": "mindspeed-mm-features"}',
            "features/index.jsonl": "{}\n",
            "started/features.json": "",
            "started/skipped.jsonl": "{}\n",
            "run/run.json": '{"status": "", "exit_code": 0, "packages": {}}',
            "run/metrics.jsonl": "{}\n",
            "exported/model_index.json": "{}",
            "exported/vae/config.json": "{}",
            "cache/media_headers-2.json": "{}",
        }
        for name, content in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(content)
        picture(folder / "run" / "samples" / "iter_10" / "0.png", "drawn")

    def test_among_media(self, tmp_path: Path) -> None:
        picture(tmp_path / "a.png", "a")
        picture(tmp_path / "in" / "b.png", "b")
        self.write_outputs(tmp_path)
        assert captions(source(str(tmp_path))) == {"a.png": ("a",), "b.png": ("b",)}

    def test_among_media_without_captions(self, tmp_path: Path) -> None:
        picture(tmp_path / "a.png")
        self.write_outputs(tmp_path)
        assert captions(source(str(tmp_path), trigger_word="sks")) == {"a.png": ("sks",)}

    def test_among_tables(self, tmp_path: Path) -> None:
        (tmp_path / "in").mkdir()
        for name in ("b.jsonl", "in/a.jsonl"):
            (tmp_path / name).write_text("{}\n")
        self.write_outputs(tmp_path)
        (tmp_path / "cache" / "media_headers-2.json").unlink()
        (found,) = find_sources(str(tmp_path), tmp_path, RowFormat())
        assert found.files == (tmp_path / "b.jsonl", tmp_path / "in" / "a.jsonl")

    def test_a_folder_of_drawn_pictures_may_be_named(self, tmp_path: Path) -> None:
        self.write_outputs(tmp_path)
        assert captions(source(str(tmp_path / "run" / "samples"))) == {"0.png": ("drawn",)}


@pytest.mark.edge("BR20")
class TestKohyasRoot:
    @staticmethod
    def make(folder: Path) -> None:
        picture(folder / "img" / "10_sks dog" / "a.png")
        picture(folder / "model" / "sample" / "drawn.png")
        (folder / "log").mkdir()
        (folder / "log" / "settings.json").write_text("{}")

    def test_logs_and_models_are_no_data(self, tmp_path: Path) -> None:
        self.make(tmp_path)
        found = source(str(tmp_path))
        assert captions(found) == {"a.png": ("sks dog",)} and found.repeats == [10]

    def test_pictures_for_regularisation_are_not_like_others(self, tmp_path: Path) -> None:
        self.make(tmp_path)
        picture(tmp_path / "reg" / "1_dog" / "b.png")
        with pytest.raises(
            DataError, match=r"reg/1_dog holds regularisation pictures(?s:.)*prior: true.*prior_loss_we"
        ):
            source(str(tmp_path))
        entries = (DataEntry(path=str(tmp_path / "img")), DataEntry(path=str(tmp_path / "reg"), prior=True))
        assert [(row.captions[0], row.is_prior) for row in source(entries).rows] == [("sks dog", False), ("dog", True)]

    def test_no_repeats_is_left_out(self, tmp_path: Path) -> None:
        picture(tmp_path / "0_cat" / "a.png")
        picture(tmp_path / "1_dog" / "b.png")
        with pytest.warns(UserWarning, match="0_cat is left out: its name asks for 0 repeats"):
            assert captions(source(str(tmp_path))) == {"b.png": ("dog",)}


@pytest.mark.edge("BN14")
class TestOneFrame:
    def test_of_a_video_is_a_short_clip(self, tmp_path: Path) -> None:
        write_video(tmp_path / "a.mp4", [9], height=16, width=16)
        (tmp_path / "a.txt").write_text("a")
        with pytest.raises(DataError, match=r"has 1 frame at the rate of the clips, fewer than the 9 asked for"):
            source(str(tmp_path), CLIPS, {"num_frames": 9})
        found = source(str(tmp_path), CLIPS, {"num_frames": 9, "short_clips": "repeat"})
        assert found.sizes == [MediaSize(9, 16, 16)] and found.item(0, 0)["pixels"].shape == (3, 9, 16, 16)
        assert source(str(tmp_path), CLIPS).sizes == [MediaSize(1, 16, 16)]  # where each clip keeps its length

    def test_that_a_row_declares(self, tmp_path: Path) -> None:
        write_video(tmp_path / "a.mp4", [9], height=16, width=16)
        row = {"path": "a.mp4", "cap": "a", "num_frames": 1, "fps": 16, "height": 16, "width": 16}
        (tmp_path / "rows.jsonl").write_text(json.dumps(row))
        with pytest.raises(DataError, match=r"has 1 frame at the rate of the clips, fewer than the 9 asked for"):
            source(str(tmp_path / "rows.jsonl"), CLIPS, {"num_frames": 9}, dataset_dir=str(tmp_path))

    def test_of_a_picture_is_told(self, tmp_path: Path) -> None:
        picture(tmp_path / "a.png", "a")
        write_video(tmp_path / "b.mp4", [9] * 9, height=16, width=16)
        (tmp_path / "b.txt").write_text("b")
        told = "1 of 2 media is a picture, and clips of 9 frames are asked for: trained as one frame"
        with pytest.warns(UserWarning, match=told):
            assert [size.frames for size in source(str(tmp_path), CLIPS, {"num_frames": 9}).sizes] == [1, 9]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            source(str(tmp_path), CLIPS, {"num_frames": [1, 9]})
