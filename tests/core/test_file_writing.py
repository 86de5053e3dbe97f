"""Places that a person names for an output: what cannot be written is refused, and nothing is left behind."""

from __future__ import annotations

import fcntl
import threading
from pathlib import Path

import pytest

from mindspeed_mm.core.drafts import draft_file
from mindspeed_mm.core.errors import MachineError, UsageError
from mindspeed_mm.core.file_writing import check_medium_file, check_output_place


@pytest.mark.parametrize("name", ["x.jsonl", "some/folder/x.jsonl"])
def test_a_place_is_tried_out(tmp_path: Path, name: str) -> None:
    check_output_place(tmp_path / name)
    check_output_place(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["/proc", "/proc/x.jsonl", "/proc/self/some/folder/x.jsonl"])
def test_a_place_that_takes_no_file_is_refused(name: str) -> None:
    with pytest.raises(MachineError, match=r"--out.*cannot be written"):
        check_output_place(Path(name), "--out")


def test_a_sound_takes_the_place_of_a_sound_alone(tmp_path: Path) -> None:
    sound, notes, folder = tmp_path / "a.wav", tmp_path / "notes", tmp_path / "b.wav"
    sound.write_bytes(b"RIFF\0\0\0\0WAVEfmt ")
    notes.write_text("mine")
    folder.mkdir()
    assert check_medium_file(sound, "WAV", [notes]) == sound.resolve()
    assert check_medium_file(tmp_path / "new" / "A.WAV", "WAV", []).name == "A.WAV"
    for path, says in (
        (sound, "is a file that the model is shown"),
        (notes, "did not write"),
        (folder, "is a folder"),
        (tmp_path / "a.mp3", "ends in '.mp3', and what is written is WAV"),
    ):
        with pytest.raises(UsageError, match=says):
            check_medium_file(path, "WAV", [tmp_path / "new" / ".." / "a.wav"], "--speak")
    assert sorted(tmp_path.iterdir()) == [sound, folder, notes]


def test_a_draft_that_another_process_takes_for_left_over_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the moment when a draft is there and the moment when it is locked, it looks like one of a killed
    process: another one may hold the lock, and take the file away a little later."""
    real, others = fcntl.flock, list[threading.Timer]()

    def late(descriptor: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", real)
        (seen,) = tmp_path.iterdir()
        held = seen.open("rb")
        real(held, fcntl.LOCK_EX)

        def remove() -> None:
            seen.unlink()
            held.close()

        others.append(threading.Timer(0.2, remove))
        others[0].start()
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    with draft_file(tmp_path) as draft:
        others[0].join()
        assert draft.exists()
