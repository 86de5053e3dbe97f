"""Pictures and clips that are drawn while a generator is trained reach TensorBoard's event files."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mindspeed_mm.fsdp.train.run.trackers import SwanLab, TensorBoard, TrackedRun, Tracker, Trackers
from mindspeed_mm.fsdp.train.run.trackers import Trackio as TrackioTracker
from mindspeed_mm.fsdp.utils import media_files
from mindspeed_mm.fsdp.utils.media_files import clip_gif, write_video


def coloured(path: Path, count: int = 8, fps: float = 4.0, height: int = 32, width: int = 48) -> Path:
    """A clip whose frame k has one colour, brighter with every frame."""
    frames = np.zeros((count, height, width, 3), dtype=np.uint8)
    frames += (np.arange(count, dtype=np.uint8) * (240 // count)).reshape(-1, 1, 1, 1)
    write_video(path, frames, fps)
    return path


def brightness(data: bytes) -> tuple[list[float], list[int]]:
    """Mean level of each frame of a GIF, and how long it is shown, in milliseconds."""
    levels, shown_ms = [], []
    with Image.open(io.BytesIO(data)) as picture:
        for number in range(getattr(picture, "n_frames", 1)):
            picture.seek(number)
            levels.append(float(np.asarray(picture.convert("RGB")).mean()))
            shown_ms.append(int(picture.info["duration"]))
    return levels, shown_ms


def test_pictures_are_in_the_event_file(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    Image.new("RGB", (6, 4), "red").save(tmp_path / "000_00_a.png")
    coloured(tmp_path / "001_00_b.mp4")
    said: list[str] = []
    trackers = Trackers({"tensorboard": TensorBoard()}, said.append)
    trackers.begin(TrackedRun("run", {}, tmp_path, 1))
    trackers.show({"samples/000_00_a": tmp_path / "000_00_a.png", "samples/001_00_b": tmp_path / "001_00_b.mp4"}, 7)
    trackers.log({"step": 8, "loss": 0.5})
    trackers.end(0)
    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    assert events.Tags()["images"] == ["samples/000_00_a", "samples/001_00_b"]
    (shown,) = events.Images("samples/000_00_a")
    assert (shown.step, shown.width, shown.height) == (7, 6, 4)
    assert shown.encoded_image_string == (tmp_path / "000_00_a.png").read_bytes()
    (clip,) = events.Images("samples/001_00_b")
    assert (clip.step, clip.width, clip.height) == (7, 48, 32)
    levels, shown_ms = brightness(clip.encoded_image_string)
    assert levels == pytest.approx([30.0 * number for number in range(8)], abs=3)
    assert sum(shown_ms) == 2000
    assert [each.value for each in events.Scalars("loss")] == [0.5]
    assert said == []


def test_a_long_clip_is_shown_whole_in_fewer_and_smaller_frames(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(media_files, "GIF_FRAMES", 4)
    monkeypatch.setattr(media_files, "GIF_SIDE", 24)
    data, width, height = clip_gif(coloured(tmp_path / "a.mp4", count=10, fps=5))
    assert (width, height) == (24, 16)
    levels, shown_ms = brightness(data)
    assert levels == pytest.approx([0, 72, 144, 216], abs=3)
    assert sum(shown_ms) == 2000


@pytest.mark.parametrize("kind", [SwanLab, TrackioTracker])
def test_what_other_trackers_are_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Tracker]) -> None:
    """By stand-ins for their libraries: the names of their classes are those of SwanLab 0.10 and Trackio 0.43."""
    logged: list[tuple[dict[str, Any], int]] = []
    library = SimpleNamespace(
        Image=lambda found: ("image", found),
        Video=lambda found: ("clip", found),
        log=lambda sent, step: logged.append((sent, step)),
        init=lambda **_: SimpleNamespace(log=lambda sent, step: logged.append((sent, step))),
    )
    monkeypatch.setitem(sys.modules, kind.package, library)
    picture, clip = tmp_path / "a.png", coloured(tmp_path / "b.mp4")
    Image.new("RGB", (6, 4), "red").save(picture)
    tracker = kind()
    tracker.begin(TrackedRun("run", {}, tmp_path, 1))
    tracker.show({"samples/a": picture, "samples/b": clip, "samples/b_sound": tmp_path / "b.wav"}, 7)
    ((sent, step),) = logged
    assert step == 7 and sent.keys() == {"samples/a", "samples/b"}
    assert sent["samples/a"] == ("image", str(picture))
    what, found = sent["samples/b"]
    assert what == "clip"
    if kind is SwanLab:  # its Video takes GIFs alone
        assert len(brightness(found.getvalue())[0]) == 8
    else:
        assert found == str(clip)
