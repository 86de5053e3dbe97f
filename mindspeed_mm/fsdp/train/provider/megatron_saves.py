"""`--ckpt-format torch`: beside each checkpoint, Megatron's files for the ranks of the flags."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mindspeed_mm.checkpoint.common.config import CommonModelConfig, ParallelConfig
from mindspeed_mm.checkpoint.conversion.run import Writing
from mindspeed_mm.checkpoint.hf_folder import model_config
from mindspeed_mm.checkpoint.layout import list_iterations, write_tracker
from mindspeed_mm.checkpoint.megatron.families import family_of
from mindspeed_mm.checkpoint.ptd.conversions import hf_to_megatron
from mindspeed_mm.core.errors import MMError
from mindspeed_mm.core.folder_writing import remove_written
from mindspeed_mm.core.model_kinds import GENERATOR_INDEX
from mindspeed_mm.fsdp.distributed.pipeline.plan import StagePlan
from mindspeed_mm.fsdp.params.argument import Arguments
from mindspeed_mm.fsdp.params.sizes.parallel import ParallelSizes


class MegatronSaves:
    """Writes `<save>_megatron/iter_0000123/release/mp_rank_…/model_optim_rng.pt` of the Hugging Face folder that was
    saved at the same step, and the tracker that names the newest; what belongs to a checkpoint that was deleted is
    deleted too. `--load` takes `<save>_megatron`, or a step of it, weights alone: a run is resumed from its own
    checkpoints. It lies beside the run folder, in which no conversion may
    write.

    Args:
        save: The run folder.
        division: How the weights are divided.
    """

    def __init__(self, save: Path, division: ParallelConfig) -> None:
        self._save, self._division = save, division
        self._home = save.with_name(f"{save.name}_megatron")

    def __call__(self, folder: Path) -> None:
        """Write the layout of one folder; the first rank does.

        Raises:
            MMError: The weights cannot be divided so.
        """
        self._home.mkdir(exist_ok=True)
        target = self._home / folder.name
        hf_to_megatron(
            family_of(model_config(folder), str(folder)),
            folder,
            target,
            self._division,
            facts=CommonModelConfig(),
            writing=Writing(overwrite=True, verify=False),  # training waits; the folder itself was checked
        )
        for old in self._home.glob("iter_*"):
            if old != target and not (self._save / old.name).is_dir():
                remove_written(old)
        write_tracker(self._home, max(list_iterations(self._home)))


def why_not(arguments: Arguments) -> str:
    """Why a run cannot write Megatron's layout; empty where it can."""
    folder = arguments.model.model_name_or_path
    if arguments.training.save is None:
        return "nothing is saved"
    if folder is None:
        return "the model has no folder, which names its family"
    if arguments.training.lora.enable:
        return "adapters are saved alone"
    if (Path(folder) / GENERATOR_INDEX).is_file():
        return "mm-convert mm_to_hf and resplit read a generator's run as it is"
    try:
        family_of(model_config(Path(folder)), str(folder))
    except MMError as error:
        return str(error)
    return ""


def division_of(sizes: ParallelSizes, stages: StagePlan | None, folder: Path) -> ParallelConfig:
    """How a run's own plan divides the weights: towers lie on the first stage.

    Args:
        sizes: Of the parallel groups.
        stages: Of a pipeline.
        folder: Of the model.
    """
    if stages is None:
        return ParallelConfig(tp_size=sizes.tp, ep_size=sizes.ep)
    config = model_config(folder)
    depths = family_of(config, str(folder)).model(config).depths
    laps = range(stages.stages // stages.ranks)
    text = []
    for lap in laps:
        own = range(lap * stages.ranks, (lap + 1) * stages.ranks)
        text.append([len(stages.layers_of(stage)) for stage in own])
    towers: dict[str, Any] = {}
    for tower, key in (("vision", "vit_pp_layers"), ("audio", "audio_pp_layers")):
        if tower in depths:
            first = [[0] * stages.ranks for _ in laps]
            first[0][0] = depths[tower]
            towers[key] = first
    return ParallelConfig(llm_pp_layers=text, tp_size=sizes.tp, ep_size=sizes.ep, **towers)
