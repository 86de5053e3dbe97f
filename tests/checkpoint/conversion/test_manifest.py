"""A converted folder is as it was written, or what is not is named; a manifest is not believed blindly."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mindspeed_mm.checkpoint.conversion.files import PtFile, SafetensorsFile, TensorRecord
from mindspeed_mm.checkpoint.conversion.ledger import SourceLedger
from mindspeed_mm.checkpoint.conversion.manifest import MANIFEST, check_converted, check_source
from mindspeed_mm.checkpoint.conversion.run import Conversion, convert
from mindspeed_mm.checkpoint.dcp_folder.writing import DcpFolder
from mindspeed_mm.checkpoint.safetensors_folder import open_weights
from mindspeed_mm.core.errors import CheckpointError, MMError

TENSORS = {"up": torch.arange(12.0).reshape(4, 3), "norm": torch.ones(3)}
RANKS = ("mp_rank_00", "mp_rank_01")
PT = "release/mp_rank_00/model_optim_rng.pt"


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder of each kind."""
    root = tmp_path_factory.mktemp("manifest")
    (root / "source").mkdir()
    save_file(TENSORS, root / "source/model.safetensors")
    (root / "config.json").write_text('{"rope_theta": 10000.0}')
    with open_weights(root / "source") as stored:
        for kind in ("hf", "dcp", "megatron"):
            ledger = SourceLedger(stored, root / "source")
            made = dict(ledger.tensors)
            files = {
                "hf": {"model.safetensors": SafetensorsFile(made)},
                "dcp": {"release": DcpFolder(made, {"head": "up"})},
                "megatron": {f"release/{rank}/model_optim_rng.pt": PtFile({"model": made}) for rank in RANKS},
            }[kind]
            texts = {"latest_checkpointed_iteration.txt": "release\n", "release/layout.json": '{"tp_size": 2}'}
            convert(
                Conversion(
                    [root / "source"],
                    [ledger],
                    files,
                    {"kind": kind},
                    times=dict.fromkeys(TENSORS, len(files)),
                    copies={"config.json": root / "config.json"} if kind == "hf" else {},
                    texts={} if kind == "hf" else texts,
                ),
                root / kind,
            )
    return {kind: root / kind for kind in ("hf", "dcp", "megatron")}


@pytest.fixture
def folders(converted: dict[str, Path], tmp_path: Path) -> dict[str, Path]:
    return {kind: Path(shutil.copytree(path, tmp_path / kind)) for kind, path in converted.items()}


def rewrite(file: Path, old: str, new: str) -> None:
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))


def with_tensor(file: Path) -> None:
    if file.suffix == ".pt":
        content = torch.load(file)
        content["model"]["extra"] = torch.ones(3)
        torch.save(content, file)
    else:
        save_file({**load_file(file), "extra": torch.ones(3)}, file)


def test_what_was_written_is_as_it_was_written(folders: dict[str, Path]) -> None:
    assert check_converted(folders["hf"]) == (2, 60)
    assert check_converted(folders["dcp"]) == check_converted(folders["dcp"] / "release") == (2, 60)
    assert check_converted(folders["megatron"]) == (4, 120)
    assert set(json.loads((folders["hf"] / MANIFEST).read_text())["written"]) == {"config.json", "model.safetensors"}


@pytest.mark.parametrize(
    ("kind", "damage", "words"),
    [
        ("hf", lambda f: rewrite(f / "config.json", "10000.0", "50000.0"), "config.json  is not what was written"),
        (
            "hf",
            lambda f: rewrite(f / "config.json", "10000.0", "9.0"),
            "config.json  has 19 bytes, and 23 were written",
        ),
        ("hf", lambda f: (f / "config.json").unlink(), "config.json  is missing"),
        ("hf", lambda f: with_tensor(f / "model.safetensors"), "model.safetensors  has "),
        ("hf", lambda f: save_file(TENSORS, f / "b.safetensors"), "b.safetensors  is there and was not written"),
        ("hf", lambda f: (f / "to").symlink_to("/etc/passwd"), "to  is there and was not written"),
        ("dcp", lambda f: (f / "latest_checkpointed_iteration.txt").unlink(), "iteration.txt  is missing"),
        ("dcp", lambda f: (f / "release/__1_0.distcp").write_text(""), "__1_0.distcp  is there and was not written"),
        ("megatron", lambda f: (f / "release/layout.json").unlink(), "release/layout.json  is missing"),
        ("megatron", lambda f: rewrite(f / "release/layout.json", "2", "1"), "layout.json  is not what was written"),
        ("megatron", lambda f: with_tensor(f / PT), f"{PT}  has "),
        ("megatron", lambda f: (f / PT).unlink(), f"{PT}  is missing"),
        ("megatron", lambda f: shutil.copytree((f / PT).parent, f / "release/mp_rank_02"), "mp_rank_02/model_optim"),
        ("megatron", lambda f: torch.save({"other": {}}, f / PT), "is missing"),
    ],
)
def test_damage_is_named(kind: str, damage: Callable[[Path], Any], words: str, folders: dict[str, Path]) -> None:
    damage(folders[kind])
    with pytest.raises(CheckpointError) as caught:
        check_converted(folders[kind])
    assert words in str(caught.value)


@pytest.mark.parametrize("kind", ["hf", "dcp", "megatron"])
def test_every_flipped_byte_of_a_small_folder_is_seen(kind: str, folders: dict[str, Path]) -> None:
    for file in [path for path in folders[kind].rglob("*") if path.is_file() and not path.name.startswith(".mind")]:
        if file.name == MANIFEST:
            continue
        held = bytearray(file.read_bytes())
        for place in range(0, len(held), max(1, len(held) // 7)):
            held[place] ^= 1
            file.write_bytes(held)
            with pytest.raises(MMError):
                check_converted(folders[kind])
            held[place] ^= 1
        file.write_bytes(held)
    check_converted(folders[kind])


def forge(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    content = json.loads((folder / MANIFEST).read_text())
    change(content)
    (folder / MANIFEST).write_text(json.dumps(content))


RECORD = {"dtype": "float32", "shape": [1], "sha256": "0" * 64}


def tensor(**values: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda content: content["files"][PT].update({"model/up": {**RECORD, **values}})


def files(name: str) -> Callable[[dict[str, Any]], Any]:
    return lambda content: content.update(files={name: {"up": RECORD}})


FORGED: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (tensor(dtype="nn"), "dtype 'nn', which torch does not know"),
    (tensor(dtype="float99"), "dtype 'float99'"),
    (tensor(dtype=1), "dtype 1"),
    (tensor(shape=[10**12, "x"]), "not a list of whole numbers"),
    (tensor(shape=[None]), "not a list of whole numbers"),
    (tensor(shape=[True]), "not a list of whole numbers"),
    (tensor(shape=[-1]), "not a list of whole numbers"),
    (tensor(shape="ab"), "not a list of whole numbers"),
    (tensor(shape=[math.inf]), "not a list of whole numbers"),
    (tensor(shape=[10**12, 10**12]), "more than there can be"),
    (tensor(shape=[2] * 10_000), "more than there can be"),
    (tensor(sha256=[]), "SHA-256 [], which is not one"),
    (tensor(sha256="0"), "SHA-256 '0'"),
    (lambda content: content["files"][PT].update({"model/up": 7}), "does not have dtype, shape and sha256"),
    (lambda content: content.update(files={}), "lists no files of weights"),
    (lambda content: content.update(files=[]), "files  is not the manifest of a conversion: is not a table"),
    (lambda content: content.pop("files"), "is not there"),
    (lambda content: content["files"].update({PT: {}}), "lists no tensors"),
    (lambda content: content.update(format="other"), "its format is 'other'"),
    (files("/etc/passwd"), "is not a name in this folder"),
    (files("../source/model.safetensors"), "is not a name in this folder"),
    (files("release/../../source/model.safetensors"), "is not a name in this folder"),
    (files(""), "is not a name in this folder"),
    (files("."), "is not a name in this folder"),
    (files("a\0b"), "is not a name in this folder"),
]
LISTS: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (lambda content: content["files"].pop(PT), "lists no tensors"),
    (lambda content: [content["files"].pop(PT), content["written"].pop(PT)], "is there and was not written"),
    (lambda content: content.pop("written"), "is not there"),
    (
        lambda content: content["written"].update({"../x": {"size_bytes": 1, "sha256": "0" * 64}}),
        "is not a name in this",
    ),
    (lambda content: content["written"].update({PT: {"size_bytes": "1", "sha256": None}}), "has the size '1'"),
    (lambda content: content["written"][PT].update(sha256=None), "needs a SHA-256"),
    (
        lambda content: content["files"].update({"release/mp_rank_00": {"up": RECORD}}),
        "has tensors, but is not a file that was written",
    ),
]


@pytest.mark.parametrize(("change", "words"), FORGED)
def test_a_forged_manifest_is_refused_by_verify_only_and_by_converting_again(
    change: Callable[[dict[str, Any]], Any], words: str, folders: dict[str, Path]
) -> None:
    forge(folders["megatron"], change)
    for check in (check_converted, check_source):
        with pytest.raises(CheckpointError) as caught:
            check(folders["megatron"])
        assert words in str(caught.value)


@pytest.mark.parametrize(("change", "words"), LISTS)
def test_a_list_of_files_that_does_not_fit_is_refused(
    change: Callable[[dict[str, Any]], Any], words: str, folders: dict[str, Path]
) -> None:
    forge(folders["megatron"], change)
    with pytest.raises(CheckpointError) as caught:
        check_converted(folders["megatron"])
    assert words in str(caught.value)


def test_every_type_of_torch_is_known(tmp_path: Path) -> None:
    for dtype in (torch.float8_e4m3fn, torch.complex128, torch.bool, torch.uint16, torch.bfloat16):
        record = TensorRecord.of(torch.zeros(2, 3, dtype=dtype))
        held = {"dtype": record.dtype, "shape": list(record.shape), "sha256": record.sha256}
        assert TensorRecord.read(json.loads(json.dumps(held))) == record
        assert record.size_bytes == 6 * dtype.itemsize
