"""Several files of an author are read as one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mindspeed_mm.checkpoint.original.reading import open_files
from mindspeed_mm.core.errors import ModelFolderError

LANGUAGE, NORM, SIGHT = torch.arange(6.0).reshape(2, 3), torch.ones(3), torch.arange(4, dtype=torch.bfloat16)


def test_safetensors_without_an_index_and_a_wrapped_pt_are_one(tmp_path: Path) -> None:
    save_file({"embed": LANGUAGE}, tmp_path / "lang_0.safetensors")
    save_file({"norm": NORM}, tmp_path / "lang_1.safetensors")
    torch.save({"epoch": 3, "net": {"patch": SIGHT}}, tmp_path / "sight.pt")
    with open_files(sorted(tmp_path.iterdir())) as stored:
        read = {key: tensor.read() for key, tensor in stored.items()}
    torch.testing.assert_close(read, {"embed": LANGUAGE, "norm": NORM, "net.patch": SIGHT}, rtol=0, atol=0)


def test_a_key_in_two_files_is_refused(tmp_path: Path) -> None:
    save_file({"norm": NORM}, tmp_path / "a.safetensors")
    torch.save({"model": {"norm": NORM}}, tmp_path / "b.pt")
    paths = sorted(tmp_path.iterdir())
    with pytest.raises(ModelFolderError, match=r"norm +lies in a\.safetensors and b\.pt"), open_files(paths):
        pass


def test_no_file_is_not_an_empty_model() -> None:
    with pytest.raises(ModelFolderError, match="no file of weights is named"), open_files([]):
        pass
