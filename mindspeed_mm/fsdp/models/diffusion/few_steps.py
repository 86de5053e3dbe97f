"""How a student of few steps draws: its noise levels, and of clips its blocks of frames. It stands in the configuration
of the student's transformer, under a key that diffusers passes over, so that whoever samples from the folder finds it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Protocol

from mindspeed_mm.core.errors import DataError, ModelFolderError
from mindspeed_mm.core.json_file import JsonMapping, JsonObject

if TYPE_CHECKING:
    from mindspeed_mm.fsdp.params.argument import PosttrainArguments, TrainingArguments

FEW_STEPS = "_few_steps"
"""Key of `transformer/config.json`."""


@dataclass(frozen=True)
class FewSteps:
    """What a student was distilled to."""

    denoising_step_list: tuple[int, ...]
    """Noise levels before the shift, in thousandths: from 1000 down."""
    shift: float | str | None
    """Of the noise levels: a number, `resolution`, or None for that of the folder's scheduler."""
    guidance: float
    """What a transformer that takes guidance as an input is told."""
    num_frame_per_block: int | None = None
    """Latent frames that are drawn together; None: all."""
    context_noise: int = 0
    """Noise of finished blocks, in thousandths."""

    @classmethod
    def of_config(cls, config: JsonMapping, where: str) -> FewSteps | None:
        """What a transformer's configuration says; None: it is no student.

        Raises:
            ModelFolderError: It says something else than this version knows.
        """
        stored = config.get(FEW_STEPS)
        if stored is None:
            return None
        try:
            found = cls(**stored)
            # JSON has no tuples: a list would make the frozen entry unhashable and unequal to `of_run`'s.
            return cls(**{**asdict(found), "denoising_step_list": tuple(map(int, found.denoising_step_list))})
        except (TypeError, ValueError) as error:
            raise ModelFolderError(
                f"'{FEW_STEPS}' cannot be read: {error}", where=where, way_out="Export the student again."
            ) from error

    @classmethod
    def of_run(cls, training: TrainingArguments, posttrain: PosttrainArguments) -> FewSteps | None:
        """What a run distils its model to; None: it does not.

        Args:
            training: The `training` section.
            posttrain: The `posttrain` section.
        """
        dmd, diffusion = posttrain.dmd, training.diffusion
        if posttrain.method != "dmd":
            return None
        shift: float | str | None = dmd.timestep_shift
        if shift is None:
            shift = diffusion.shift
        return cls(dmd.denoising_step_list, shift, diffusion.guidance, dmd.num_frame_per_block, dmd.context_noise)

    def as_config(self) -> JsonObject:
        """The entry of a transformer's configuration that says this."""
        return {FEW_STEPS: asdict(self)}

    def levels(self, shift: float) -> tuple[float, ...]:
        """Noise levels of the steps, from 1 down: s u / (1 + (s − 1) u).

        Args:
            shift: s, of the size of the sample.
        """
        shares = [step / 1000 for step in self.denoising_step_list]
        return tuple(shift * share / (1.0 + (shift - 1.0) * share) for share in shares)

    def blocks(self, frames: int) -> list[tuple[int, int]]:
        """First latent frame of each block, and the one behind its last: whole blocks, in turn.

        Raises:
            DataError: The frames are no whole number of blocks.
        """
        # Without blocks, the clip is one block.
        size = self.num_frame_per_block or frames
        if frames % size:
            raise DataError(
                f"{frames} latent frames are no whole number of blocks of {size}",
                key="num_frames",
                way_out="Ask for whole blocks, or train with another posttrain.dmd.num_frame_per_block.",
            )
        return [(first, first + size) for first in range(0, frames, size)]


def few_steps_kept(few: FewSteps | None, method: str | None) -> str:
    """A sentence that warns of training a student as if it were none; empty where there is nothing to warn of.

    Args:
        few: Of the folder that training starts from.
        method: `posttrain.method`.
    """
    if few is None or method == "dmd":
        return ""
    steps = len(few.denoising_step_list)
    return (
        f"model.model_name_or_path is a student of {steps} steps, and is still drawn in {steps} steps without guidance "
        f"after this training, which does not train it for that: distil it again (posttrain.method: dmd), or remove "
        f"{FEW_STEPS} from transformer/config.json"
    )


class CausalModel(Protocol):
    """A transformer whose blocks of frames see the blocks before, through keys and values that are kept of them."""

    def opened(self) -> AbstractContextManager[None]:
        """Inside, one batch of samples is drawn; nothing is kept yet."""
        ...

    def block(self, first_frame: int, *, keeps: bool = False) -> AbstractContextManager[None]:
        """Inside, the transformer is called with the frames from this one on.

        Args:
            first_frame: Its number among the latent frames.
            keeps: Keep keys and values of the call for later blocks; gradients of the call lead there, too.
        """
        ...
