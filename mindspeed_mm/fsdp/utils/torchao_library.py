"""The one door to torchao, which takes four seconds to import: it is opened only for those who ask.

transformers, diffusers and PEFT import it wherever it is installed, whether or not anything is quantised.
"""

from __future__ import annotations

import importlib
import os
import sys
from types import ModuleType

from mindspeed_mm.core.errors import MachineError
from mindspeed_mm.fsdp.utils.device import get_device_type

_NAME = "torchao"


def hide_torchao() -> None:
    """Let libraries that are imported from here on find no torchao, unless it is imported already.

    `None` in `sys.modules` is Python's own way to say that a module is not to be had.
    """
    sys.modules.setdefault(_NAME, None)  # type: ignore[arg-type]


def load_torchao(part: str = "", *, key: str) -> ModuleType:
    """torchao, or a module of it.

    Args:
        part: e.g. `optim` for `torchao.optim`.
        key: What the configuration asks for it with.

    Raises:
        MachineError: It is not installed, or has no such part.
    """
    if sys.modules.get(_NAME, _NAME) is None:
        del sys.modules[_NAME]
    if get_device_type() == "cpu":  # it would complain of each library of kernels that cannot be loaded
        os.environ.setdefault("TORCHAO_FORCE_SKIP_LOADING_SO_FILES", "1")
    name = f"{_NAME}.{part}" if part else _NAME
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MachineError(
            f"needs {name}, which cannot be imported: {error}",
            key=key,
            way_out="pip install 'mindspeed-mm[lowbit]'.",
        ) from error
