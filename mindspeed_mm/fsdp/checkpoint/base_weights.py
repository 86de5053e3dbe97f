"""A quick mark of the weights that a run's adapters stand on: they are in no checkpoint, so nobody else would notice
that other ones lie in their folder now."""

from __future__ import annotations

import hashlib
from pathlib import Path

from mindspeed_mm.checkpoint.megatron.folder import step_files
from mindspeed_mm.checkpoint.recognise import is_megatron_folder, recognise
from mindspeed_mm.checkpoint.safetensors_folder import weight_files
from mindspeed_mm.fsdp.models.diffusion.transformer import transformer_weights

_SAMPLES = 16
_SAMPLE_BYTES = 1 << 16


def told_weights(load: str | None) -> Path | None:
    """The folder that `training.load` names when it holds a model's weights; None when those of the model folder count.
    A run that trains adapters needs them again whenever it goes on."""
    folder = Path(load) if load else None
    if folder is None or not folder.is_dir():
        return None
    return folder if recognise(folder) in {"hf", "megatron"} else None


def base_weights_mark(folder: Path) -> str:
    """Sixteen hexadecimal digits that tell a model folder's weights: names and sizes of the files, and stretches of
    their content from beginning to end. Where the folder lies does not matter, nor does reading take long.

    Raises:
        ModelFolderError: There are no weights.
    """
    digest = hashlib.sha256()
    files = step_files(folder) if is_megatron_folder(folder) else weight_files(transformer_weights(folder))
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        with file.open("rb") as stream:
            for sample in range(_SAMPLES):
                stream.seek(max(0, size - _SAMPLE_BYTES) * sample // (_SAMPLES - 1))
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:16]
