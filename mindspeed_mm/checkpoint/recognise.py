"""What kind of folder somebody gave to `load` or `export`, told by looking; no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from mindspeed_mm.checkpoint import layout
from mindspeed_mm.checkpoint.cosyvoice3_release import is_cosyvoice3_release
from mindspeed_mm.core.errors import CheckpointError, MMError
from mindspeed_mm.core.healing import heal_missing
from mindspeed_mm.core.model_kinds import EXPERT_PARTS
from mindspeed_mm.core.suggest import where_else
from mindspeed_mm.core.terminal import quoted

FolderKind = Literal["hf", "adapters", "dcp", "run", "megatron"]
"""`hf` is what a library's `from_pretrained` takes: a model of transformers, a generator in diffusers' layout, or its
transformer alone."""
Layout = Literal["hf", "dcp", "megatron", "diffusers", "original"]
"""What a conversion writes."""
WAYS: Mapping[str, tuple[Layout, ...]] = {
    "hf": ("dcp", "megatron"),
    "dcp": ("hf", "megatron"),
    "run": ("hf", "megatron"),
    "megatron": ("hf", "dcp", "megatron"),
    "generator": ("diffusers", "original", "megatron"),
    "gguf": ("hf",),
    "cosyvoice3": ("hf",),
}
"""Kind of a folder → what it is converted to; `generator`: its weights in any of these three layouts;
`cosyvoice3`: its release, of which `hf` is made and, with --to original, its language model again."""
DIST_SETTINGS, DIST_COMMON = "metadata.json", "common.pt"
"""In a folder of Megatron-Core's `dist_checkpointing`."""
_ADAPTERS = ("adapter_config.json", "pytorch_lora_weights.safetensors")


def told_ways() -> str:
    """Return the conversions in `WAYS` as one line of text for messages and help."""
    ways = [f"{kind} → {' or '.join(layouts)}" for kind, layouts in WAYS.items()]
    return f"{', '.join(ways)}; between others by way of hf"


def recognise(path: Path) -> FolderKind:
    """Tell a Hugging Face folder, adapters without a model, a distributed checkpoint, a run folder and Megatron's
    folders apart.

    Raises:
        CheckpointError: It is none of them, or is not there.
    """
    check_folder_exists(path)
    is_own = (path / layout.MANIFEST).exists()
    if not is_own and is_megatron_folder(path):
        return "megatron"
    if is_own or (path / layout.METADATA).exists():
        return "dcp"
    is_model = (path / "config.json").exists() or (path / "model_index.json").exists()
    has_tracker = (path / layout.TRACKER).exists() and not (is_model and any(path.glob("*.safetensors")))
    if layout.list_iterations(path) or has_tracker or (path / "run.json").exists():
        return "run"
    if is_model:
        return "hf"
    if any((path / part / name).exists() for part in ("", *EXPERT_PARTS) for name in _ADAPTERS):
        return "adapters"
    raise _unknown(path)


def is_gguf(path: Path) -> bool:
    """A file in llama.cpp's format, by its first four bytes."""
    try:
        with path.open("rb") as file:
            return file.read(4) == b"GGUF"
    except (OSError, ValueError):  # a name with a NUL byte is none
        return False


def is_megatron_folder(path: Path) -> bool:
    """A step of Megatron's here, or one in it."""
    for step in (path, *(layout.checkpoint_folder(path, n) for n in layout.list_iterations(path))):
        if is_megatron_step(step) or is_megatron_step(step / layout.RELEASE):
            return True
    return False


def is_megatron_step(path: Path) -> bool:
    """A folder with `mp_rank_*`, or one that `is_torch_dist`."""
    return path.is_dir() and (any(path.glob("mp_rank_*")) or is_torch_dist(path))


def is_torch_dist(path: Path) -> bool:
    """Written by Megatron-Core's `dist_checkpointing`: whole tensors with an index, and what says so beside them."""
    return (path / DIST_SETTINGS).is_file() and ((path / layout.METADATA).is_file() or (path / DIST_COMMON).is_file())


def check_folder_exists(path: Path, error: type[MMError] = CheckpointError) -> None:
    """Raise an error unless there is a folder, perhaps after a killed writer's swap was taken back.

    Args:
        path: What somebody named.
        error: The class to raise.
    """
    heal_missing(path)
    if path.is_dir():
        return
    if path.exists():
        raise error("is a file, not a folder", where=str(path), way_out="Name the folder that holds it.")
    raise error("does not exist", where=str(path), way_out=where_else(path))


def _unknown(path: Path) -> CheckpointError:
    if is_cosyvoice3_release(path):
        what = "is the release of CosyVoice3, of which a model folder is made"
        way_out = f"Make one: mm convert {quoted(path)} FOLDER."
    elif any(path.glob("global_step*")) or (path / "zero_to_fp32.py").exists():
        what = "is a DeepSpeed checkpoint"
        way_out = "Turn it into a Hugging Face folder with its own zero_to_fp32.py first."
    else:
        content = ", ".join(sorted(p.name for p in path.iterdir())[:5]) or "nothing"
        what = f"is neither a checkpoint nor a model folder: it holds {content}"
        way_out = (
            "Give a run folder, an iter_* folder in it, or a Hugging Face folder. Another layout needs a converter of "
            "your own: docs/conversion.md."
        )
    return CheckpointError(what, where=str(path), way_out=way_out)
