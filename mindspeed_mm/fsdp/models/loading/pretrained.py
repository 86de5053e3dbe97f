"""Models that are loaded by transformers' own `from_pretrained`, all of whose weights have to be there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mindspeed_mm.core.errors import ModelFolderError
from mindspeed_mm.fsdp.models.loading.folder import check_all_loaded
from mindspeed_mm.fsdp.utils.quiet import quiet


def load_pretrained(model_class: Any, folder: Path, config: Any) -> Any:
    """The model of a folder in evaluation mode, on the CPU, in the type that its weights are stored in.

    Args:
        model_class: Of transformers, or made like one.
        folder: With the weights.
        config: The folder's, as `load_model_config` reads it.

    Raises:
        ModelFolderError: Weights are missing, left over or broken.
    """
    try:
        with quiet("transformers"):
            model, report = model_class.from_pretrained(
                folder, config=config, dtype="auto", local_files_only=True, output_loading_info=True
            )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        what, way_out = f"the model cannot be loaded: {first_line}", "Take the folder as it was published or exported."
        raise ModelFolderError(what, where=str(folder), way_out=way_out) from error
    check_all_loaded(report, folder)
    return model.eval()
