"""The promises about every conversion's output, on small tensors and without a model."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mindspeed_mm.checkpoint.conversion import run
from mindspeed_mm.checkpoint.conversion.files import PtFile, SafetensorsFile
from mindspeed_mm.checkpoint.conversion.ledger import SourceLedger
from mindspeed_mm.checkpoint.conversion.manifest import MANIFEST
from mindspeed_mm.checkpoint.conversion.run import Conversion, convert
from mindspeed_mm.checkpoint.dcp_folder.writing import DcpFolder
from mindspeed_mm.checkpoint.lazy_tensor import Cast, Concatenated, LazyTensor, Sliced
from mindspeed_mm.checkpoint.safetensors_file import read_header
from mindspeed_mm.checkpoint.safetensors_folder import find_entries, open_weights
from mindspeed_mm.core.errors import CheckpointError, ConfigError, MachineError, ModelFolderError, UsageError
from tests.helpers.distributed import alone

TENSORS = {
    "up": torch.arange(12, dtype=torch.float32).reshape(4, 3),
    "down": torch.arange(6, dtype=torch.bfloat16).reshape(3, 2),
    "norm": torch.ones(3),
    "steps": torch.tensor(7),
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    save_file(TENSORS, folder / "model.safetensors")
    return folder


def halves(stored: dict[str, LazyTensor]) -> tuple[dict[str, LazyTensor], dict[str, LazyTensor]]:
    """`up` cut in two, `norm` in both, the rest in the first."""
    up = stored["up"]
    first = {"up": Sliced(up, 0, 0, 2), "norm": stored["norm"], "down": stored["down"], "steps": stored["steps"]}
    return first, {"up": Sliced(up, 0, 2, 2), "norm": stored["norm"]}


def test_two_files_hold_each_tensor_once_and_the_manifest_knows_their_sums(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    with open_weights(source) as stored:
        ledger = SourceLedger(stored, source)
        one, two = halves(dict(ledger.tensors))
        files = {
            "0/weights.pt": PtFile({"model": one}, {"checkpoint_version": 3.0}),
            "1.safetensors": SafetensorsFile(two),
        }
        done = convert(
            Conversion([source], [ledger], files, {"kind": "halves"}, times={"norm": 2}, texts={"a.json": "{}"}), target
        )
    loaded = torch.load(target / "0/weights.pt", weights_only=True)
    assert loaded["checkpoint_version"] == 3.0
    assert torch.equal(loaded["model"]["up"], TENSORS["up"][:2])
    assert loaded["model"]["up"].untyped_storage().nbytes() == 24
    assert torch.equal(load_file(target / "1.safetensors")["up"], TENSORS["up"][2:])
    manifest = json.loads((target / MANIFEST).read_text())
    assert manifest["layout"] == {"kind": "halves"}
    digest = hashlib.sha256(TENSORS["up"][2:].numpy().tobytes()).hexdigest()
    assert manifest["files"]["1.safetensors"]["up"] == {"dtype": "float32", "shape": [2, 3], "sha256": digest}
    assert (done.tensors, done.size_bytes) == (6, 4 * 12 + 2 * 6 + 2 * 4 * 3 + 8)
    assert (target / "a.json").read_text() == "{}"


def test_what_is_told_as_not_written_lies_in_the_source(source: Path, tmp_path: Path) -> None:
    """A key of `left_out` that is stored, and what a ledger knows beside its tensors; a key that is nowhere is not."""
    target = tmp_path / "target"
    with open_weights(source) as stored:
        ledger = SourceLedger(stored, source, {"optimizer": "is not part of the model"})
        kept = {key: tensor for key, tensor in ledger.tensors.items() if key != "steps"}
        files = {"model.safetensors": SafetensorsFile(kept)}
        left_out = dict.fromkeys(("steps", "angles"), "is computed")
        done = convert(Conversion([source], [ledger], files, {}, left_out=left_out), target)
    told = {"steps": "is computed", "optimizer": "is not part of the model"}
    assert done.left_out == told
    assert done.lines()[1:] == [f"not written: {key} ({why})" for key, why in told.items()]
    assert json.loads((target / MANIFEST).read_text())["left_out"] == told


def test_tensors_that_are_not_finite_are_reported(tmp_path: Path) -> None:
    """By whatever file they are written, in every type that has NaN or infinity; what is finite is not named."""
    bad = {
        "nan": torch.tensor([0.0, torch.nan]),
        "infinite": torch.tensor([[1.0], [-torch.inf]]).bfloat16(),
        "eight bits": torch.tensor([1.0, torch.nan]).to(torch.float8_e4m3fn),
    }
    good = TENSORS | {"eight finite bits": torch.ones(2).to(torch.float8_e5m2), "empty": torch.zeros(0)}
    source = tmp_path / "source"
    source.mkdir()
    save_file(bad | good, source / "model.safetensors")
    with open_weights(source) as stored:
        ledger = SourceLedger(stored, source)
        tensors = dict(ledger.tensors)
        own = {key: tensors.pop(key) for key in ("nan", "up")}
        files = {"a.pt": PtFile({"": own}), "b.safetensors": SafetensorsFile(tensors)}
        done = convert(Conversion([source], [ledger], files, {}), tmp_path / "target")
    assert sorted(done.not_finite) == sorted(bad)
    (line,) = [line for line in done.lines() if "NaN" in line]
    assert line.startswith("warning: NaN or infinity in nan, ") and "undamaged copy" in line


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: {**t, "up": Sliced(t["up"], 0, 0, 3)}, "up  is used in part: 9 of 12 elements"),
        (lambda t: {k: v for k, v in t.items() if k != "down"}, "down  is not used"),
        (lambda t: {**t, "again": t["up"]}, "up  is used more than once: 24 of 12 elements"),
    ],
)
def test_a_tensor_that_is_lost_or_used_twice_stops_the_conversion(
    source: Path, tmp_path: Path, change: object, words: str
) -> None:
    target = tmp_path / "target"
    with open_weights(source) as stored:
        ledger = SourceLedger(stored, source)
        made = change(dict(ledger.tensors))  # type: ignore[operator]
        with pytest.raises(ModelFolderError) as caught:
            convert(Conversion([source], [ledger], {"model.safetensors": SafetensorsFile(made)}, {}), target)
    assert words in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("given", [{"copies": [Path("config.json")]}, {"times": ["norm"]}, {"texts": "{}"}])
def test_arguments_that_are_no_mappings_are_refused_by_name(given: dict[str, Any]) -> None:
    (name,) = given
    with pytest.raises(ConfigError, match=rf"Conversion  {name}  is a \w+, and should be a mapping of names"):
        Conversion([], [], {}, {}, **given)


def test_a_key_may_not_be_written_into_two_shards(source: Path, tmp_path: Path) -> None:
    with open_weights(source) as stored:
        ledger = SourceLedger(stored, source)
        shard = SafetensorsFile(dict(ledger.tensors))
        conversion = Conversion(
            [source], [ledger], {"1.safetensors": shard, "2.safetensors": shard}, {}, dict.fromkeys(TENSORS, 2)
        )
        with pytest.raises(ModelFolderError, match=r"is written into 1\.safetensors and 2\.safetensors"):
            convert(conversion, tmp_path / "target")


def test_what_does_not_fit_on_the_disk_is_refused_before_anything_is_written(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "free_bytes", lambda path: 50)
    with open_weights(source) as stored:
        ledger = SourceLedger(stored, source)
        file = SafetensorsFile(dict(ledger.tensors))
        with pytest.raises(MachineError, match="80 bytes are needed, but only 50 are free"):
            convert(Conversion([source], [ledger], {"model.safetensors": file}, {}), tmp_path / "target")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_what_the_disk_changed_is_noticed_and_nothing_is_left(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Rotten(SafetensorsFile):
        def write(self, path: Path, note: object) -> None:
            super().write(path, note)  # type: ignore[arg-type]
            content = bytearray(path.read_bytes())
            content[-1] ^= 1
            path.write_bytes(content)

    with open_weights(source) as stored:
        ledger = SourceLedger(stored, source)
        file = Rotten(dict(ledger.tensors))
        with pytest.raises(CheckpointError, match="is not what was written"):
            convert(Conversion([source], [ledger], {"model.safetensors": file}, {}), tmp_path / "target")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_disk_that_fills_up_leaves_nothing_and_says_so(source: Path, tmp_path: Path) -> None:
    class Full(SafetensorsFile):
        def write(self, path: Path, note: object) -> None:
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device", str(path))

    with open_weights(source) as stored:
        ledger = SourceLedger(stored, source)
        conversion = Conversion([source], [ledger], {"model.safetensors": Full(dict(ledger.tensors))}, {})
        with pytest.raises(MachineError, match="the disk is full: 80 bytes are needed"):
            convert(conversion, tmp_path / "target")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("name", ["model.safetensors", "model.pt", "release"])
@alone
def test_a_file_that_may_not_grow_further_is_told_as_a_full_disk(name: str, tmp_path: Path) -> None:
    """In a process of its own, whose files may have 64 KiB; the system's answer is that of a quota or a full disk."""
    source = tmp_path / "source"
    source.mkdir()
    save_file({"w": torch.zeros(1 << 16)}, source / "model.safetensors")
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
    with open_weights(source) as stored:
        ledger = SourceLedger(stored, source)
        made = dict(ledger.tensors)
        kinds = {
            "model.safetensors": SafetensorsFile(made),
            "model.pt": PtFile({"model": made}),
            "release": DcpFolder(made),
        }
        with pytest.raises(MachineError, match="the disk is full: 262,144 bytes are needed"):
            convert(Conversion([source], [ledger], {name: kinds[name]}, {}), tmp_path / "target")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_header_whose_type_is_no_name_is_one_clear_error(tmp_path: Path) -> None:
    header = json.dumps({"w": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(ModelFolderError, match=r"'w' has the type \['F32'\], which is not a name"):
        read_header(tmp_path / "model.safetensors")


def test_files_that_are_closed_meanwhile_are_opened_again(tmp_path: Path) -> None:
    names = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    for number in range(3):
        save_file({f"t{number}": torch.full((2,), float(number))}, tmp_path / names[number])
    index = {f"t{number}": name for number, name in enumerate(names)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    with open_weights(tmp_path, most_bytes=8) as stored:
        read = [stored[f"t{number}"].read() for number in (0, 2, 1, 0)]
    assert [tensor.tolist() for tensor in read] == [[0.0, 0.0], [2.0, 2.0], [1.0, 1.0], [0.0, 0.0]]


@pytest.mark.parametrize("name", ["..", ".", "", "../other.safetensors", "folder"])
def test_an_index_that_names_no_file_of_the_folder_is_refused(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    (folder / "folder").mkdir(parents=True)
    save_file({"a": torch.ones(1)}, tmp_path / "other.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(ModelFolderError, match="but does not exist as a file here"):
        find_entries(folder)


def test_a_cast_and_a_join_are_written_as_they_read(source: Path, tmp_path: Path) -> None:
    with open_weights(source) as stored:
        ledger = SourceLedger(stored, source)
        made: dict[str, LazyTensor] = dict(ledger.tensors)
        made["wide"] = Cast(made.pop("down"), torch.float64)
        up = made.pop("up")
        made["swapped"] = Concatenated([Sliced(up, 0, 2, 2), Sliced(up, 0, 0, 2)], 0)
        conversion = Conversion([source], [ledger], {"m.safetensors": SafetensorsFile(made)}, {})
        convert(conversion, tmp_path / "t", stream=io.StringIO())
    found = load_file(tmp_path / "t/m.safetensors")
    assert torch.equal(found["wide"], TENSORS["down"].double())
    assert torch.equal(found["swapped"], TENSORS["up"][[2, 3, 0, 1]])
    assert torch.equal(found["steps"], TENSORS["steps"])


def in_place(source: Path, **options: bool) -> None:
    with open_weights(source) as stored:
        ledger = SourceLedger(stored, source)
        made = {f"new.{key}": tensor for key, tensor in ledger.tensors.items()}
        conversion = Conversion([source], [ledger], {"model.safetensors": SafetensorsFile(made)}, {"kind": "renamed"})
        convert(conversion, source, in_place=True, **options)


def test_in_place_keeps_the_original_beside_it(source: Path, tmp_path: Path) -> None:
    in_place(source)
    assert torch.equal(load_file(source / "model.safetensors")["new.up"], TENSORS["up"])
    assert torch.equal(load_file(tmp_path / "source.bak/model.safetensors")["up"], TENSORS["up"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "source.bak"]
    in_place(source)  # what a conversion wrote is converted again: the one original stays
    assert torch.equal(load_file(source / "model.safetensors")["new.new.up"], TENSORS["up"])
    assert torch.equal(load_file(tmp_path / "source.bak/model.safetensors")["up"], TENSORS["up"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "source.bak"]
    (source / "mine.txt").write_text("somebody's")
    with pytest.raises(UsageError, match="already exists, and the original is kept under this name"):
        in_place(source)
    assert (source / "mine.txt").exists()


def test_in_place_without_a_backup_leaves_the_new_folder_alone(source: Path, tmp_path: Path) -> None:
    in_place(source, keep_backup=False)
    in_place(source, keep_backup=False)
    assert set(load_file(source / "model.safetensors")) == {f"new.new.{key}" for key in TENSORS}
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
