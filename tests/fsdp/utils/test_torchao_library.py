"""torchao is imported by those who ask for it, and by nobody else."""

from __future__ import annotations

import subprocess
import sys
from unittest import mock

import pytest

from mindspeed_mm.core.errors import MachineError
from mindspeed_mm.fsdp.utils.torchao_library import load_torchao

NOBODY = """
import sys
from mindspeed_mm.fsdp.utils.torchvision_guard import prepare_for_transformers
prepare_for_transformers()
import transformers.modeling_utils, transformers.quantizers, peft
loaded = [name for name, module in sys.modules.items() if name.split(".")[0] == "torchao" and module is not None]
assert not loaded, loaded[:3]
from mindspeed_mm.fsdp.utils.torchao_library import load_torchao
assert load_torchao("optim", key="").AdamW8bit
"""


def test_libraries_leave_it_alone_and_who_asks_gets_it() -> None:
    done = subprocess.run([sys.executable, "-c", NOBODY], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_without_it_there_is_one_error() -> None:
    with mock.patch.dict(sys.modules, {"torchao.optim": None}), pytest.raises(MachineError, match="lowbit") as error:
        load_torchao("optim", key="training.optimizer_state_dtype")
    assert "training.optimizer_state_dtype" in str(error.value)
