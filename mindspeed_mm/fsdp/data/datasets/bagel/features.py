"""Features in the place of pictures that have latents: what a frozen VAE makes of each, computed once by `mm extract`.

A feature is the posterior, (2, C, h, w): latents are drawn from it in each epoch, as from pixels. It is found by what
it was made of, the bytes of the picture and the size that it was brought to: rows may come, go and be mixed, and a
picture that has changed has none.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import torch

from mindspeed_mm.core.errors import DataError
from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.fsdp.data.datasets.generation.rows import media_digest
from mindspeed_mm.fsdp.data.feature_store.description import check_components, measure_files
from mindspeed_mm.fsdp.data.feature_store.folder import FeatureFolder
from mindspeed_mm.fsdp.data.feature_store.reader import ShardedFeatureStore, read_finished
from mindspeed_mm.fsdp.models.diffusion.picture_vae import vae_files

TASK = "unify"
"""What `features.json` of such a set says of its task."""
FEATURES_KEY = "data.dataset_param.basic_parameters.features_dir"


def picture_key(picture: bytes, size: tuple[int, int]) -> str:
    """What a feature is found by.

    Args:
        picture: The bytes of its file.
        size: Height and width in pixels, as encoded.
    """
    return f"{media_digest(picture).hex()}-{size[0]}x{size[1]}"


class PictureFeatures:
    """A finished set. It may be handed to other processes.

    Args:
        path: `basic_parameters.features_dir`.
        model_folder: Of the model that is trained.

    Raises:
        DataError: The set is not finished, not of pictures, or another VAE made it.
    """

    def __init__(self, path: Path, model_folder: Path) -> None:
        files = FeatureFolder(path)
        description = read_finished(files)
        if description.task != TASK:
            raise DataError(
                f"holds features for {description.task} of {description.family}, not of pictures in rows",
                where=str(path),
                key=FEATURES_KEY,
                way_out="Run mm extract with this configuration into another folder.",
            )
        self._store = ShardedFeatureStore(files, description)
        self._numbers = {record.key: number for number, record in enumerate(self._store.records)}
        if own := vae_files(model_folder):
            now = measure_files(model_folder, {"vae": own}, description.components)
            check_components(self._store, description.components, now, model_folder)
        else:
            warnings.warn(
                f"{model_folder} lacks its VAE: it is not known whether the features in {path} were made by the same",
                stacklevel=2,
            )

    def posterior(self, picture: bytes, size: tuple[int, int]) -> torch.Tensor:
        """(2, C, h, w) of a picture of this height and width, see `PictureVAE.posterior`.

        Raises:
            DataError: There is none, or its file cannot be read.
        """
        number = self._numbers.get(picture_key(picture, size))
        if number is None:
            raise DataError(
                f"there are no features of this picture with {size[0]} × {size[1]} pixels in {self._store.folder}: the "
                "picture is new or has changed, or preprocess_parameters.vae_… are others",
                key=FEATURES_KEY,
                way_out="Run mm extract again: it adds what is missing. Or leave features_dir out.",
            )
        found: JsonObject = self._store.read(number, 0)
        posterior: torch.Tensor = found["latents"]
        return posterior
