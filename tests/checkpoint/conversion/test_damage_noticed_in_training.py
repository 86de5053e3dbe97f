"""A bit that was flipped in a converted folder is named before a run starts from it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from mindspeed_mm.checkpoint.conversion.manifest import differences_of_share, read_records
from mindspeed_mm.fsdp.checkpoint.committed import verify_converted
from mindspeed_mm.fsdp.utils.ranks import Ranks
from tests.helpers.runs import mm
from tests.helpers.tiny_run import make_tiny_run


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's YAML, and its model as `megatron` of two ranks, `dcp` and `hf`."""
    folder = tmp_path_factory.mktemp("damage")
    make_tiny_run(folder)
    to = (
        ("model", "megatron", "megatron", "--tp", 2),
        ("model", "dcp", "dcp"),
        ("megatron", "hf", "hf", "--model", folder / "model"),
    )
    for source, target, layout, *words in to:
        said = mm("convert", folder / source, folder / target, "--to", layout, *words)
        assert said.code == 0, said.err
    return folder


def place_in(file: Path) -> int:
    """Of a byte of a tensor that no other rank holds a copy of; where there are no ranks, in the middle."""
    if file.suffix != ".pt":
        return file.stat().st_size // 2
    piece = torch.load(file, weights_only=True)["model"]["text_decoder.decoder.layers.0.mlp.linear_fc1.weight"]
    return file.read_bytes().index(bytes(piece.view(torch.uint8).flatten().tolist()))


def flip(file: Path, place: int) -> None:
    held = bytearray(file.read_bytes())
    held[place] ^= 1
    file.write_bytes(held)


@pytest.mark.parametrize(
    ("layout", "files"), [("megatron", "release/mp_rank_01/*.pt"), ("dcp", "release/*.distcp"), ("hf", "*.safetensors")]
)
def test_the_tensor_is_named_and_a_run_may_start_all_the_same(converted: Path, layout: str, files: str) -> None:
    (file,) = (converted / layout).glob(files)
    load = f"training.load={converted / layout}"
    words = ("train", converted / "run.yaml", load, "training.train_iters=1")
    said = mm(*words, f"training.save={converted / layout}-run")
    assert said.code == 0, said.err
    place = place_in(file)
    flip(file, place)
    try:
        said = mm(*words, f"training.save={converted / layout}-damaged")
        assert said.code == 4
        assert re.search(r"1 of what conversion_manifest\.json lists is not as it was written", said.err)
        assert re.search(r"\S+\.(weight|bias)  is not what was written", said.err)
        said = mm(*words, f"training.save={converted / layout}-anyway", "training.verify_checkpoint=size")
        assert said.code == 0, said.err
    finally:
        flip(file, place)


@pytest.mark.parametrize("layout", ["megatron", "hf"])
def test_ranks_share_the_reading_and_leave_nothing_out(
    converted: Path, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = converted / layout
    names = {(name, key) for name, found in read_records(folder).items() for key in found}
    seen: list[tuple[str, str]] = []

    def noted(root: Path, records: dict, files: dict, *, alone: bool) -> list:
        seen.extend((name, key) for name, found in records.items() for key in found)
        return []

    monkeypatch.setattr("mindspeed_mm.checkpoint.conversion.manifest.differences", noted)
    for part in range(3):
        before = len(seen)
        assert differences_of_share(folder, part, 3) == []
        assert len(seen) > before
    assert len(seen) == len(names) and set(seen) == names


def test_nothing_is_compared_where_nobody_asked_or_no_conversion_wrote(converted: Path) -> None:
    told: list[str] = []
    verify_converted(converted / "model", Ranks(), "hash", told.append, from_first_rank=False)
    verify_converted(converted / "hf", Ranks(), "size", told.append, from_first_rank=False)
    assert told == []
    verify_converted(converted / "hf", Ranks(), "hash", told.append, from_first_rank=True)
    assert told == [f"comparing {converted / 'hf'} with its checksums"]
