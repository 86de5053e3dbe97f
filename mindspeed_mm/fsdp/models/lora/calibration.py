"""First values of adapters that depend on data: what goes into the layers while some batches run through the model.

EVA (Paischer et al. 2024, arXiv:2410.07170)    A: the principal directions of a layer's inputs, B: zero
CorDA (Yang et al. 2024, arXiv:2406.05223)      A and B: the largest directions of W·C, with C = Σ x·xᵀ of the inputs,
                                                which are taken out of W

PEFT computes the same (the tests compare the numbers), and two of its functions are not called all the same.
`get_eva_state_dict` runs the model itself, over a data loader and until the directions no longer move, which stages of
a pipeline and spread sequences cannot do; what it is made of, `IncrementalPCA`, is used. `preprocess_corda` takes whole
weights and one sample a call, sums nothing over ranks, and imports the package `attrs`, which PEFT does not install.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.core.seeds import derive_seed
from mindspeed_mm.fsdp.models.loading.local_shard import whole_tensor
from mindspeed_mm.fsdp.models.lora.first_values import (
    Started,
    adapted_layers,
    from_first_rank,
    made_by_peft,
    set_magnitudes,
    start_layer,
)
from mindspeed_mm.fsdp.models.lora.names import ADAPTER, AdaptedLinear
from mindspeed_mm.fsdp.utils.model_parts import has_all

_KEY = "training.lora.init_lora_weights"


class Directions:
    """EVA's: principal directions, batch by batch, of the inputs of all ranks together; all layers keep their rank."""

    moves = False

    def __init__(self, rank: int) -> None:
        from peft.utils.incremental_pca import IncrementalPCA

        self._rank = rank
        self._pca = IncrementalPCA(n_components=rank, copy=True, lowrank=True, lowrank_seed=42)
        self._waiting: list[torch.Tensor] = []

    def add(self, samples: list[torch.Tensor]) -> None:
        """Take in a micro-batch: (tokens, features) of each sample, without padding. Called by all ranks. Fewer tokens
        than the rank wait for those of the next one."""
        self._waiting.append(of_all_ranks(torch.cat(samples).float()))
        if sum(map(len, self._waiting)) >= self._rank:
            self._pca.partial_fit(torch.cat(self._waiting))
            self._waiting.clear()

    def start(self, weight: torch.Tensor, layer: AdaptedLinear, seed: int) -> Started:
        """The adapter of a layer with this whole weight. Called on one rank."""
        if not has_all(self._pca, "components_"):
            raise ConfigError(
                f"'eva' looked at {sum(map(len, self._waiting))} tokens, fewer than the rank {self._rank}",
                key=_KEY,
                way_out="Raise training.lora.init_batches or training.micro_batch_size, or lower training.lora.rank.",
            )
        return Started(self._pca.components_, torch.zeros(weight.shape[0], self._rank))


class Covariance:
    """CorDA's: Σ x·xᵀ over tokens, the mean over samples, each scaled by its largest number."""

    moves = True

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._sum: torch.Tensor | None = None
        self._samples = 0

    def add(self, samples: list[torch.Tensor]) -> None:
        """Add x·xᵀ over the tokens of each sample, (tokens, features); ranks are summed in `complete`."""
        for sample in samples:
            rows = sample.float()
            # As PEFT scales: by the largest number, which need not be the largest magnitude.
            rows = rows / rows.max().abs()
            product = rows.T @ rows
            if self._sum is not None:
                product = self._sum + product
            self._sum = product
            self._samples += 1

    def start(self, weight: torch.Tensor, layer: AdaptedLinear, seed: int) -> Started:
        """Return first values of a layer's adapter, from the largest directions of W·C. Called on one rank, after
        `complete`."""
        covariance, inverse = invertible(self._mean)
        u, s, vh = torch.linalg.svd(weight.float() @ covariance, full_matrices=False)
        found = {"U_WC": u, "S_WC": s, "V_WC": (vh @ inverse).T}
        eigens = SimpleNamespace(**{name: tensor[..., : self._rank].clone() for name, tensor in found.items()})
        return made_by_peft(weight, layer, "corda", seed, eigens=eigens)

    def complete(self) -> None:
        """Sum the samples of all ranks and take their mean. Called once by every rank."""
        assert self._sum is not None, "no batch was looked at"
        count = torch.tensor(float(self._samples), device=self._sum.device)
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(self._sum)
            dist.all_reduce(count)
        self._mean = self._sum / count


def invertible(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The matrix with as much of its mean diagonal added as an inverse needs, and the inverse: PEFT's
    `collect_eigens_for_layer`, whose module needs a package that PEFT does not bring."""
    unit = torch.eye(len(matrix), device=matrix.device)
    damp = 0.01
    while True:
        damped = matrix + unit * matrix.diag().mean() * damp
        inverse = torch.linalg.inv(damped)
        if float(torch.dist(damped @ inverse, unit)) < 0.05:
            return damped, inverse
        damp *= 2


class Calibration:
    """What went into the adapted layers. Layers that are handed the very same tensor share one statistic."""

    def __init__(self, model: nn.Module, initialisation: str) -> None:
        self._model, self._initialisation = model, initialisation
        self._layers = dict(adapted_layers(model))
        self._statistics: dict[str, Directions | Covariance] = {}
        self._same: dict[str, str] = {}
        self._mask: torch.Tensor | None = None
        self._seen: dict[int, tuple[str, torch.Tensor]] = {}

    @torch.no_grad()
    def start_adapters(self, seed: int) -> None:
        """Give the adapters their values. Called by all ranks.

        Raises:
            ConfigError: There was nothing to look at.
        """
        for statistic in self._statistics.values():
            if isinstance(statistic, Covariance):
                statistic.complete()
        for name, layer in self._layers.items():
            if name not in self._same:
                raise ConfigError(
                    f"'{self._initialisation}' saw nothing go into {name}",
                    key=_KEY,
                    way_out="Raise training.lora.init_batches, or leave the layer out.",
                )
            statistic = self._statistics[self._same[name]]
            make = partial(statistic.start, whole_tensor(layer.base_layer.weight), layer, derive_seed(seed, name))
            start_layer(layer, from_first_rank(layer, make), moves=statistic.moves)
        set_magnitudes(self._model)

    def begin(self, _module: nn.Module, _args: object, kwargs: dict[str, object]) -> None:
        """Note the attention mask when the model is called, and forget the inputs of the call before."""
        mask, self._mask = kwargs.get("attention_mask"), None
        if isinstance(mask, torch.Tensor) and mask.dim() == 2:
            self._mask = mask.bool()
        self._seen.clear()

    def look(self, name: str, _module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        """Add a layer's inputs to its statistic, or share that of another layer which got the same tensor."""
        inputs = args[0].detach()
        known = self._seen.get(inputs.data_ptr())
        if known is not None and known[1].shape == inputs.shape:
            self._same.setdefault(name, known[0])
            return
        self._seen[inputs.data_ptr()] = (name, inputs)  # kept, so that no other tensor gets its memory meanwhile
        first = self._same.setdefault(name, name)
        if first not in self._statistics:
            kind: type[Directions | Covariance] = Covariance
            if self._initialisation == "eva":
                kind = Directions
            self._statistics[first] = kind(self._layers[name].r[ADAPTER])
        self._statistics[first].add(self._samples(inputs))

    def _samples(self, inputs: torch.Tensor) -> list[torch.Tensor]:
        """(tokens, features) of each sample; of inputs that have lost their rows, of all together."""
        if inputs.dim() != 3:
            return [inputs.reshape(-1, inputs.shape[-1])]
        if self._mask is None or inputs.shape[:2] != self._mask.shape:
            return list(inputs)
        return [row[mask] for row, mask in zip(inputs, self._mask, strict=True)]


@contextmanager
def calibration(model: nn.Module, initialisation: str) -> Iterator[Calibration]:
    """Inside, what runs through the model is looked at.

    Args:
        model: With adapters and weights, sharded or not.
        initialisation: `eva` or `corda`.
    """
    found = Calibration(model, initialisation)
    handles = [model.register_forward_pre_hook(found.begin, with_kwargs=True, prepend=True)]
    for name, layer in adapted_layers(model):
        handles.append(layer.base_layer.register_forward_pre_hook(partial(found.look, name)))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def of_all_ranks(rows: torch.Tensor) -> torch.Tensor:
    """The rows of all ranks, in their order."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return rows
    counts = torch.zeros(dist.get_world_size(), dtype=torch.long, device=rows.device)
    counts[dist.get_rank()] = len(rows)
    dist.all_reduce(counts)
    lengths = counts.tolist()
    # Equal sizes: not every backend gathers uneven ones.
    padded = rows.new_zeros(max(lengths), rows.shape[1])
    padded[: len(rows)] = rows
    gathered = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(gathered, padded)
    return torch.cat([part[:length] for part, length in zip(gathered, lengths, strict=True)])
