"""`save_format: hf`: beside each checkpoint, what was trained as transformers, PEFT or diffusers load it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from mindspeed_mm.checkpoint.layout import checkpoint_folder, put_aside
from mindspeed_mm.core.folder_kinds import is_touched
from mindspeed_mm.core.folder_writing import remove_written
from mindspeed_mm.fsdp.checkpoint.adapters import save_adapters
from mindspeed_mm.fsdp.models.facts import facts_of
from mindspeed_mm.fsdp.train.family import Family, WholeSave
from mindspeed_mm.fsdp.utils.ranks import Ranks


class HuggingFaceSaves:
    """Writes `<save>/hf/iter_0000123`; a folder whose checkpoint was deleted is deleted too. Resuming takes the
    checkpoints: they hold the optimizer. Every rank makes one, and calls `save` at the same moment.

    It is a whole model; of a run that trains adapters the adapters alone, of a generator the transformer alone.

    Args:
        save: The run folder.
        assets_from: What the run started from: configuration, tokenizer and processor are copied.
        family: Knows how a whole model is written.
        dtype: Of the weights; None: as `assets_from` has them.
        timeout_s: Limit on each exchange between ranks.
        write_view: Adds to the folder how training looked at its rows.
        note: Tells the user.
        write_beside: Makes another layout of a folder that was written.
    """

    def __init__(
        self,
        save: Path,
        assets_from: Path,
        family: Family,
        dtype: torch.dtype | None,
        timeout_s: float,
        write_view: Callable[[Path], None] | None,
        note: Callable[[str], None],
        write_beside: Callable[[Path], None] | None = None,
    ) -> None:
        self._save, self._assets_from, self._family, self._dtype = save, assets_from, family, dtype
        self._write_view, self._note, self._write_beside = write_view, note, write_beside
        self._ranks = Ranks(timeout_s)

    def save(self, iteration: int, model: nn.Module) -> None:
        """Write the folder of this step.

        Raises:
            MMError: It could not be written, on all ranks alike.
        """
        folder = self._folder / checkpoint_folder(self._save, iteration).name
        self._ranks.first("making room", lambda: self._keep_what_is_not_ours(folder))
        self._write(model, folder)
        if (write_beside := self._write_beside) is not None:
            self._ranks.first("writing another layout", lambda: write_beside(folder))
        self._ranks.first("deleting old folders", lambda: self._prune(keep=folder))

    def _write(self, model: nn.Module, folder: Path) -> None:
        if facts_of(model).lora is not None:
            save_adapters(
                model,
                folder,
                self._assets_from,
                dtype=self._dtype,
                overwrite=True,
                ranks=self._ranks,
                write_view=self._write_view,
            )
            return
        save = WholeSave(folder, self._assets_from, self._dtype, self._ranks, self._write_view)
        self._family.save_model(model, save)

    @property
    def _folder(self) -> Path:
        return self._save / "hf"

    def _prune(self, keep: Path) -> None:
        for folder in self._folder.glob("iter_*"):
            if folder != keep and not (self._save / folder.name).is_dir():
                remove_written(folder)

    def _keep_what_is_not_ours(self, folder: Path) -> None:
        """A folder that somebody has put into, or changed, does not end a run that saves under its name."""
        if folder.is_dir() and is_touched(folder):
            self._note(put_aside(folder, "with files that no save has written, or that were changed since"))
