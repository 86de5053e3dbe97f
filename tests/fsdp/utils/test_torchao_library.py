"""torchao is imported by those who ask for it, and by nobody else."""

from __future__ import annotations

import sys
from unittest import mock

import pytest

from mindspeed_mm.core.errors import MachineError
from mindspeed_mm.fsdp.utils.torchao_library import load_torchao


def test_without_it_there_is_one_error() -> None:
    with mock.patch.dict(sys.modules, {"torchao.optim": None}), pytest.raises(MachineError, match="lowbit") as error:
        load_torchao("optim", key="training.optimizer_state_dtype")
    assert "training.optimizer_state_dtype" in str(error.value)
