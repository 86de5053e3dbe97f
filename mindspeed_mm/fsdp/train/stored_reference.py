"""Log-probabilities of a reference that were computed once: the pass over preference pairs that computes them, the
file, and the policy that reads it.

The file is written by `mm posttrain reference`. Beside the numbers it tells which weights, rows and settings they are
of, and it knows the tokens of each pair: numbers of anything else are refused.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mindspeed_mm.checkpoint.safetensors_file import write_safetensors
from mindspeed_mm.core.artifacts import atomic_file, make_writable_folder
from mindspeed_mm.core.batch import Batch
from mindspeed_mm.core.errors import ConfigError, DataError
from mindspeed_mm.core.json_file import parse_json
from mindspeed_mm.fsdp.checkpoint.base_weights import base_weights_mark, weights_folder_of_load
from mindspeed_mm.fsdp.data import MMDataset
from mindspeed_mm.fsdp.loss.pair_objective import PairObjective
from mindspeed_mm.fsdp.models.behaviour.shared_media import RepeatedMedia
from mindspeed_mm.fsdp.params.argument import Arguments, PosttrainArguments, TrainingArguments
from mindspeed_mm.fsdp.params.posttrain_args import DpoArguments
from mindspeed_mm.fsdp.train.assemble import Assembled
from mindspeed_mm.fsdp.train.reference import assemble_reference
from mindspeed_mm.fsdp.train.reference_start import reference_start
from mindspeed_mm.fsdp.train.run.data import build_data, build_pass_loader, build_validation_loader
from mindspeed_mm.fsdp.train.run.job import Job, joined
from mindspeed_mm.fsdp.train.train_engine import move

FILE = "reference.safetensors"
KEY = "posttrain.reference.path"
AGAIN = "Run mm posttrain reference with this configuration again."
_DIGEST_BYTES = 16
_BEGINNING = re.compile(rb'\{"__metadata__":\{"(facts|ids|sha256)":')
"""Of the header, behind its length."""


@dataclass
class StoredLogProbs:
    """Log-probabilities of pairs by the id of their row."""

    facts: dict[str, str]
    """What they are of: see `facts_of_reference`."""
    log_probs: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Of the chosen and of the rejected answer."""
    digests: dict[str, bytes] = field(default_factory=dict)
    """Of their tokens."""

    def add(self, batch: Batch, log_probs: Tensor) -> None:
        """Take in the pairs of a prepared micro-batch; those that only fill it up are left out.

        Args:
            batch: Prepared by the objective of pairs.
            log_probs: (2B,).
        """
        chosen, rejected = log_probs.double().chunk(2)
        numbers = zip(chosen.tolist(), rejected.tolist(), strict=True)
        for name, pair, digest, counts in zip(
            batch["sample_ids"], numbers, digests_of(batch), batch["_counts"].tolist(), strict=True
        ):
            if counts:
                self.log_probs[str(name)], self.digests[str(name)] = pair, digest

    def merge(self, other: StoredLogProbs) -> None:
        """Take in those of another rank."""
        self.log_probs |= other.log_probs
        self.digests |= other.digests

    def save(self, path: Path) -> None:
        """Write the file, whole or not at all."""
        names = sorted(self.log_probs)
        numbers = torch.tensor([self.log_probs[name] for name in names], dtype=torch.float64)
        digests = torch.tensor([list(self.digests[name]) for name in names], dtype=torch.uint8)
        make_writable_folder(path.parent)
        with atomic_file(path) as draft:
            tensors = {"log_probs": numbers, "digests": digests}
            notes = {"facts": json.dumps(self.facts), "ids": json.dumps(names)}
            write_safetensors(tensors, draft, notes | {"sha256": _checksum(tensors, notes)})

    @classmethod
    def load(cls, path: Path) -> StoredLogProbs:
        """Read the file.

        Raises:
            ConfigError: There is none, or it is damaged.
        """
        if not path.is_file():
            raise ConfigError(
                "there are no stored log-probabilities of the reference",
                where=str(path),
                key=KEY,
                way_out="Run mm posttrain reference with this configuration first.",
            )
        try:
            with safe_open(path, "pt") as file:
                notes = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in ("log_probs", "digests")}
            if _checksum(tensors, notes) != notes["sha256"]:
                raise ValueError("its content does not fit its checksum")
            names, stored = parse_json(notes["ids"]), cls(parse_json(notes["facts"]))
            numbers, digests = tensors["log_probs"].tolist(), tensors["digests"].tolist()
            for name, (chosen, rejected), digest in zip(names, numbers, digests, strict=True):
                stored.log_probs[name], stored.digests[name] = (chosen, rejected), bytes(digest)
            return stored
        except (SafetensorError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"is not a file of stored log-probabilities: {error}", where=str(path), key=KEY, way_out=AGAIN
            ) from None


def is_stored_log_probs(head: bytes) -> bool:
    """Whether a file begins as those of `StoredLogProbs.save` do."""
    # safetensors: a length of 8 bytes, then the header as JSON.
    return _BEGINNING.match(head, 8) is not None


def _checksum(tensors: Mapping[str, Tensor], notes: Mapping[str, str]) -> str:
    """Of the numbers and of what tells whose they are."""
    found = hashlib.sha256()
    for name in ("log_probs", "digests"):
        found.update(tensors[name].numpy().tobytes())
    for name in ("facts", "ids"):
        found.update(notes[name].encode())
    return found.hexdigest()


class StoredReference:
    """The reference whose log-probabilities are read.

    Args:
        stored: Of all rows.
    """

    def __init__(self, stored: StoredLogProbs) -> None:
        self._stored = stored

    def answers(self, batch: Batch, counts: Tensor) -> Tensor:
        """(2B,) of a micro-batch's answers.

        Raises:
            DataError: A pair is not known, or other tokens were scored.
        """
        chosen, rejected = counts.bool().chunk(2)
        alive = (chosen & rejected).tolist()
        found = []
        for name, digest, counted in zip(map(str, batch["sample_ids"]), digests_of(batch), alive, strict=True):
            if counted and self._stored.digests.get(name) != digest:
                what = "has other tokens than" if name in self._stored.digests else "is not among"
                raise DataError(
                    f"{what} the pairs whose log-probabilities are stored", where=name, key=KEY, way_out=AGAIN
                )
            found.append(self._stored.log_probs[name] if counted else (0.0, 0.0))
        # (B, 2) → (2B,): chosen answers stand in front of the rejected ones.
        return torch.tensor(found, dtype=torch.float64).t().reshape(-1)

    def describe(self) -> str:
        """Return a phrase for the log, with the number of pairs whose log-probabilities are stored."""
        return f"stored log-probabilities of {len(self._stored.log_probs):,} pairs"


def digests_of(batch: Batch) -> list[bytes]:
    """Of each pair's tokens and labels, without padding; B of them."""
    rows = []
    # How far a row is padded depends on the rows beside it.
    for kept, ids, labels in zip(batch["attention_mask"].bool(), batch["input_ids"], batch["labels"], strict=True):
        rows.append(torch.cat([ids[kept].long(), labels[kept].long()]).numpy().tobytes())
    half = len(rows) // 2  # the chosen answers stand in front of the rejected ones
    digests = []
    for chosen, rejected in zip(rows[:half], rows[half:], strict=True):
        digests.append(hashlib.sha256(chosen + b"|" + rejected).digest()[:_DIGEST_BYTES])
    return digests


def path_of_reference(training: TrainingArguments, posttrain: PosttrainArguments) -> Path:
    """The file.

    Raises:
        ConfigError: Nothing names it.
    """
    if posttrain.reference.path:
        return Path(posttrain.reference.path)
    if not training.save:
        raise ConfigError(
            "is not given, and neither is training.save, where the stored log-probabilities of the reference would be",
            key=KEY,
            way_out="Set training.save and run `mm posttrain reference`, or name the file that it wrote.",
        )
    return Path(training.save) / FILE


def facts_of_reference(arguments: Arguments, sets: Sequence[MMDataset]) -> dict[str, str]:
    """What stored log-probabilities are of, in words that are compared."""
    folder = weights_folder_of_load(arguments.training.load) or arguments.model.model_name_or_path
    hashes = [str(each.fingerprint().get("hash")) for each in sets]
    facts = {"rows or their template": "+".join(hashes)}
    if folder:
        facts["weights"] = base_weights_mark(Path(folder))
    low = arguments.training.quantization_plan
    return facts | {
        "posttrain.dpo.ld_alpha": str(arguments.posttrain.dpo.ld_alpha),
        "parallel.fsdp_plan.param_dtype": arguments.parallel.fsdp_plan.computed_in,
        "training.lora.quantize": str(reference_start(arguments).training.lora.quantize),
        "training.quantization_plan": "None" if low is None else low.model_dump_json(),
    }


def opened_reference(arguments: Arguments, sets: Sequence[MMDataset]) -> StoredLogProbs:
    """The stored log-probabilities of a run, compared with its weights, rows and settings.

    Raises:
        ConfigError: There are none, or they are of something else.
    """
    path = path_of_reference(arguments.training, arguments.posttrain)
    stored = StoredLogProbs.load(path)
    for name, fact in facts_of_reference(arguments, sets).items():
        found = stored.facts.get(name)
        if found != fact:
            values = ""
            if "." in name:  # a key; others are hashes
                values = f" ({found}, and the run has {fact})"
            raise ConfigError(
                f"the stored log-probabilities of the reference are of other {name}{values}",
                where=str(path),
                key=KEY,
                way_out=AGAIN,
            )
    return stored


def stored_log_probs(arguments: Arguments, say: Callable[[int], None]) -> StoredLogProbs:
    """Log-probabilities of all pairs of the data sets, the same on every rank. Stages of a pipeline are not needed: the
    model is sharded alone.

    Args:
        arguments: The whole configuration.
        say: Told how many pairs are done, of all ranks.

    Raises:
        MMError: Model or data are off.
    """
    parallel = arguments.parallel.model_copy(update={"pipeline_parallel_size": 1})
    arguments = arguments.model_copy(update={"parallel": parallel})
    with joined(arguments) as job:
        data = build_data(arguments.data, arguments.training, arguments.posttrain, job)
        sets = [each for each in (data.train, data.validation) if each is not None]
        loaders = [build_pass_loader(arguments.data, arguments.training, job.data_share, data.train)]
        if data.validation is not None:
            loaders.append(build_validation_loader(arguments.data, arguments.training, job.data_share, data.validation))
        stored = StoredLogProbs(facts_of_reference(arguments, sets))
        with job.setup("building the model"):
            work = ReferenceRun(arguments.posttrain.dpo, assemble_reference(arguments, job.device), job)
        for loader in loaders:
            for batches in loader.one_pass():
                stored.merge(work.of_all_ranks(batches, dict(stored.facts)))
                say(len(stored.log_probs))
    return stored


class ReferenceRun:
    """What it takes to run micro-batches through the reference."""

    def __init__(self, dpo: DpoArguments, assembled: Assembled, job: Job) -> None:
        model, head = assembled.model, assembled.applied.head
        assert head is not None
        self._applied, self._job = assembled.applied, job
        self._objective = PairObjective(model, head, dpo, None, RepeatedMedia(model))

    @torch.no_grad()
    def of_all_ranks(self, batches: Sequence[Batch], facts: dict[str, str]) -> StoredLogProbs:
        """Score the pairs of a step's micro-batches and merge those of all data ranks. Called by every rank."""
        prepared = [self._objective.prepare(batch, training=False) for batch in batches]
        self._let_towers_agree(prepared)
        found = StoredLogProbs(facts)
        for batch in prepared:
            own = batch
            if self._applied.context is not None:
                own = self._applied.context.split(batch)
            own = move(own, self._job.device)
            found.add(batch, self._objective.answers(self._applied.model, own).cpu())
        if self._job.data_group is not None:
            for other in self._gathered(found):
                found.merge(other)
        return found

    def _let_towers_agree(self, prepared: Sequence[Batch]) -> None:
        towers = self._applied.towers
        if towers is None:
            return
        present = towers.present(prepared)
        everywhere = [present] * self._job.world_size
        if self._job.world_size > 1:
            dist.all_gather_object(everywhere, present)
        active: set[str] = set()
        for each in everywhere:
            active |= {name for name, is_here in each.items() if is_here}
        towers.set_active(active)

    def _gathered(self, found: StoredLogProbs) -> list[StoredLogProbs]:
        group = self._job.data_group
        assert group is not None
        everywhere: list[StoredLogProbs] = [found] * group.size()
        dist.all_gather_object(everywhere, found, group=group)
        return everywhere
