"""Rollouts of generators: samples that the model itself draws along the path that trains, judged as pictures, and cut
into micro-batches of one step, or one noise level, of some samples. As what a sample is kept between drawing, judging
and training, stands first; what builds all this for a run, last.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from PIL import Image

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.core.json_file import JsonMapping, JsonObject
from mindspeed_mm.core.media_geometry import MediaSize
from mindspeed_mm.core.model_kinds import GENERATOR
from mindspeed_mm.core.seeds import derive_seed
from mindspeed_mm.fsdp.data.datasets.generation_prompts.prompt_dataset import DrawnPrompt, PromptDataset, PromptRow
from mindspeed_mm.fsdp.loss.denoising import noise_of
from mindspeed_mm.fsdp.loss.flow_objectives import RewardObjective
from mindspeed_mm.fsdp.loss.sde_steps import SdeStep, SdeSteps, TrainedWindow
from mindspeed_mm.fsdp.models.diffusion.latents import as_pil
from mindspeed_mm.fsdp.models.diffusion.velocity import Denoiser
from mindspeed_mm.fsdp.models.lora.switch import adapters_off
from mindspeed_mm.fsdp.optimizer.ema import MovingReference, OldPolicy
from mindspeed_mm.fsdp.params.argument import Arguments
from mindspeed_mm.fsdp.params.posttrain_args import PosttrainArguments
from mindspeed_mm.fsdp.params.rules.posttrain import has_moving_reference, reference_kind
from mindspeed_mm.fsdp.posttrain_rewards.registry import Judged, Reward, Row, names_and_weights, scores_of
from mindspeed_mm.fsdp.sampling.trajectories import SampleNoise, Trajectories, noise_grid, roll_out
from mindspeed_mm.fsdp.train.assemble import Assembled
from mindspeed_mm.fsdp.train.reference import assemble_reference, check_same_inputs, check_start
from mindspeed_mm.fsdp.train.rollouts.build import rewards_with_servers
from mindspeed_mm.fsdp.train.rollouts.flow_model import FlowModel, PromptFeatures, Switch
from mindspeed_mm.fsdp.train.run.data import RunData
from mindspeed_mm.fsdp.train.run.job import Job
from mindspeed_mm.fsdp.train.train_engine import move

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline


_THUMBNAIL_SIDE = 8


@dataclass
class FlowSample:
    """One sample of a rollout."""

    key: str
    """`rollout/prompt/member`: with the seed and the weights it decides everything else."""
    path: Trajectories | None = None
    """Its own row; None of a sample that was read from a file without: the same weights draw it again."""
    thumbnail: np.ndarray | None = None
    """Of its picture, once it was judged."""

    @property
    def rollout(self) -> int:
        """Number of the rollout that drew the sample, read from its key."""
        return int(self.key.partition("/")[0])

    def noise(self, seed: int, *, shares_start: bool) -> SampleNoise:
        """What chance decides of it."""
        prompt, _, member = self.key.rpartition("/")
        return SampleNoise(seed, prompt, int(member), shares_start)


# --- in a file --------------------------------------------------------------------------------------------------------


def packed_path(path: Trajectories) -> JsonObject:
    """A trajectory as JSON takes it, to the bit."""
    record: JsonObject = {"latents": _packed(path.latents)}
    for name, steps in path.by_step.items():
        record[name] = {}
        for index, tensor in steps.items():
            record[name][str(index)] = _packed(tensor)
    return record


def unpacked_path(record: JsonMapping) -> Trajectories:
    """Rebuild the trajectory that `packed_path` wrote, to the bit."""
    path = Trajectories(_unpacked(record["latents"]))
    for name, steps in path.by_step.items():
        for index, item in record[name].items():
            steps[int(index)] = _unpacked(item)
    return path


def _packed(tensor: torch.Tensor) -> list[object]:
    array = tensor.contiguous().numpy()
    return [str(array.dtype), list(array.shape), base64.b64encode(array.tobytes()).decode("ascii")]


def _unpacked(item: Sequence[Any]) -> torch.Tensor:
    dtype, shape, data = item
    array = np.frombuffer(base64.b64decode(data), dtype=dtype).reshape(shape)
    return torch.from_numpy(array.copy())  # a buffer of bytes cannot be written into


# --- in the log -------------------------------------------------------------------------------------------------------


def thumbnail(picture: Image.Image | list[Image.Image], side: int = _THUMBNAIL_SIDE) -> np.ndarray:
    """(side²,) grey levels of a picture, or of a clip's middle frame."""
    if isinstance(picture, list):
        picture = picture[len(picture) // 2]
    small = picture.convert("L").resize((side, side), Image.Resampling.BOX)
    return np.asarray(small, dtype=np.float64).reshape(-1)


def diversity(thumbnails_GMD: np.ndarray) -> float:
    """Mean distance between two samples of one prompt, root mean square of grey levels: 0 when a policy draws the same
    picture again and again.

    Args:
        thumbnails_GMD: (groups, members, numbers).
    """
    members = thumbnails_GMD.shape[1]
    if members < 2:
        return 0.0
    # Each pair of members once.
    one, other = np.triu_indices(members, k=1)
    gaps = thumbnails_GMD[:, one] - thumbnails_GMD[:, other]
    return float(np.sqrt(np.square(gaps).mean(axis=2)).mean())


# --- rollouts ---------------------------------------------------------------------------------------------------------

Items = TypeVar("Items", Sequence[FlowSample], Sequence[PromptRow], torch.Tensor)


class FlowRollouts:
    """Draws pictures or clips, has them judged and makes batches of them: a `RolloutSource`.

    Samples are drawn in the micro-batches in which they are trained, so that a step that is computed again, with the
    same weights, gives the same numbers to the bit.

    Args:
        generator: What draws.
        objective: What it is trained for.
        posttrain: The `posttrain` section.
        rewards: Judge the samples; one of weight 0 is a judge: it is logged, and nothing is learned from it.
        size: Of a sample.
        seed: `training.seed`.
        micro_batch_size: Samples that are computed at a time.
        shift: `training.diffusion.shift`.
    """

    def __init__(
        self,
        generator: FlowModel,
        objective: RewardObjective,
        posttrain: PosttrainArguments,
        rewards: Sequence[Reward],
        *,
        size: MediaSize,
        seed: int,
        micro_batch_size: int,
        shift: float | str | None = None,
    ) -> None:
        self._generator, self._objective, self._posttrain = generator, objective, posttrain
        self._rewards, self._seed, self._micro_batch_size = rewards, seed, micro_batch_size
        self.reward_names, self.reward_weights = names_and_weights(rewards)
        self._adapter, flow = generator.denoise.adapter, posttrain.flow
        self._shape = self._adapter.geometry.latent_shape(size)
        grid = noise_grid(self._adapter, self._shape, flow.num_inference_steps, shift)
        self._steps = SdeSteps(flow.sde, flow.noise_level, grid)
        self._draws_noise = posttrain.method == "grpo"
        self._window = TrainedWindow(
            flow.num_inference_steps,
            flow.window.size,
            flow.window.order,
            flow.window.iterations,
            flow.window.stride,
            flow.window.roll_back,
            flow.timestep_fraction,
            seed,
        )
        self._keeps_paths = posttrain.grpo.steps_per_generation * posttrain.grpo.num_iterations > 1
        self._features = PromptFeatures(generator)

    # --- drawing ------------------------------------------------------------------------------------------------------

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """See `RolloutSource`. The transformer stays as it is trained: nothing in it is random."""
        with torch.no_grad(), self._generator.old():
            yield

    def draw(self, prompts: Sequence[DrawnPrompt], keys: Sequence[str]) -> list[FlowSample]:
        """Draw one trajectory for each prompt, a micro-batch at a time. The noise of a sample depends on its key and on
        `training.seed`."""
        samples = [FlowSample(key) for key in keys]
        self._draw(prompts, samples)
        return samples

    def _draw(self, prompts: Sequence[DrawnPrompt], samples: Sequence[FlowSample]) -> None:
        """Compute the trajectory of each sample, one micro-batch at a time, and store it in the sample's `path`."""
        generator, shares_start = self._generator, self._posttrain.flow.same_noise
        for text, batch in zip(self._texts(prompts), self._cut(samples), strict=True):
            noise = [sample.noise(self._seed, shares_start=shares_start) for sample in batch]
            drawn = self._window.drawn(batch[0].rollout) if self._draws_noise else ()
            blank = text | {"latents": torch.zeros(len(batch), *self._shape)}
            path = roll_out(generator.denoise, generator.model, blank, self._steps, noise, drawn, generator.own)
            for row, sample in enumerate(batch):
                sample.path = path.of_row(row)

    def _cut(self, items: Items) -> list[Items]:
        """Split rows into consecutive micro-batches; the last one may be smaller."""
        size = self._micro_batch_size
        return [items[first : first + size] for first in range(0, len(items), size)]

    def _texts(self, prompts: Sequence[DrawnPrompt]) -> list[Batch]:
        """Features of each micro-batch's prompts."""
        rows = [prompt["prompt"] for prompt in prompts]
        self._features.remember(rows)
        return list(map(self._features.batch_of, self._cut(rows)))

    # --- judging ------------------------------------------------------------------------------------------------------

    def judge(self, prompts: Sequence[DrawnPrompt], samples: Sequence[FlowSample]) -> torch.Tensor:
        """See `RolloutSource`. Rewards are given PIL pictures, lists of them for clips."""
        pictures = self.decoded(samples)
        texts: list[str] = []
        rows: list[Row] = []
        ids: list[str] = []
        for prompt, sample, picture in zip(prompts, samples, pictures, strict=True):
            sample.thumbnail = thumbnail(picture)
            texts.append(prompt["prompt"].text)
            rows.append(prompt["prompt"].row)
            ids.append(sample.key)
        return scores_of(self._rewards, Judged(texts, pictures, rows, ids=ids))

    def decoded(self, samples: Sequence[FlowSample]) -> list[Image.Image | list[Image.Image]]:
        """A picture of each sample, or a list of them for a clip; decoded one by one."""
        found: list[Image.Image | list[Image.Image]] = []
        with self._generator.encoders_there():
            for sample in samples:
                assert sample.path is not None
                pixels = self._adapter.decode(self._generator.encoders, sample.path.latents.unsqueeze(0))[0]
                # (channels, frames, height, width) → frames in front.
                frames = as_pil(pixels.transpose(0, 1))
                found.append(frames[0] if len(frames) == 1 else frames)
        return found

    def facts(self, samples: Sequence[FlowSample]) -> dict[str, float]:
        """See `RolloutSource`: `diversity`, see the function of this name."""
        seen = [sample.thumbnail for sample in samples if sample.thumbnail is not None]
        if len(seen) < len(samples):
            return {"samples": 0.0}  # they were judged elsewhere or before: nothing is known of them
        by_group = np.stack(seen).reshape(-1, self._posttrain.grpo.num_generations, seen[0].size)
        return {"samples": float(len(samples)), "diversity": diversity(by_group) * len(samples)}

    # --- records ------------------------------------------------------------------------------------------------------

    def record(self, prompt: DrawnPrompt, sample: FlowSample) -> JsonObject:
        """See `RolloutSource`. States are kept where a rollout serves several steps: the weights of the later ones
        would not draw it again."""
        record = {
            "row": prompt["row"],
            "id": prompt["sample_id"],
            "prompt": prompt["prompt"].text,
            "sample": sample.key,
        }
        if self._keeps_paths and sample.path is not None:
            record["path"] = packed_path(sample.path)
        return record

    def restore(self, record: JsonMapping) -> FlowSample:
        """Rebuild the sample that `record` wrote; its `path` stays None where the record has no trajectory."""
        sample = FlowSample(record["sample"])
        if "path" in record:
            sample.path = unpacked_path(record["path"])
        return sample

    def take_metrics(self) -> dict[str, float]:
        """Return the objective's means for the log since the last call, on this rank."""
        return self._objective.take_metrics()

    # --- batches ------------------------------------------------------------------------------------------------------

    def batches(
        self,
        prompts: Sequence[DrawnPrompt],
        samples: Sequence[FlowSample],
        advantages: torch.Tensor,
        *,
        is_fresh: bool,
    ) -> list[Batch]:
        """Return the micro-batches of an optimizer step: one per trained denoising step (GRPO) or noise level (NFT),
        for each `micro_batch_size` samples. If a sample lacks its trajectory, all of them are drawn again. Advantages
        are clipped to ±`adv_clip_max`."""
        if any(sample.path is None for sample in samples):
            with self.drawing():
                self._draw(prompts, samples)
        most = self._posttrain.grpo.adv_clip_max
        advantages = advantages.clamp(-most, most).to(self._generator.denoise.exact_dtype)
        found: list[Batch] = []
        for batch, text, own in zip(self._cut(samples), self._texts(prompts), self._cut(advantages), strict=True):
            common = text | {
                "sample_ids": [sample.key for sample in batch],
                "epochs": [0] * len(batch),
                "_advantages": own,
            }
            if self._draws_noise:
                found += self._policy_steps(batch, common)
            else:
                found += self._nft_levels(batch, common)
        return found

    def _policy_steps(self, samples: Sequence[FlowSample], common: Batch) -> Iterator[Batch]:
        """Of a policy gradient: one micro-batch for each step that is trained."""
        path = Trajectories.joined(_drawn_paths(samples))
        for index in self._window.trained(samples[0].rollout):
            batch = common | {
                "latents": path.states[index],
                "_time": torch.full((len(samples),), self._steps.sigmas[index], dtype=path.latents.dtype),
                "_step": SdeStep(self._steps, index),
                "_sample": path.samples[index],
                "_old_log_probs": path.log_probs[index],
                "_old_means": path.means[index],
            }
            yield self._beside_reference(batch, batch["latents"])

    def _nft_levels(self, samples: Sequence[FlowSample], common: Batch) -> Iterator[Batch]:
        """Of negative-aware fine-tuning: each sample with noise of some levels of the sampler's grid, in an order of
        its own, and what the policy that drew it predicts there."""
        latents = torch.stack([path.latents for path in _drawn_paths(samples)])
        # Without the last level, 0: no noise is left there to be predicted.
        sigmas = torch.tensor(self._steps.sigmas[:-1], dtype=latents.dtype)
        orders = torch.stack([self._order(sample, len(sigmas)) for sample in samples])
        flow = self._posttrain.flow
        # 100 × 0.29 is 28.999999999999996.
        levels = max(1, int(flow.num_inference_steps * flow.timestep_fraction + 1e-9))
        for place in range(levels):
            noise, time = self._level_noise(samples, place, latents), sigmas[orders[:, place]]
            batch = common | {"latents": latents, "_noise": noise, "_time": time}
            noisy = self._adapter.noise_path.mix(latents, noise, time.view(-1, *[1] * (latents.dim() - 1)))
            batch["_old"] = self._generator.predict(self._generator.old, batch, noisy)
            yield self._beside_reference(batch, noisy)

    def _level_noise(self, samples: Sequence[FlowSample], place: int, like: torch.Tensor) -> torch.Tensor:
        """What each sample is mixed with at the level that comes at this place of its order."""
        noise = []
        for sample in samples:
            seed = derive_seed(self._seed, sample.key, "noise", place)
            noise.append(noise_of(seed, like.shape[1:]))
        return torch.stack(noise).to(like.dtype)

    def _order(self, sample: FlowSample, count: int) -> torch.Tensor:
        random = np.random.Generator(np.random.Philox(key=derive_seed(self._seed, sample.key, "levels")))
        return torch.from_numpy(random.permutation(count))

    def _beside_reference(self, batch: Batch, noisy: torch.Tensor) -> Batch:
        reference = self._generator.reference
        if reference is None or not self._objective.needs_reference:
            return batch
        return batch | {"_reference": self._generator.predict(reference, batch, noisy)}


def _drawn_paths(samples: Sequence[FlowSample]) -> list[Trajectories]:
    """Of samples that have been drawn."""
    paths = []
    for sample in samples:
        assert sample.path is not None
        paths.append(sample.path)
    return paths


def build_flow_rollouts(
    arguments: Arguments,
    assembled: Assembled,
    job: Job,
    data: RunData,
    objective: RewardObjective,
    *,
    denoise: Denoiser,
    encoders: DiffusionPipeline,
) -> FlowRollouts:
    """What draws and judges samples of a generator; an `OldPolicy` draws them where there is one."""
    prompts = data.train.origin
    assert isinstance(prompts, PromptDataset)  # see `check_prompts`
    context = assembled.applied.context

    def own(batch: Batch) -> Batch:
        if context is not None:
            batch = context.split(batch)
        return move(batch, job.device)

    reference = generator_reference(arguments, assembled, job.device)
    average = assembled.average
    old: Switch = nullcontext
    if isinstance(average, OldPolicy) and not isinstance(average, MovingReference):
        old = average.applied
    return FlowRollouts(
        FlowModel(assembled.model, denoise, encoders, own, job.device, reference, old),
        objective,
        arguments.posttrain,
        rewards_with_servers(arguments.posttrain, GENERATOR, job.device),
        size=prompts.size,
        seed=arguments.training.seed,
        micro_batch_size=arguments.training.micro_batch_size,
        shift=arguments.training.diffusion.shift,
    )


def generator_reference(arguments: Arguments, assembled: Assembled, device: torch.device) -> Switch | None:
    """What makes the model the one that training started from; None where nothing is compared with it.

    Raises:
        ConfigError: It cannot be had.
    """
    match reference_kind(arguments):
        case "adapters_off":
            check_start(arguments.training, arguments.posttrain)
            return lambda: adapters_off(assembled.model)
        case "frozen" if assembled.average is not None and has_moving_reference(arguments.posttrain):
            return assembled.average.applied
        case "frozen":
            second = assemble_reference(arguments, device).model
            check_same_inputs(assembled.model, second, arguments.posttrain.reference.model_name_or_path)
            return lambda: nullcontext(second)
    return None
