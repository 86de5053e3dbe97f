"""What Megatron-style checkpoints of one kind of model look like, as data: names, merges, cuts and stages.

A family says how the hub's tensors become *whole* Megatron tensors (a key map, with layers and experts numbered over
the whole model), how tensor parallelism cuts each of those, and which of them stand at the two ends of a tower.
Dividing and joining them is the same for all families (`sharding.py`).

For a cut, a tensor is seen as `parts` equal parts along one dim (gate and up of a gated projection are two, a fused
[Q|K|V] is three), and each rank holds its run of every part. Where whole units must stay together (attention heads,
groups of a key with its queries), the run is a number of units.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from mindspeed_mm.checkpoint.keymap import KeyMap, KeyRule
from mindspeed_mm.checkpoint.lazy_tensor import Concatenated, LazyTensor, Padded, Sliced
from mindspeed_mm.core.errors import ModelFolderError, Problem, UsageError

Config = Mapping[str, Any]
"""A model's config.json."""


@dataclass(frozen=True)
class PipelineTower:
    """A stack of layers with what stands before and behind it, divided over the pipeline by a list of its own."""

    name: str
    """`text`, `vision` or `audio`: the flags are called `llm_pp_layers`, `vit_pp_layers` and `audio_pp_layers`."""
    prefix: str
    """Whole Megatron names of the tower begin so: `text_decoder.`. Tensor parallelism may have a size of its own."""
    layers: str
    """Names of its layers begin so, before the number: `text_decoder.decoder.layers.`."""
    first: tuple[str, ...]
    """Beginnings of the names that stand where its first layer is."""
    last: tuple[str, ...]
    """Beginnings of the names that stand where its last layer is."""
    everywhere: tuple[str, ...] = ()
    """Beginnings of the names that every stage holds."""


TEXT = PipelineTower(
    name="text",
    prefix="text_decoder.",
    layers="text_decoder.decoder.layers.",
    first=("text_decoder.embedding.",),
    last=("text_decoder.decoder.final_layernorm.", "text_decoder.output_layer."),
)
"""The language model of every family but those that are nothing else."""


@dataclass(frozen=True)
class MegatronModel:
    """One model of a family, from its configuration."""

    towers: tuple[PipelineTower, ...]
    depths: Mapping[str, int]
    """Layers of each tower, by its name."""
    rules: Sequence[KeyRule]
    """Hub name → whole Megatron name. Every rule has a way back."""
    cuts: Mapping[str, TensorCut]
    """Pattern of whole Megatron names (`{n}` stands for one part between dots) → how tensor parallelism cuts them. What
    no pattern takes is held by every rank."""
    tied_head: bool = False
    """The hub stores no head because it is the embedding. A pipeline of several stages holds a copy as the head."""
    vocabulary: int | None = None
    """Rows of the embedding, without padding; None: as many as are stored."""
    experts: int = 0
    """Routed experts in each layer, which expert parallelism divides."""
    parts_of_layers: Mapping[str, Collection[int]] = field(default_factory=dict)
    """Beginnings of names in a layer → the layers that have them, where not all have."""
    in_place_of_head: tuple[str, ...] | None = None
    """Names of what stands where others have the head of words; None: that head."""
    not_carried: tuple[str, ...] = ()
    """Beginnings of the hub's names that this layout has no place for: parts of a larger model."""

    @property
    def key_map(self) -> KeyMap:
        """The rules as a map."""
        return KeyMap(self.rules)

    @property
    def embedding(self) -> str:
        """Name of the whole embedding."""
        return self._in_text(EMBEDDING)

    @property
    def final_norm(self) -> str:
        """Name of the weight of the norm behind the last layer."""
        return self._in_text(FINAL_NORM)

    @property
    def head(self) -> str:
        """Name of the whole head."""
        return self._in_text(HEAD)

    @cached_property
    def hub_names(self) -> dict[str, str]:
        """Megatron's name → the hub's, of the first of each that a rule has."""
        return {rule.targets[0]: rule.sources[0] for rule in self.rules}

    def rules_of(self, tower: PipelineTower) -> list[KeyRule]:
        """Those that make tensors of one tower alone."""
        found = []
        for rule in self.rules:
            if all(name.startswith(tower.prefix) for name in rule.targets):
                found.append(rule)
        return found

    def cut_of(self, name: str) -> TensorCut | None:
        """How tensor parallelism cuts a whole tensor; None: not at all."""
        return next((cut for regex, cut in self._cuts if regex.fullmatch(name)), None)

    def tower_of(self, name: str) -> PipelineTower:
        """The tower that a whole tensor belongs to.

        Raises:
            ModelFolderError: It belongs to none.
        """
        for tower in self.towers:
            if name.startswith((tower.layers, *tower.first, *tower.last, *tower.everywhere)):
                return tower
        raise ModelFolderError("belongs to no tower of this family", key=name)

    def _in_text(self, name: str) -> str:
        """A name of `TEXT` as this model's own tower for text has it."""
        prefix = next((tower.prefix for tower in self.towers if tower.name == TEXT.name), TEXT.prefix)
        return prefix + name.removeprefix(TEXT.prefix)

    @cached_property
    def _cuts(self) -> list[tuple[re.Pattern[str], TensorCut]]:
        return [(_pattern(text), cut) for text, cut in self.cuts.items()]


FINAL_NORM = "text_decoder.decoder.final_layernorm.weight"
EMBEDDING = "text_decoder.embedding.word_embeddings.weight"
HEAD = "text_decoder.output_layer.weight"
EXPERT = re.compile(r"(?P<before>.*\.local_experts\.)(?P<number>[^.]+)(?P<after>\..*)")
"""A tensor of one routed expert; experts are numbered from 0 on every rank."""


@dataclass(frozen=True)
class MegatronFamily:
    """Models that one converter knows."""

    name: str
    """As people write it: `Qwen2.5-VL`."""
    model_types: tuple[str, ...]
    """Values of `model_type` in config.json."""
    describe: Callable[[Config], MegatronModel] = field(repr=False)
    """config.json → the model."""
    describe_canonical: Callable[[Config], MegatronModel] | None = field(default=None, repr=False)
    """The same where queries, keys and values, and gates and ups, stay apart; None: these models know no such form."""

    def model(self, config: Config, *, canonical: bool = False) -> MegatronModel:
        """The model that a config.json describes.

        Raises:
            ModelFolderError: It is of another family, or a number that the layout needs is missing.
            UsageError: The family knows no canonical form.
        """
        if config.get("model_type") not in self.model_types:
            raise ModelFolderError(
                f"is {config.get('model_type')!r}, and {self.name} is {' or '.join(self.model_types)}",
                key="model_type",
                way_out="Choose the converter of this model; mm convert finds it by itself.",
            )
        describe = self.describe_canonical if canonical else self.describe
        if describe is None:
            raise UsageError(
                f"{self.name} has fused projections alone", key="enable_canonical_hf_struct", way_out="Say false."
            )
        if problems := list(_wrong_numbers(config)):
            raise ModelFolderError("config.json describes no model", problems=problems)
        try:
            return describe(config)
        except KeyError as error:
            raise ModelFolderError(
                f"is missing in config.json; {self.name} needs it", key=str(error.args[0])
            ) from error
        except (TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
            raise ModelFolderError(f"config.json describes no {self.name}: {error}") from error


_SECTIONS = ("thinker_config", "text_config", "llm_config", "language_config", "vision_config", "audio_config")
_COUNTS = (
    *("hidden_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers", "vocab_size", "head_dim"),
    *("intermediate_size", "moe_intermediate_size", "depth", "layers", "num_heads", "embed_dim", "d_model"),
    *("encoder_layers", "encoder_attention_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim"),
)
_COUNTS_OR_NONE = ("num_experts", "num_local_experts", "n_routed_experts", "first_k_dense_replace")


def _wrong_numbers(config: Config, at: str = "") -> Iterator[Problem]:
    """What has to be a number and is none, or a section and is none."""
    for keys, least in ((_COUNTS, 1), (_COUNTS_OR_NONE, 0)):
        for key in keys:
            value = config.get(key)
            if value is not None and (type(value) is not int or value < least):
                yield Problem(f"{value!r} is not a whole number of at least {least}", "config.json", f"{at}{key}")
    heads, groups = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if type(heads) is int and type(groups) is int and groups > 0 and heads % groups:
        yield Problem(f"{groups} does not divide {heads} heads", "config.json", f"{at}num_key_value_heads")
    for key in _SECTIONS:
        section = config.get(key)
        if isinstance(section, Mapping):
            yield from _wrong_numbers(section, f"{at}{key}.")
        elif section is not None or (key in config and key == "vision_config"):
            yield Problem(f"{section!r} is not a section", "config.json", f"{at}{key}")


def _pattern(text: str) -> re.Pattern[str]:
    """A placeholder in it stands for one part of a name between dots."""
    regex = ""
    for part in re.split(r"(\{\w+\})", text):
        regex += r"[^.]+" if part.startswith("{") else re.escape(part)
    return re.compile(regex)


# --- how tensor parallelism divides one tensor ------------------------------------------------------------------------


@dataclass(frozen=True)
class TensorCut:
    """A dim that tensor parallelism divides."""

    dim: int
    parts: int = 1
    """Equal parts along the dim, each of which is divided for itself."""
    units: int | None = None
    """Units in each part that may not be torn; None: single rows."""
    uneven: bool = False
    """The first ranks may hold one unit more, where the number of ranks does not divide that of the units."""
    padded: bool = False
    """Of a vocabulary: the dim may be filled up with zeros, so that the ranks divide it evenly."""

    def piece(self, tensor: LazyTensor, rank: int, ranks: int, multiple: int = 1) -> LazyTensor:
        """What one rank holds.

        Args:
            tensor: The whole.
            rank: Which one, from 0.
            ranks: How many divide the tensor.
            multiple: Of a padded dim: its length becomes a multiple of this times `ranks`.

        Raises:
            ValueError: The ranks do not divide the units.
        """
        if self.padded:
            tensor = pad(tensor, self.dim, multiple * ranks)
        length = tensor.shape[self.dim]
        each, rest = divmod(length, self.parts)
        if rest:
            raise ValueError(f"{length} rows cannot be divided into {self.parts} equal parts")
        starts = self._starts(each, ranks)
        start, run = starts[rank], starts[rank + 1] - starts[rank]
        runs = [Sliced(tensor, self.dim, part * each + start, run) for part in range(self.parts)]
        return _end_to_end(runs, self.dim)

    def whole(self, pieces: Sequence[LazyTensor], true_length: int | None = None) -> LazyTensor:
        """The tensor again.

        Args:
            pieces: Those of all ranks, in order.
            true_length: Of a padded dim, before it was filled up; None: nothing was.

        Raises:
            ValueError: A piece is no `parts` equal parts, or the pieces are shorter than `true_length`.
        """
        in_order = []
        for part in range(self.parts):
            for piece in pieces:
                length, rest = divmod(piece.shape[self.dim], self.parts)
                if rest:
                    rows = piece.shape[self.dim]
                    raise ValueError(f"{rows} rows cannot be divided into {self.parts} equal parts")
                if self.parts > 1:
                    piece = Sliced(piece, self.dim, part * length, length)
                in_order.append(piece)
        tensor = _end_to_end(in_order, self.dim)
        if not self.padded or true_length is None or tensor.shape[self.dim] == true_length:
            return tensor
        if tensor.shape[self.dim] < true_length:
            raise ValueError(f"{tensor.shape[self.dim]} rows are fewer than the vocabulary's {true_length}")
        return Sliced(tensor, self.dim, 0, true_length)

    def _starts(self, length: int, ranks: int) -> list[int]:
        """Where each rank's run begins in a part of this length, and at last where it ends."""
        units = self.units or length
        if length % units:
            raise ValueError(f"{length} rows cannot be divided into {units} equal units")
        each, more = divmod(units, ranks)
        if more and not self.uneven:
            what = "heads or groups" if self.units else "rows"
            raise ValueError(f"{ranks} ranks do not divide {units} {what}")
        # The first `more` ranks hold a unit more than the others.
        rows_of_unit = length // units
        starts = []
        for rank in range(ranks + 1):
            units_before = each * rank + min(rank, more)
            starts.append(units_before * rows_of_unit)
        return starts


def _end_to_end(runs: Sequence[LazyTensor], dim: int) -> LazyTensor:
    if len(runs) == 1:
        return runs[0]
    return Concatenated(runs, dim)


def pad(tensor: LazyTensor, dim: int, multiple: int) -> LazyTensor:
    """The tensor with zeros behind it, so that `dim` is a multiple of `multiple`."""
    length = -(-tensor.shape[dim] // multiple) * multiple
    if length == tensor.shape[dim]:
        return tensor
    return Padded(tensor, dim, length)
