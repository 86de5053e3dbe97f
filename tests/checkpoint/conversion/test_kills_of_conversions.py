"""Kill -9 before the changes that a conversion makes to the disk: the source is as it was, the target is whole or not
there, and the same command finishes the work."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mindspeed_mm.checkpoint.conversion.files import SafetensorsFile
from mindspeed_mm.checkpoint.conversion.ledger import SourceLedger
from mindspeed_mm.checkpoint.conversion.run import Conversion, convert
from mindspeed_mm.checkpoint.dcp_folder.reading import DcpReader
from mindspeed_mm.checkpoint.fsdp.generic_dcp_converter import GenericDCPConverter
from mindspeed_mm.checkpoint.hf_folder import model_config
from mindspeed_mm.checkpoint.original.reading import open_generator
from mindspeed_mm.checkpoint.recognise import recognise
from mindspeed_mm.checkpoint.safetensors_folder import find_entries, open_weights
from mindspeed_mm.core import exchange
from mindspeed_mm.core.errors import MMError
from mindspeed_mm.fsdp.params.loader import load_config
from mindspeed_mm.fsdp.params.rules.path import check_paths
from tests.helpers.distributed import alone
from tests.helpers.kills import everything, killed_before_each_change

pytestmark = pytest.mark.edge("S2")

WEIGHT = torch.arange(6.0).reshape(2, 3)


def make_source(folder: Path, weight: torch.Tensor = WEIGHT) -> None:
    folder.mkdir(parents=True)
    save_file({"a.weight": weight}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")


def write(source: Path, target: Path) -> None:
    GenericDCPConverter().hf_to_dcp(source, target, overwrite=True)


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.slow)])
@alone
def test_a_distributed_checkpoint_is_the_older_one_or_the_newer_one_whole(tmp_path: Path, every: int) -> None:
    older, source = tmp_path / "older", tmp_path / "source"
    make_source(older)
    make_source(source, WEIGHT + 1)
    parent = tmp_path / "parent"
    target = parent / "dcp"
    made = tmp_path / "made" / "dcp"  # its name stands in it
    write(older, made)
    before = everything(source)
    seen = set()
    for change in killed_before_each_change(
        parent,
        lambda: shutil.copytree(made, target),
        lambda: write(source, target),
        lambda changes: [*range(0, changes - 1, every), changes - 1],
    ):
        held = DcpReader(target / "release").get_tensor("model.a.weight")
        assert torch.equal(held, WEIGHT) or torch.equal(held, WEIGHT + 1), change
        seen.add(torch.equal(held, WEIGHT))
        write(source, target)
        assert torch.equal(DcpReader(target / "release").get_tensor("model.a.weight"), WEIGHT + 1), change
        assert [path.name for path in parent.iterdir()] == ["dcp"], change
        assert everything(source) == before, change
    assert seen == {True, False}


def in_place(source: Path) -> None:
    with open_weights(source) as stored:
        ledger = SourceLedger(stored, source)
        made = {f"new.{key.removeprefix('new.')}": tensor for key, tensor in ledger.tensors.items()}
        files = {"model.safetensors": SafetensorsFile(made)}
        convert(Conversion([source], [ledger], files, {"kind": "renamed"}), source, in_place=True)


@pytest.mark.edge("BS3")
@pytest.mark.parametrize("has_exchange", [True, False])
@alone
def test_in_place_there_is_always_one_whole_folder_and_the_original_is_kept(has_exchange: bool, tmp_path: Path) -> None:
    """Where names cannot be exchanged, the same command heals and goes on, though its source has lost its name."""
    if not has_exchange:
        exchange.exchange = lambda one, other: False  # in a process of its own
    parent = tmp_path / "parent"
    seen = set()
    for change in killed_before_each_change(
        parent, lambda: make_source(parent / "source"), lambda: in_place(parent / "source")
    ):
        keys = stored_keys(parent / "source")
        assert keys or not has_exchange, change
        seen.add(keys)
        if keys != ("new.a.weight",):
            in_place(parent / "source")
        assert stored_keys(parent / "source") == ("new.a.weight",), change
        assert stored_keys(parent / "source.bak") == ("a.weight",), change
        assert sorted(path.name for path in parent.iterdir()) == ["source", "source.bak"], change
    assert seen == ({("a.weight",)} if has_exchange else {("a.weight",), ()})


def stored_keys(folder: Path) -> tuple[str, ...]:
    """Of its weights; none where it has lost its name."""
    path = folder / "model.safetensors"
    return tuple(load_file(path)) if path.exists() else ()


READERS: dict[str, Callable[[Path], object]] = {
    "mm convert, infer, export": recognise,
    "weights": find_entries,
    "a model folder": model_config,
    "a generator": lambda folder: open_generator(folder).__enter__(),
    "a path of a YAML": lambda folder: check_paths(load_config(yaml_of(folder)).arguments),
}


def yaml_of(folder: Path) -> Path:
    path = folder.with_name("run.yaml")
    path.write_text(f"model: {{model_name_or_path: {folder}}}\ntraining: {{train_iters: 1, lr: 0.1}}\n")
    return path


@pytest.mark.edge("BS3")
@alone
def test_whoever_reads_the_folder_next_restores_it(tmp_path: Path) -> None:
    exchange.exchange = lambda one, other: False  # in a process of its own
    for number, (reader, read) in enumerate(READERS.items()):
        parent = tmp_path / f"parent{number}"
        (change,) = killed_before_each_change(
            parent,
            lambda: make_source(parent / "source"),  # noqa: B023
            lambda: in_place(parent / "source"),  # noqa: B023
            lambda changes: [changes - 1],
        )
        assert not (parent / "source").exists(), change
        with suppress(MMError):
            read(parent / "source")
        assert stored_keys(parent / "source") == ("a.weight",), reader
        assert not (parent / "source.bak").exists(), reader
