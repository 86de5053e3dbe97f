"""Rollouts of generators: samples that the model itself draws along the path that trains, judged as pictures, and cut
into micro-batches of one step, or one noise level, of some samples."""

from __future__ import annotations

import base64
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.core.media_geometry import MediaSize
from mindspeed_mm.core.seeds import derive_seed
from mindspeed_mm.fsdp.data.datasets.generation_prompts.prompt_dataset import DrawnPrompt, PromptRow
from mindspeed_mm.fsdp.loss.denoising import noise_of
from mindspeed_mm.fsdp.loss.flow_objectives import RewardObjective
from mindspeed_mm.fsdp.loss.sde_steps import SdeStep, SdeSteps
from mindspeed_mm.fsdp.loss.trained_window import TrainedWindow
from mindspeed_mm.fsdp.models.diffusion.adapter import TextFeatures
from mindspeed_mm.fsdp.models.diffusion.pixels import as_pil
from mindspeed_mm.fsdp.models.diffusion.velocity import Denoiser, GuidedDenoiser, blank_text
from mindspeed_mm.fsdp.params.posttrain_args import PosttrainArguments
from mindspeed_mm.fsdp.posttrain_rewards.registry import Judged, Reward, scores_of
from mindspeed_mm.fsdp.sampling.trajectories import SampleNoise, Trajectories, noise_grid, roll_out

_PROMPTS_KEPT = 1024
"""Features of the prompts drawn last are kept on the host."""

Switch = Callable[[], AbstractContextManager[Any]]
"""Puts other values into the model while it is entered; gives the model that has them, or nothing."""


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
        """Number of the rollout."""
        return int(self.key.partition("/")[0])

    def noise(self, seed: int, *, shares_start: bool) -> SampleNoise:
        """What chance decides of it."""
        prompt, _, member = self.key.rpartition("/")
        return SampleNoise(seed, prompt, int(member), shares_start)


@dataclass(frozen=True)
class FlowModel:
    """The generator that is trained, as far as rollouts need it."""

    model: nn.Module
    """The transformer, with its values."""
    denoise: Denoiser
    """The path through it."""
    encoders: Any
    """From `load_encoders`; they stay on the host but while they work."""
    own: Callable[[Batch], Batch]
    """What this rank computes of a batch, on its device."""
    device: torch.device
    reference: Switch | None = None
    """Makes the model the reference; None: none is needed."""
    old: Switch = nullcontext
    """Makes the model the policy that draws samples."""

    @contextmanager
    def encoders_there(self) -> Iterator[None]:
        """Inside, the encoders are on the device."""
        modules = [part for part in self.encoders.components.values() if isinstance(part, nn.Module)]
        for module in modules:
            module.to(self.device)
        try:
            yield
        finally:
            for module in modules:
                module.to("cpu")

    @torch.no_grad()
    def predict(self, switch: Switch, batch: Batch, noisy: torch.Tensor) -> torch.Tensor:
        """v of `switch`'s values, on the host."""
        there = self.own(batch | {"latents": noisy})
        with switch() as other:
            model = self.model if other is None else other
            return self.denoise(model, there["latents"], there["_time"], there).cpu()


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
        self.reward_names = [reward.name for reward in rewards]
        self.reward_weights = torch.tensor([reward.weight for reward in rewards], dtype=torch.float64)
        self._adapter, flow = generator.denoise.adapter, posttrain.flow
        self._shape = self._adapter.geometry.latent_shape(size)
        grid = noise_grid(self._adapter, self._shape, flow.num_inference_steps, shift)
        self._steps = SdeSteps(flow.sde, flow.noise_level, grid)
        self._draws_noise = posttrain.method == "grpo"
        self._is_guided = isinstance(generator.denoise, GuidedDenoiser)
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
        self._features: OrderedDict[str, TextFeatures] = OrderedDict()

    # --- drawing ------------------------------------------------------------------------------------------------------

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """See `RolloutSource`. The transformer stays as it is trained: nothing in it is random."""
        with torch.no_grad(), self._generator.old():
            yield

    def draw(self, prompts: Sequence[DrawnPrompt], keys: Sequence[str]) -> list[FlowSample]:
        """See `RolloutSource`."""
        samples = [FlowSample(key) for key in keys]
        self._draw(prompts, samples)
        return samples

    def _draw(self, prompts: Sequence[DrawnPrompt], samples: Sequence[FlowSample]) -> None:
        """Give samples their trajectories."""
        texts = self._texts(prompts)
        for text, batch in zip(texts, self._cut(samples), strict=True):
            noise = [each.noise(self._seed, shares_start=self._posttrain.flow.same_noise) for each in batch]
            drawn = self._window.drawn(batch[0].rollout) if self._draws_noise else ()
            blank = text | {"latents": torch.zeros(len(batch), *self._shape)}
            generator = self._generator
            path = roll_out(generator.denoise, generator.model, blank, self._steps, noise, drawn, generator.own)
            for row, sample in enumerate(batch):
                sample.path = path.of_row(row)

    def _cut(self, items: Sequence[Any]) -> list[Sequence[Any]]:
        """Into micro-batches."""
        size = self._micro_batch_size
        return [items[first : first + size] for first in range(0, len(items), size)]

    def _texts(self, prompts: Sequence[DrawnPrompt]) -> list[Batch]:
        """Features of each micro-batch's prompts; those that were not drawn lately are encoded, each by itself."""
        rows = {prompt["prompt"].place: prompt["prompt"] for prompt in prompts}
        missing = [row for place, row in rows.items() if place not in self._features]
        if missing:
            self._features.update(self._encoded(missing))
        for place in rows:
            self._features.move_to_end(place)
        while len(self._features) > max(_PROMPTS_KEPT, len(rows)):
            self._features.popitem(last=False)
        features = [self._features[prompt["prompt"].place] for prompt in prompts]
        return [self._as_batch(batch) for batch in self._cut(features)]

    def _as_batch(self, features: Sequence[TextFeatures]) -> Batch:
        text = dict(self._adapter.pad_text(features))
        return text | blank_text(self._adapter.pad_text([self._blank] * len(features))) if self._is_guided else text

    @cached_property
    def _blank(self) -> TextFeatures:
        """Of the empty prompt, which guidance leads away from."""
        with self._generator.encoders_there():
            (features,) = self._adapter.encode_text(self._generator.encoders, [""])
        return {name: value.cpu() for name, value in features.items()}

    def _encoded(self, rows: Sequence[PromptRow]) -> dict[str, TextFeatures]:
        found = {row.place: row.stored_features() for row in rows}
        if any(features is None for features in found.values()):
            with self._generator.encoders_there():
                for row in rows:
                    if found[row.place] is None:
                        (features,) = self._adapter.encode_text(self._generator.encoders, [row.text])
                        found[row.place] = {name: value.cpu() for name, value in features.items()}
        return {place: features for place, features in found.items() if features is not None}

    # --- judging ------------------------------------------------------------------------------------------------------

    def judge(self, prompts: Sequence[DrawnPrompt], samples: Sequence[FlowSample]) -> torch.Tensor:
        """See `RolloutSource`. Rewards are given PIL pictures, lists of them for clips."""
        pictures = self.decoded(samples)
        for sample, picture in zip(samples, pictures, strict=True):
            sample.thumbnail = thumbnail(picture)
        rows = [prompt["prompt"] for prompt in prompts]
        judged = Judged(
            [row.text for row in rows], pictures, [row.row for row in rows], ids=[sample.key for sample in samples]
        )
        return scores_of(self._rewards, judged)

    def decoded(self, samples: Sequence[FlowSample]) -> list[Any]:
        """A PIL picture of each sample, or a list of them for a clip; decoded one by one."""
        found: list[Any] = []
        with self._generator.encoders_there():
            for sample in samples:
                assert sample.path is not None
                pixels = self._adapter.decode(self._generator.encoders, sample.path.latents.unsqueeze(0))[0]
                frames = as_pil(pixels.transpose(0, 1))
                found.append(frames[0] if len(frames) == 1 else frames)
        return found

    def facts(self, samples: Sequence[FlowSample]) -> dict[str, float]:
        """See `RolloutSource`: `diversity`, see the function of this name."""
        seen = [sample.thumbnail for sample in samples if sample.thumbnail is not None]
        count = {"samples": float(len(samples))}
        if len(seen) < len(samples):
            return count
        grouped = np.stack(seen).reshape(-1, self._posttrain.grpo.num_generations, seen[0].size)
        return count | {"diversity": diversity(grouped) * len(samples)}

    # --- records ------------------------------------------------------------------------------------------------------

    def record(self, prompt: DrawnPrompt, sample: FlowSample) -> dict[str, Any]:
        """See `RolloutSource`. States are kept where a rollout serves several steps: the weights of the later ones
        would not draw it again."""
        row = prompt["prompt"]
        kept = {"path": _packed(sample.path)} if self._keeps_paths and sample.path is not None else {}
        return {"row": prompt["row"], "id": prompt["sample_id"], "prompt": row.text, "sample": sample.key, **kept}

    def restore(self, record: Mapping[str, Any]) -> FlowSample:
        """See `RolloutSource`."""
        return FlowSample(record["sample"], _unpacked(record["path"]) if "path" in record else None)

    def take_metrics(self) -> dict[str, float]:
        """See `RolloutSource`."""
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
        """See `RolloutSource`."""
        if any(sample.path is None for sample in samples):
            with self.drawing():
                self._draw(prompts, samples)
        most = self._posttrain.grpo.adv_clip_max
        cut = zip(
            self._cut(samples),
            self._texts(prompts),
            advantages.clamp(-most, most).split(self._micro_batch_size),
            strict=True,
        )
        found: list[Batch] = []
        for batch, text, own in cut:
            common = text | {
                "sample_ids": [sample.key for sample in batch],
                "epochs": [0] * len(batch),
                "_advantages": own.to(self._generator.denoise.exact_dtype),
            }
            found += self._policy_steps(batch, common) if self._draws_noise else self._nft_levels(batch, common)
        return found

    def _policy_steps(self, samples: Sequence[FlowSample], common: Batch) -> Iterator[Batch]:
        """Of a policy gradient: one micro-batch for each step that is trained."""
        path = Trajectories.joined([sample.path for sample in samples if sample.path is not None])
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
        latents = torch.stack([sample.path.latents for sample in samples if sample.path is not None])
        flow = self._posttrain.flow
        sigmas = torch.tensor(self._steps.sigmas[:-1], dtype=latents.dtype)
        orders = [self._order(sample, len(sigmas)) for sample in samples]
        for place in range(max(1, int(flow.num_inference_steps * flow.timestep_fraction + 1e-9))):
            noise = [
                noise_of(derive_seed(self._seed, sample.key, "noise", place), latents.shape[1:]) for sample in samples
            ]
            batch = common | {
                "latents": latents,
                "_noise": torch.stack(noise).to(latents.dtype),
                "_time": sigmas[[order[place] for order in orders]],
            }
            at = batch["_time"].view(-1, *[1] * (latents.dim() - 1))
            noisy = self._adapter.noise_path.mix(latents, batch["_noise"], at)
            batch["_old"] = self._generator.predict(self._generator.old, batch, noisy)
            yield self._beside_reference(batch, noisy)

    def _order(self, sample: FlowSample, count: int) -> list[int]:
        random = np.random.Generator(np.random.Philox(key=derive_seed(self._seed, sample.key, "levels")))
        return [int(level) for level in random.permutation(count)]

    def _beside_reference(self, batch: Batch, noisy: torch.Tensor) -> Batch:
        reference = self._generator.reference
        if reference is None or not self._objective.needs_reference:
            return batch
        return batch | {"_reference": self._generator.predict(reference, batch, noisy)}


def _packed(path: Trajectories) -> dict[str, Any]:
    """Tensors to the bit, as JSON takes them."""

    def packed(tensor: torch.Tensor) -> list[Any]:
        array = tensor.contiguous().numpy()
        return [str(array.dtype), list(array.shape), base64.b64encode(array.tobytes()).decode("ascii")]

    named = {name: {str(index): packed(each) for index, each in steps.items()} for name, steps in path.by_step.items()}
    return {"latents": packed(path.latents), **named}


def _unpacked(record: Mapping[str, Any]) -> Trajectories:
    def unpacked(item: Sequence[Any]) -> torch.Tensor:
        dtype, shape, data = item
        return torch.from_numpy(np.frombuffer(base64.b64decode(data), dtype=dtype).reshape(shape).copy())

    steps = {
        name: {int(index): unpacked(each) for index, each in entries.items()}
        for name, entries in record.items()
        if name != "latents"
    }
    return Trajectories(unpacked(record["latents"]), **steps)


def thumbnail(picture: Any, side: int = 8) -> np.ndarray:
    """(side²,) grey levels of a picture, or of a clip's middle frame."""
    frame: Image.Image = picture[len(picture) // 2] if isinstance(picture, list) else picture
    return np.asarray(frame.convert("L").resize((side, side), Image.Resampling.BOX), dtype=np.float64).reshape(-1)


def diversity(thumbnails_GMD: np.ndarray) -> float:
    """Mean distance between two samples of one prompt, root mean square of grey levels: 0 when a policy draws the same
    picture again and again.

    Args:
        thumbnails_GMD: (groups, members, numbers).
    """
    members = thumbnails_GMD.shape[1]
    one, other = np.triu_indices(members, k=1)
    gaps = thumbnails_GMD[:, one] - thumbnails_GMD[:, other]
    return float(np.sqrt(np.square(gaps).mean(axis=2)).mean()) if len(one) else 0.0
