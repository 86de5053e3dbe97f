"""Pictures that are drawn while a generator is trained reach TensorBoard's event files."""

from __future__ import annotations

from pathlib import Path

from PIL import Image

from mindspeed_mm.fsdp.train.run.trackers import TensorBoard, TrackedRun, Trackers


def test_pictures_are_in_the_event_file(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    Image.new("RGB", (6, 4), "red").save(tmp_path / "000_00_a.png")
    (tmp_path / "001_00_b.mp4").write_bytes(b"a clip")
    said: list[str] = []
    trackers = Trackers({"tensorboard": TensorBoard()}, said.append)
    trackers.begin(TrackedRun("run", {}, tmp_path, 1))
    trackers.show({"samples/000_00_a": tmp_path / "000_00_a.png", "samples/001_00_b": tmp_path / "001_00_b.mp4"}, 7)
    trackers.log({"step": 8, "loss": 0.5})
    trackers.end(0)
    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    assert events.Tags()["images"] == ["samples/000_00_a"]
    (shown,) = events.Images("samples/000_00_a")
    assert (shown.step, shown.width, shown.height) == (7, 6, 4)
    assert shown.encoded_image_string == (tmp_path / "000_00_a.png").read_bytes()
    assert [each.value for each in events.Scalars("loss")] == [0.5]
    assert said == []
