"""The loader of runs that train on their own samples: prompts → samples → rewards → advantages → micro-batches.

It stands where other runs have their data loader. A rollout is drawn when its first step is asked for, by the weights
of that moment, and serves `steps × iterations` optimizer steps. Which prompts make a step, and what is drawn for them,
depends on no number of ranks. A server may draw the next rollout meanwhile, by the weights that it has by then.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.core.json_file import JsonMapping, JsonObject
from mindspeed_mm.fsdp.data import DataPosition
from mindspeed_mm.fsdp.data.dataloader.order import RolloutPlace
from mindspeed_mm.fsdp.loss.policy_gradient import Advantages, group_advantages
from mindspeed_mm.fsdp.posttrain_rewards.registry import check_judged
from mindspeed_mm.fsdp.train.rollouts import files
from mindspeed_mm.fsdp.train.rollouts.order import (
    RolloutMetrics,
    RolloutOrder,
    RolloutSource,
    scores_of_lines,
    weights_mark,
)
from mindspeed_mm.fsdp.train.run.job import Job

Prompt = Mapping[str, Any]
"""As the data set gives it, with its `sample_id`; samples are of the source's own kind."""
FLAT_ROLLOUTS = 10
"""So many rollouts in a row from which nothing is learnt are worth a warning."""


@dataclass(frozen=True)
class Rollout:
    """This rank's samples of one rollout, step by step, group by group."""

    number: int
    prompts: list[list[Prompt]]
    """Of each step, each prompt as often as it has samples."""
    samples: list[list[object]]
    advantages: list[torch.Tensor]
    digest: str = ""
    """Of its file."""


@dataclass(frozen=True)
class _Begun:
    """A rollout whose samples are drawn, or are being drawn."""

    header: JsonObject
    prompts: list[list[Prompt]]
    """Of each step, each prompt as often as it has samples."""
    keys: list[list[str]]
    after: DataPosition
    """Of the prompts that come next."""
    stored: files.StoredRollout | None
    """The file of the very same rollout."""
    drawing: Future[list[list[object]]] | None
    """Gives the samples of each step; None where they are stored."""
    drawing_s: float
    """That drawing has taken so far."""
    steps_behind: int
    """Optimizer steps between the weights that draw and those that will be trained."""


class RolloutLoader:
    """Draws samples and yields their micro-batches, one optimizer step at a time.

    Args:
        order: Which prompts make a rollout, and which steps it serves.
        job: This rank.
        keeps_all: Leave the files of rollouts that are used up.
        settings: Tells the settings and rows that decide what is drawn, and what it is worth, from others; and those
            that decide what is drawn alone.
    """

    def __init__(
        self, order: RolloutOrder, job: Job, *, keeps_all: bool = True, settings: tuple[str, str] = ("", "")
    ) -> None:
        self._order, self._job = order, job
        self._prompts, self._plan, self._folder = order.prompts, order.plan, order.folder
        self._keeps_all, self._settings = keeps_all, settings
        prompts = order.prompts
        self.source: RolloutSource | None = None
        """Set when the model stands, before the first step."""
        self._model: nn.Module | None = None
        self.dataset, self.counts, self.mix = prompts.dataset, prompts.counts, prompts.mix
        self.position = prompts.position
        self.metrics = RolloutMetrics()
        self._flat_rollouts = 0
        self._note: Callable[[str], None] | None = None

    def draw_from(self, source: RolloutSource, model: nn.Module, note: Callable[[str], None]) -> None:
        """Say what draws samples, whose weights decide what they are, and who is told of trouble; before the first
        step."""
        self.source, self._model, self._note = source, model, note

    # --- what a run asks of its loader --------------------------------------------------------------------------------

    @property
    def batching(self) -> dict[str, Any]:
        """What must be the same when a run is resumed."""
        return self._order.batching

    most_tokens: int | None = None

    @property
    def estimate_note(self) -> str:
        """How the loader of the prompts estimated the steps of an epoch; empty where it counted them."""
        return self._prompts.estimate_note

    @property
    def bad_samples(self) -> dict[str, str]:
        """Prompts that could not be used → reason."""
        return self._prompts.bad_samples

    @property
    def untold_bad_samples(self) -> int:
        """How many of them the other ranks do not know of."""
        return self._prompts.untold_bad_samples

    def learn_bad_samples(self, found: dict[str, str]) -> None:
        """What all ranks found, or a run found before it was stopped."""
        self._prompts.learn_bad_samples(found)

    def describe(self) -> str:
        """Return a phrase for the log: prompts, samples per prompt and, if several, the steps that use a sample."""
        told = f"{len(self.dataset):,} prompts, {self._plan.group_size} samples of each"
        if self._plan.uses > 1:
            told += f", each used for {self._plan.uses} steps"
        return told

    def steps_for(self, epochs: float) -> int:
        """Optimizer steps until so many epochs of prompts are done."""
        return self._order.steps_for(epochs)

    def go_on(self, position: DataPosition, before: Mapping[str, object] | None, *, may_skip: bool) -> str:
        """Take up a position that was saved; raises as `RolloutOrder.go_on`."""
        note = self._order.go_on(position, before, may_skip=may_skip)
        self.position = self._order.position
        return note

    def take_metrics(self) -> dict[str, float]:
        """Numbers for the log, since the last call."""
        metrics = self.metrics.take()
        if self.source is not None:
            metrics |= self.source.take_metrics()
        return metrics

    def __iter__(self) -> Iterator[list[Batch]]:
        """Steps from the current position on.

        Raises:
            DataError: A prompt or a reward is off.
            CheckpointError: The run stopped within a rollout whose file is gone.
        """
        place, number = self.position.rollout, 0
        if place is not None:
            number = place.number + 1
        if self._order.is_within(place):
            yield from self._steps(self._resumed(place), self._prompts.position, place.used)
        for rollout, after in self._rollouts(number):
            yield from self._steps(rollout, after, 0)

    def _rollouts(self, number: int) -> Iterator[tuple[Rollout, DataPosition]]:
        """Rollouts from this number on, each with the position of the prompts behind it."""
        prompts = iter(self._prompts)
        begun = self._begin(number, prompts, steps_behind=0)
        while begun is not None:
            rollout, after, number = self._ended(begun), begun.after, number + 1
            following: _Begun | None = None
            if self._plan.ahead:  # begun before `rollout` is trained on, so that a server works meanwhile
                following = self._begin(number, prompts, steps_behind=self._plan.uses)
            yield rollout, after
            begun = following or self._begin(number, prompts, steps_behind=0)

    def _steps(self, rollout: Rollout, after: DataPosition, used: int) -> Iterator[list[Batch]]:
        assert self.source is not None
        for use in range(used, self._plan.uses):
            step = use % self._plan.steps
            # Before the step: a checkpoint that is saved after it goes on with the next one.
            self.position = replace(after, rollout=RolloutPlace(rollout.number, use + 1, rollout.digest))
            yield self.source.batches(
                rollout.prompts[step], rollout.samples[step], rollout.advantages[step], is_fresh=use == 0
            )

    # --- a rollout ----------------------------------------------------------------------------------------------------

    def _begin(self, number: int, prompts: Iterator[list[Batch]], *, steps_behind: int) -> _Begun | None:
        """Let samples be drawn for the next prompts; nothing is, where the very same weights drew them before, by the
        same settings. None: there are no further prompts."""
        batches = next(prompts, None)
        if batches is None:
            return None
        prompts_of_steps, keys_of_steps = [], []
        for batch in batches:
            repeated = self._repeated(batch["prompts"])
            prompts_of_steps.append(repeated)
            keys_of_steps.append(self._keys(number, repeated))
        header = self._header(number, sum(map(len, prompts_of_steps)))
        stored = self._stored(number, header)
        begun, drawing = time.perf_counter(), None
        if stored is None:
            drawing = self._drawn_before(header) or self._drawing(prompts_of_steps, keys_of_steps)
        return _Begun(
            header,
            prompts_of_steps,
            keys_of_steps,
            self._prompts.position,
            stored,
            drawing,
            time.perf_counter() - begun,
            steps_behind,
        )

    def _header(self, number: int, samples: int) -> JsonObject:
        """What tells a rollout from others; `samples` of this rank."""
        assert self._model is not None
        return {
            "rollout": number,
            "weights": weights_mark(self._model) if self._folder is not None else 0,
            "settings": self._settings[0],
            "samples": samples * self._job.state.data_size,
        }

    def _drawing(self, prompts: list[list[Prompt]], keys: list[list[str]]) -> Future[list[list[object]]]:
        """Samples of each step: drawn, or, where another program draws them ahead, asked for in a thread. New weights
        are handed over here in any case: all ranks take part in that."""
        assert self.source is not None
        source, found = self.source, Future[list[list[object]]]()

        def draw() -> None:
            try:
                found.set_result(list(map(source.draw, prompts, keys)))
            except Exception as error:  # noqa: BLE001 it is raised where the samples are asked for
                found.set_exception(error)

        with source.drawing():
            if self._plan.ahead:
                threading.Thread(target=draw, name="rollout", daemon=True).start()
            else:
                draw()
        return found

    def _ended(self, begun: _Begun) -> Rollout:
        """Samples judged, and written; or read."""
        number = begun.header["rollout"]
        if self._plan.ahead:
            self.metrics.steps_behind = begun.steps_behind
        if begun.stored is not None:
            return self._read_again(number, begun.prompts, begun.stored)
        assert self.source is not None and begun.drawing is not None
        waits = time.perf_counter()
        # Raises what failed in the thread.
        samples = begun.drawing.result()
        drawn = time.perf_counter()
        self._keep_drawn(begun, samples)
        own = self._judged(begun, samples) if self._is_first else None
        judged = time.perf_counter()
        lines, ranks = self._of_all_ranks(own)
        advantages = self._with_advantages(lines, ranks)
        text = files.text_of(begun.header, lines)
        self._keep(number, text)
        facts = list(map(self.source.facts, samples))
        self.metrics.count(lines, self.source.reward_names, facts)
        self.metrics.time(facts, begun.drawing_s + drawn - waits, judged - drawn)
        return Rollout(number, begun.prompts, samples, advantages, files.digest_of(text))

    def _drawn_before(self, header: Mapping[str, object]) -> Future[list[list[object]]] | None:
        """This rank's samples of this very rollout, which were drawn and not judged; None unless all ranks have
        theirs."""
        stored = files.read_samples(self._drawn_file(header)) if self._folder is not None else None
        is_same = stored is not None and dict(stored.header) == self._drawn_header(header)
        if not all(self._of_all(is_same)):
            return None
        assert self.source is not None and stored is not None
        samples: list[list[object]] = []
        for step in range(self._plan.steps):
            samples.append([self.source.restore(line) for line in stored.samples if line["step"] == step])
        found = Future[list[list[object]]]()
        found.set_result(samples)
        return found

    def _keep_drawn(self, begun: _Begun, samples: list[list[object]]) -> None:
        """Store this rank's samples before they are judged: rewards may fail, servers above all."""
        if self._folder is None or not self._is_first:
            return
        assert self.source is not None
        lines = []
        for step, drawn in enumerate(samples):
            for prompt, sample in zip(begun.prompts[step], drawn, strict=True):
                lines.append({"step": step, **self.source.record(prompt, sample)})
        text = files.text_of(self._drawn_header(begun.header), lines)
        files.write_samples(self._drawn_file(begun.header), text)

    def _drawn_file(self, header: JsonMapping) -> Path:
        assert self._folder is not None
        return files.drawn_file(self._folder, header["rollout"], self._job.state.data_rank)

    def _drawn_header(self, header: Mapping[str, object]) -> JsonObject:
        return {**header, "settings": self._settings[1], "data_ranks": self._job.state.data_size}

    def _judged(self, begun: _Begun, samples: list[list[object]]) -> list[list[JsonObject]]:
        """What is kept of this rank's samples, step by step, with their scores."""
        assert self.source is not None
        kept = []
        for step, drawn in enumerate(samples):
            prompts, keys = begun.prompts[step], begun.keys[step]
            scores = self.source.judge(prompts, drawn).tolist()
            records = []
            for prompt, key, sample, values in zip(prompts, keys, drawn, scores, strict=True):
                record = {"step": step, "key": key, **self.source.record(prompt, sample)}
                record["scores"] = list(map(_or_null, values))
                records.append(record)
            kept.append(records)
        return kept

    def _keep(self, number: int, text: str) -> None:
        if self._folder is None or self._job.rank != 0:
            return
        files.write_rollout(self._folder, number, text)
        files.remove_drawn(self._folder)
        if not self._keeps_all:
            # The newest checkpoint may have been saved within the rollout before.
            files.remove_rollouts_before(self._folder, number - 1)

    def _with_advantages(self, lines: list[JsonObject], ranks: int) -> list[torch.Tensor]:
        """Those of this rank, step by step; every line gets its own."""
        plan, found = self._plan, self._worth(lines)
        for line, reward, advantage in zip(lines, found.rewards.tolist(), found.values.tolist(), strict=True):
            line["reward"] = _or_null(reward)
            line["advantage"] = advantage
        # (steps, ranks, samples of a rank): the order of `_of_all_ranks`.
        by_step = found.values.view(plan.steps, ranks, -1)
        return list(by_step[:, self._job.state.data_rank])

    def _worth(self, lines: Sequence[Mapping[str, object]]) -> Advantages:
        """What rewards come to, for the log, too."""
        assert self.source is not None
        scores = scores_of_lines(lines)
        check_judged(scores, self.source.reward_names)
        plan = self._plan
        found = group_advantages(
            scores, self.source.reward_weights, plan.group_size, scale=plan.scale, aggregation=plan.aggregation
        )
        self.metrics.judge(found)
        self._warn_of_flat_rewards(found)
        return found

    def _warn_of_flat_rewards(self, found: Advantages) -> None:
        if found.without_spread < 1:
            self._flat_rollouts = 0
            return
        self._flat_rollouts += 1
        if self._flat_rollouts == FLAT_ROLLOUTS and self._job.rank == 0:
            assert self._note is not None
            worth = found.rewards.nanmean().item()
            self._note(
                f"warning: {FLAT_ROLLOUTS} rollouts in a row had no group whose samples are worth different rewards "
                f"(mean {worth:.3g}): nothing is learnt from them. See mm posttrain rollouts RUN, then start "
                "from a model that solves some of the tasks, raise posttrain.grpo.num_generations, or give other "
                "rewards"
            )

    def _read(self, number: int, prompts: list[list[Prompt]], stored: files.StoredRollout) -> Rollout:
        """This rank's part of a file."""
        assert self.source is not None
        samples, advantages = [], []
        for step in range(self._plan.steps):
            own = self._own_lines(stored, step)
            samples.append(list(map(self.source.restore, own)))
            advantages.append(torch.tensor([line["advantage"] for line in own], dtype=torch.float64))
        return Rollout(number, prompts, samples, advantages, stored.digest)

    def _read_again(self, number: int, prompts: list[list[Prompt]], stored: files.StoredRollout) -> Rollout:
        """The same of a rollout that begins: its numbers go into the log as when it was drawn, without times."""
        assert self.source is not None
        rollout = self._read(number, prompts, stored)
        self._worth(stored.samples)
        self.metrics.count(stored.samples, self.source.reward_names, list(map(self.source.facts, rollout.samples)))
        return rollout

    def _own_lines(self, stored: files.StoredRollout, step: int) -> list[JsonMapping]:
        """This rank's share of the samples of a step."""
        ranks, rank = self._job.state.data_size, self._job.state.data_rank
        lines = [line for line in stored.samples if line["step"] == step]
        share = len(lines) // ranks
        return lines[rank * share : (rank + 1) * share]

    def _resumed(self, place: RolloutPlace) -> Rollout:
        """The rollout that a run stopped within."""
        stored = self._order.stored(place)
        prompts = []
        for step in range(self._plan.steps):
            one_of_each_group = self._own_lines(stored, step)[:: self._plan.group_size]
            rows = [line["row"] for line in one_of_each_group]
            prompts.append(self._repeated([self.dataset[row] for row in rows]))
        return self._read(place.number, prompts, stored)

    def _stored(self, number: int, header: Mapping[str, object]) -> files.StoredRollout | None:
        """A file of this very rollout, where all ranks see it."""
        if self._folder is None:
            return None
        found = files.read_rollout(self._folder, number)
        is_same = found is not None and dict(found.header) == dict(header)
        return found if all(self._of_all(is_same)) else None

    # --- ranks --------------------------------------------------------------------------------------------------------

    @property
    def _is_first(self) -> bool:
        """Whether this rank speaks for those that work on the same samples."""
        return bool(self._job.state.is_first_of_its_samples)

    def _of_all(self, value: object) -> list[Any]:
        if self._job.world_size == 1:
            return [value]
        found = [value] * self._job.world_size
        dist.all_gather_object(found, value)
        return found

    def _of_all_ranks(self, own: list[list[dict[str, Any]]] | None) -> tuple[list[JsonObject], int]:
        """All ranks' records: step by step, within a step rank by rank; and the number of these ranks.

        Args:
            own: Of each step; None on ranks that others speak for.
        """
        by_rank: dict[int, list[list[JsonObject]]] = {}
        for rank, records in self._of_all((self._job.state.data_rank, own)):
            if records is not None:
                by_rank[rank] = records
        lines: list[JsonObject] = []
        for step in range(self._plan.steps):
            for rank in sorted(by_rank):
                lines += by_rank[rank][step]
        return lines, len(by_rank)

    def _repeated(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        repeated: list[Prompt] = []
        for prompt in prompts:
            repeated += [prompt] * self._plan.group_size
        return repeated

    def _keys(self, number: int, prompts: Sequence[Prompt]) -> list[str]:
        size = self._plan.group_size
        return [f"{number}/{prompt['sample_id']}/{place % size}" for place, prompt in enumerate(prompts)]


def _or_null(value: float) -> float | None:
    """JSON has no word for what is not a number."""
    return None if math.isnan(value) else value
