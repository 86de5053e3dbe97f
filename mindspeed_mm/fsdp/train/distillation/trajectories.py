"""Trajectories of a teacher from noise to a clean sample, drawn once: a causal student is fitted to them before it
learns from its own samples (CausVid, arXiv 2412.07772, section 4.3).

`mm posttrain reference` writes a file for each sample into a folder, and beside them what they were drawn with:
training refuses those of another teacher, guidance or grid. A file that is there is not drawn again.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import nn

from mindspeed_mm.checkpoint.safetensors_file import write_safetensors
from mindspeed_mm.core.artifacts import atomic_file, atomic_write_text, make_writable_folder
from mindspeed_mm.core.batch import Batch
from mindspeed_mm.core.errors import ConfigError, DataError
from mindspeed_mm.core.json_file import read_json_object
from mindspeed_mm.core.seeds import derive_seed
from mindspeed_mm.fsdp.checkpoint.base_weights import base_weights_mark, weights_folder_of_load
from mindspeed_mm.fsdp.loss.denoising import noise_of, real_rows, shift_sigma
from mindspeed_mm.fsdp.models.diffusion.adapter import LATENTS
from mindspeed_mm.fsdp.models.diffusion.few_steps import FewSteps
from mindspeed_mm.fsdp.models.diffusion.velocity import Denoiser, blank_text
from mindspeed_mm.fsdp.params.argument import ModelArguments, PosttrainArguments, TrainingArguments
from mindspeed_mm.fsdp.sampling.few_steps import student_shift

KEY = "posttrain.reference.path"
AGAIN = "Run mm posttrain reference with this configuration first."
_FOLDER, _FACTS, _STATES = "trajectories", "trajectories.json", "states"


def teacher_grid(few: FewSteps, steps: int, shift: float) -> tuple[list[float], list[int]]:
    """Noise levels of a trajectory, from 1 down to 0: `steps` even ones before the shift, and among them the student's;
    and the numbers of those that are kept: the student's, and the clean end.

    Args:
        few: The student's.
        steps: `posttrain.dmd.num_inference_steps`.
        shift: s, of the size of the sample.
    """
    # Fractions: the student's steps are looked up among the teacher's, which rounding would hide.
    own = [Fraction(step, 1000) for step in few.denoising_step_list]
    shares = sorted({*own, *(Fraction(left, steps) for left in range(steps + 1))}, reverse=True)
    kept = [*map(shares.index, own), len(shares) - 1]
    return [shift_sigma(float(share), shift) for share in shares], kept


@torch.no_grad()
def draw_trajectories(
    denoise: Denoiser, model: nn.Module, batch: Batch, start: torch.Tensor, levels: Sequence[float], kept: Sequence[int]
) -> torch.Tensor:
    """(B, kept, …): a sample at some levels, by Euler's steps of the flow from noise.

    Args:
        denoise: With the teacher's guidance.
        model: The teacher.
        batch: Text features; with guidance those of no prompt, too.
        start: (B, …) noise.
        levels: From 1 down to 0.
        kept: Numbers of those whose states are returned, rising.
    """
    x, states = start, [start]
    for level, following in itertools.pairwise(levels):
        time = torch.full((len(x),), level, dtype=x.dtype, device=x.device)
        # The model gives dx/dlevel, and levels fall.
        x = x + (following - level) * denoise(model, x, time, batch)
        states.append(x)
    return torch.stack([states[index] for index in kept], dim=1)


class TrajectoryFolder:
    """Files of trajectories, one for each sample and caption.

    Args:
        path: The folder.
        facts: What they are drawn with, in words that are compared.
    """

    def __init__(self, path: Path, facts: dict[str, str]) -> None:
        self.path, self._facts = path, facts

    @classmethod
    def of_run(
        cls, model: ModelArguments, training: TrainingArguments, posttrain: PosttrainArguments
    ) -> TrajectoryFolder:
        """That of a configuration.

        Raises:
            ConfigError: Nothing names it.
        """
        if posttrain.reference.path:
            return cls(Path(posttrain.reference.path), _facts_of(model, training, posttrain))
        if not training.save:
            raise ConfigError(
                "is not given, and neither is training.save, where the teacher's trajectories would be",
                key=KEY,
                way_out="Set training.save and run `mm posttrain reference`, or name the folder that it wrote.",
            )
        return cls(Path(training.save) / _FOLDER, _facts_of(model, training, posttrain))

    def check(self) -> None:
        """Compare what is there with the configuration.

        Raises:
            ConfigError: There is nothing, or it was drawn otherwise.
        """
        noted = self.path / _FACTS
        if not noted.is_file():
            raise ConfigError("there are no trajectories of the teacher", where=str(self.path), key=KEY, way_out=AGAIN)
        stored = read_json_object(noted, ConfigError, key=KEY)
        for name, fact in self._facts.items():
            if stored.get(name) != fact:
                values = ""
                if "." in name:  # a key; others are hashes
                    values = f" ({stored.get(name)}, and the run has {fact})"
                raise ConfigError(
                    f"the trajectories are of other {name}{values}",
                    where=str(self.path),
                    key=KEY,
                    way_out="Name another folder and run mm posttrain reference again.",
                )

    def open(self) -> None:
        """Make the folder, or go on with the one that is there. Raises `ConfigError` where it was drawn otherwise."""
        make_writable_folder(self.path)
        if (self.path / _FACTS).is_file():
            self.check()
        else:
            atomic_write_text(self.path / _FACTS, json.dumps(self._facts, indent=1) + "\n")

    def has(self, identity: str) -> bool:
        """Whether a sample's is there, whole."""
        try:
            with safe_open(self._file(identity), "pt") as opened:
                return _STATES in opened.keys()  # noqa: SIM118 - no mapping
        except (SafetensorError, OSError):
            return False

    def write(self, identity: str, states: torch.Tensor) -> None:
        """Keep those of one sample, (kept, …), whole or not at all."""
        with atomic_file(self._file(identity)) as draft:
            write_safetensors({_STATES: states.cpu().contiguous()}, draft)

    def read(self, identity: str, sample: str, shape: tuple[int, ...]) -> torch.Tensor:
        """(kept, …) of one sample.

        Args:
            identity: Of `identities`.
            sample: Its name, for errors.
            shape: (kept, …) that it should have.

        Raises:
            DataError: There is no such file, or it is damaged or of another size.
        """
        file = self._file(identity)
        if not file.is_file():
            raise DataError(
                "has no trajectory with this caption; of a sample with several, one caption is drawn",
                where=f"{sample} in {self.path}",
                key=KEY,
                way_out=AGAIN,
            )
        try:
            with safe_open(file, "pt") as opened:
                states: torch.Tensor = opened.get_tensor(_STATES)
        except (SafetensorError, OSError) as error:
            raise DataError(f"cannot be read: {error}", where=str(file), way_out=AGAIN) from error
        if tuple(states.shape) != shape:
            raise DataError(
                f"holds {tuple(states.shape)}, and the sample is {shape}",
                where=str(file),
                key=KEY,
                way_out="Name another folder and run mm posttrain reference again.",
            )
        return states

    def _file(self, identity: str) -> Path:
        return self.path / f"{identity}.safetensors"


def _facts_of(model: ModelArguments, training: TrainingArguments, posttrain: PosttrainArguments) -> dict[str, str]:
    dmd = posttrain.dmd
    own = posttrain.reference.model_name_or_path
    folder = own or weights_folder_of_load(training.load) or model.model_name_or_path
    facts = {}
    if folder is not None:
        facts["weights"] = base_weights_mark(Path(folder))
    for name in ("denoising_step_list", "timestep_shift", "guidance_scale", "negative_prompt", "num_inference_steps"):
        facts[f"posttrain.dmd.{name}"] = str(dmd[name])
    return facts | {"training.diffusion.shift": str(training.diffusion.shift)}


def identities(batch: Batch) -> list[str]:
    """What tells the samples of a batch apart, with their captions and what else they go on from: of features the
    numbers, without zeros behind; of raw rows the text, and the pixels beside the sample's own."""
    captions: Sequence[str] | None = batch.get("captions")
    if captions is None:
        told = sorted(key for key in batch if key != LATENTS)
    else:
        told = sorted(key for key in batch if key.startswith("pixels") and key != "pixels")
    found = []
    for row, sample in enumerate(batch["sample_ids"]):
        digest = hashlib.sha256(repr(str(sample)).encode())
        if captions is not None:
            digest.update(captions[row].encode())
        for key in told:
            value = batch[key]
            if isinstance(value, torch.Tensor):
                numbers = value[row].reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()
                if captions is None:  # features are padded to the longest of their batch
                    numbers = numbers.rstrip(b"\0")
                digest.update(numbers)
        found.append(digest.hexdigest()[:32])
    return found


class TrajectoryWriter:
    """Draws the trajectories of micro-batches that have none.

    Args:
        folder: Where they are kept.
        denoise: With the teacher's guidance.
        teacher: The model, sharded or not.
        training: The seed of the noise.
        posttrain: The student's steps, and the teacher's.
        encode: Raw batch → latents in the size of the sample, and text features.
        blank: Features of the prompt that guidance leads away from, of one sample.
        device: Of the teacher.
    """

    def __init__(
        self,
        folder: TrajectoryFolder,
        denoise: Denoiser,
        teacher: nn.Module,
        training: TrainingArguments,
        posttrain: PosttrainArguments,
        *,
        encode: Callable[[Batch], Batch],
        blank: dict[str, torch.Tensor] | None,
        device: torch.device,
    ) -> None:
        few = FewSteps.of_run(training, posttrain)
        assert few is not None
        self._folder, self._denoise, self._teacher, self._few = folder, denoise, teacher, few
        self._steps, self._seed = posttrain.dmd.num_inference_steps, training.seed
        self._encode, self._blank, self._device = encode, blank, device

    def __call__(self, batch: Batch) -> None:
        """Draw those of a micro-batch, unless all ranks have theirs. Called by every rank."""
        names = identities(batch)[: real_rows(batch)]
        # A sharded teacher runs on all ranks or on none.
        if not _on_any_rank(not all(map(self._folder.has, names))):
            return
        batch = dict(self._encode(batch))
        shape = tuple(batch[LATENTS].shape[1:])
        if self._blank is not None:
            rows = {key: value.expand(len(batch["sample_ids"]), *value.shape[1:]) for key, value in self._blank.items()}
            batch |= blank_text(rows)
        seeds = [derive_seed(self._seed, "trajectory", sample) for sample in batch["sample_ids"]]
        start = torch.stack([noise_of(seed, shape) for seed in seeds]).to(self._denoise.exact_dtype)
        there = {}
        for key, value in batch.items():
            there[key] = value.to(self._device) if isinstance(value, torch.Tensor) else value
        levels, kept = teacher_grid(self._few, self._steps, student_shift(self._denoise.adapter, self._few, shape))
        states = draw_trajectories(self._denoise, self._teacher, there, start.to(self._device), levels, kept)
        # Blank rows behind the real ones have no name: they are drawn and not kept.
        for name, of_sample in zip(names, states, strict=False):
            if not of_sample.isfinite().all():
                raise DataError("its trajectory is not finite", where=name, way_out="Look at the teacher's weights.")
            self._folder.write(name, of_sample)


def _on_any_rank(is_so: bool) -> bool:
    if not (dist.is_available() and dist.is_initialized()):
        return is_so
    everywhere: list[bool | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, is_so)
    return any(everywhere)
