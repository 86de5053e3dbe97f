"""A data set from outside that keeps a file open: its worker processes would read each other's bytes."""

from __future__ import annotations

import io
import os
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.data import build_mm_dataloader
from mindspeed_mm.fsdp.data.dataset import as_mm_dataset
from mindspeed_mm.fsdp.data.open_files import check_keeps_no_file_open
from mindspeed_mm.fsdp.params.data_args import DataloaderParam

SPLIT = {"micro_batch_size": 2, "gradient_accumulation_steps": 1, "dp_rank": 0, "dp_size": 1, "seed": 0}


class Holder:
    """Samples that stand in something."""

    def __init__(self, held: object) -> None:
        self.held = held

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": [1, 2], "labels": [1, 2]}

    def collate_fn(self, samples: Any) -> dict[str, Any]:
        return {key: torch.tensor([sample[key] for sample in samples]) for key in samples[0]}


def archives(folder: Path) -> tuple[Path, Path]:
    member = folder / "a"
    member.write_bytes(b"a")
    with tarfile.open(folder / "x.tar", "w") as tar, zipfile.ZipFile(folder / "x.zip", "w") as packed:
        tar.add(member)
        packed.write(member)
    return folder / "x.tar", folder / "x.zip"


HELD: list[Callable[[Path, Path], object]] = [
    lambda tar, _: tarfile.TarFile(tar),
    lambda _, packed: zipfile.ZipFile(packed),
    lambda tar, _: {"x": tar.open("rb")},
    lambda tar, _: [tar.open("rb", buffering=0)],
]


@pytest.mark.parametrize("number", range(len(HELD)))
def test_an_open_file_is_refused_where_processes_read(tmp_path: Path, number: int) -> None:
    dataset = Holder(HELD[number](*archives(tmp_path)))
    alone, shared = (build_mm_dataloader(dataset, DataloaderParam(num_workers=count), **SPLIT) for count in (0, 1))
    assert len(next(iter(alone))[0]["sample_ids"]) == 2
    with pytest.raises(ConfigError, match=r"Holder keeps a file open in held; .*Open it where a sample is read"):
        next(iter(shared))


def test_what_processes_may_share_is_taken(tmp_path: Path) -> None:
    """Names, bytes in memory, closed files, and what stands under the number of the process that opened it."""
    tar, packed = archives(tmp_path)
    with tarfile.open(tar) as closed:
        pass
    for held in (tar, io.BytesIO(b"a"), closed, [closed], {os.getpid(): zipfile.ZipFile(packed)}, 3, None):
        check_keeps_no_file_open(as_mm_dataset(Holder(held)))
