"""The processor of Step3-VL-10B: a picture becomes itself as a square, and crops of one size where it is large or
long."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from transformers import Step3p7ImageProcessor, Step3p7Processor
from transformers.image_utils import PILImageResampling, SizeDict


class StepVLImageProcessor(Step3p7ImageProcessor):
    """Step-3.7's layout of crops. A crop that reaches over the edge of its picture is filled up with black, as the
    released processor cuts it; Step-3.7's class stretches what lies inside."""

    def _get_image_patches(
        self, img: torch.Tensor, image_size: int, patch_size: int, resample: PILImageResampling
    ) -> tuple[torch.Tensor, list[torch.Tensor], int, int]:
        """(3, height, width) → the picture as a square, its crops row by row, and how many there are across and down.

        Args:
            img: Of one picture.
            image_size: Side of the square, in pixels.
            patch_size: Largest side of a crop before it is resized to this, in pixels.
            resample: How pixels are found between others.
        """
        whole, _, across, down = super()._get_image_patches(img, image_size, patch_size, resample)
        if not across:
            return whole, [], across, down
        height, width = img.shape[1:]
        plan = self._plan_patches(width, height, image_size, patch_size)
        size, (crop_width, crop_height), side, squared = plan[0], plan[1], plan[2], plan[-1]
        if squared:
            longest = max(width, height)
            img = self.pad([img], pad_size=SizeDict(height=longest, width=longest))[0]
        for wide, high in (size, (crop_width, crop_height)):  # as released: first the largest size, then the crops'
            img = self.resize(img[None], SizeDict(height=high, width=wide), resample=resample)[0]
        short = (0, across * side - crop_width, 0, down * side - crop_height)
        filled = torch.nn.functional.pad(img, short)
        crops = filled.unfold(1, side, side).unfold(2, side, side)  # (3, down, across, side, side)
        return whole, list(crops.permute(1, 2, 0, 3, 4).flatten(0, 1)), across, down


class Step3VLProcessor(Step3p7Processor):
    """Step-3.7's, which writes `<patch_start>…<patch_end>` for each crop, `<patch_newline>` behind a row of them, and
    `<im_start>…<im_end>` for the whole picture. The released code has the sizes of pictures in it, so that a folder
    without a file of them has those."""

    @classmethod
    def _get_arguments_from_pretrained(
        cls, pretrained_model_name_or_path: str, processor_dict: Mapping[str, object] | None = None, **kwargs: object
    ) -> list[object]:
        folder = Path(pretrained_model_name_or_path)
        if (folder / "preprocessor_config.json").is_file() or "image_processor" in (processor_dict or {}):
            return super()._get_arguments_from_pretrained(folder, processor_dict, **kwargs)  # type: ignore[no-any-return]
        return [StepVLImageProcessor(), cls._load_tokenizer_from_pretrained("tokenizer", folder, **kwargs)]
