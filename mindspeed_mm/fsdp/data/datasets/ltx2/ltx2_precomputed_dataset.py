"""Clips whose features Lightricks' trainer made, as MindSpeed-MM's files name them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mindspeed_mm.core.errors import ConfigError, Problem
from mindspeed_mm.core.json_file import JsonMapping
from mindspeed_mm.core.os_errors import with_home
from mindspeed_mm.fsdp.data.datasets.generation.generation_dataset import GenerationDataset
from mindspeed_mm.fsdp.data.feature_store import FeatureStore, PrecomputedFeatures, PrecomputedLayout
from mindspeed_mm.fsdp.models.diffusion.adapter import DiffusionAdapter
from mindspeed_mm.fsdp.params.data_args import BasicParameters, DatasetParam, PreprocessParameters
from mindspeed_mm.fsdp.utils.register import data_register

_SECTION = "data.dataset_param"
_FOLDERS = {"latents_dir": "latents", "conditions_dir": "conditions", "audio_latents_dir": "audio", "fps": "fps"}
"""Key → field of the layout."""
_NOISE = {"std": 1.0, "min_tokens": 1024, "max_tokens": 4096, "min_shift": 0.95, "max_shift": 2.05}
"""Of `shifted_logit_normal`: what the scheduler of the released folder says."""


@data_register.register("ltx2_precomputed")
@data_register.register("ltx2_3_precomputed")
class PrecomputedDataset(GenerationDataset):
    """Features in `dataset_dir`, for LTX-2 and 2.3.

    Args:
        basic_param: `dataset_dir`; `dataset` is a name, and nothing is done with it.
        preprocess_param: The model's folder.
        dataset_param: With further settings in `ltx2_dataset_custom` or `ltx2_3_dataset_custom`.

    Raises:
        DataError: Folders or files are off.
        ConfigError: Settings ask for what is set elsewhere.
    """

    is_deterministic = True

    def __init__(
        self, basic_param: BasicParameters, preprocess_param: PreprocessParameters, dataset_param: DatasetParam
    ) -> None:
        given: dict[str, Any] = {}
        for section in ("ltx2_dataset_custom", "ltx2_3_dataset_custom"):
            given |= dataset_param.get(section) or {}
        for name in (*_FOLDERS, "with_audio"):
            if basic_param.get(name) is not None:
                given[name] = basic_param[name]
        self._settings = given
        _check_noise(self._settings)
        if basic_param.dataset_dir is None:
            key = "data.dataset_param.basic_parameters.dataset_dir"
            raise ConfigError("is not given", key=key, way_out="Name the folder of the features.")
        folder = str(with_home(Path(basic_param.dataset_dir)))
        features = basic_param.model_copy(update={"features_dir": folder, "dataset": None})
        super().__init__(features, preprocess_param, dataset_param)

    def open_store(self, folder: Path, basic: BasicParameters, adapter: DiffusionAdapter) -> FeatureStore:
        """Open the features that Lightricks' trainer made. Raises `ConfigError` where `with_audio` contradicts
        `model.task`."""
        heard = self._settings.get("with_audio")
        if heard is not None and bool(heard) != (adapter.sound is not None):
            raise ConfigError(
                f"{str(heard).lower()}, but model.task is {adapter.task}",
                key=f"{_SECTION}.basic_parameters.with_audio",
                way_out=f"Set model.task: {'t2av' if heard else 't2v'}, or leave the key out.",
            )
        adapter.require("vae")
        layout = {field: self._settings[key] for key, field in _FOLDERS.items() if self._settings.get(key) is not None}
        return PrecomputedFeatures(folder, adapter, PrecomputedLayout(**layout))


def _check_noise(settings: JsonMapping) -> None:
    """Refuse settings of noise that differ from what `training.diffusion` does by default."""
    problems = []
    if settings.get("first_frame_conditioning_p"):
        problems.append(("first_frame_conditioning_p", "Set it to 0: no part of the samples is given its first frame."))
    if settings.get("timestep_sampling_mode", "shifted_logit_normal") != "shifted_logit_normal":
        problems.append(("timestep_sampling_mode", "Set training.diffusion.timestep_density: uniform, and shift: 1.0."))
    noise = settings.get("timestep_sampling_params") or {}
    if any(noise[name] != value for name, value in _NOISE.items() if name in noise):
        problems.append(("timestep_sampling_params", "Set training.diffusion: logit_mean, logit_std, shift."))
    if problems:
        found = [
            Problem(f"{settings[name]} is not read here", key=f"{_SECTION}.*.{name}", way_out=way_out)
            for name, way_out in problems
        ]
        raise ConfigError("noise is set in training.diffusion", problems=found)
