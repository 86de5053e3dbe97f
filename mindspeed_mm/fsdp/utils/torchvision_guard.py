"""Makes `import torchvision` work beside a CPU-only torch, where its compiled part cannot load.

Without it the import dies with `operator torchvision::nms does not exist`, and with it every processor of transformers
that touches images. Resizing and the transforms need no compiled code.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import PathFinder
from importlib.metadata import version

import torch

from mindspeed_mm.fsdp.utils.scipy_library import load_scipy_when_called
from mindspeed_mm.fsdp.utils.torchao_library import hide_torchao

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
"""What torchvision gives a fake implementation at import time, whether or not its operators are there."""

_declared: list[torch.library.Library] = []  # a Library takes its operators with it when it is collected


def ensure_torchvision() -> None:
    """Let `import torchvision` succeed beside a torch that it was not built for; call it before importing transformers,
    PEFT or diffusers.

    Resizing and the transforms work then; operators such as `nms` do not. Nothing is done where torchvision is absent,
    imported already, or healthy. Operators that this process has defined itself stay as they are.
    """
    if _declared or "torchvision" in sys.modules or _operators_load():
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    for schema in _SCHEMAS:
        if not _is_defined(schema.partition("(")[0]):
            library.define(schema)
    _declared.append(library)


def prepare_for_transformers() -> None:
    """What stands before our own imports of transformers: `ensure_torchvision`, a torchao that is not imported unless
    the configuration asks for it, and a scipy that is not before it is called."""
    hide_torchao()
    load_scipy_when_called()
    ensure_torchvision()


def clash() -> str | None:
    """One sentence if torchvision is built for another torch than the installed one, else None."""
    if not _declared and ("torchvision" in sys.modules or _operators_load()):
        return None
    return (
        f"torchvision {version('torchvision')} is built for another torch than {torch.__version__}; mm and its plugins "
        "work anyway, but your own scripts must call mindspeed_mm.ensure_torchvision() before they import "
        "transformers, peft or diffusers"
    )


def _is_defined(name: str) -> bool:
    try:
        getattr(torch.ops.torchvision, name)
    except AttributeError:
        return False
    return True


def _operators_load() -> bool:
    package = importlib.util.find_spec("torchvision")
    if package is None or not package.submodule_search_locations:
        return True  # absent: there is nothing to help, and who needs it says so
    compiled = PathFinder.find_spec("_C", list(package.submodule_search_locations))
    if compiled is None or compiled.origin is None:
        return False
    try:
        torch.ops.load_library(compiled.origin)  # as torchvision itself does, and harmless when done twice
    except (ImportError, OSError):
        return False
    return True
