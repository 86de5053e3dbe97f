"""What a data set is: samples by number, and what else the loader and the tools may ask of one.

Our own data sets derive from `MMDataset`, and a plugin's may. Any other object with `__len__` and `__getitem__` is
wrapped once, where it comes in (`as_mm_dataset`), so that no other code has to find out what a data set has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import FunctionType
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from mindspeed_mm.core.errors import ConfigError, Problem
from mindspeed_mm.core.json_file import JsonMapping, JsonObject
from mindspeed_mm.core.media_geometry import MediaGeometry, MediaSize
from mindspeed_mm.core.model_kinds import ModelKind
from mindspeed_mm.fsdp.params.data_args import BasicParameters, CollateParam

if TYPE_CHECKING:  # annotations only: these import torch and the decoders
    import numpy as np
    import torch

    from mindspeed_mm.fsdp.data.data_utils.data_collator import Collator
    from mindspeed_mm.fsdp.data.data_utils.encode import SampleOutline
    from mindspeed_mm.fsdp.data.data_utils.media import MediaLoader
    from mindspeed_mm.fsdp.data.data_utils.rows.row_table import Part
    from mindspeed_mm.fsdp.data.data_utils.sample import Sample, SampleSize
    from mindspeed_mm.fsdp.data.data_utils.template import ChatTemplate
    from mindspeed_mm.fsdp.data.datasets.generation.pixels import SampleDescription
    from mindspeed_mm.fsdp.models.diffusion.live_encoding import CaptionLengths


_CODE = (FunctionType, staticmethod, classmethod, property)
"""What a class has where it brings code of its own."""


class MMDataset:
    """Samples by number. A data set must have `__len__` and `__getitem__`; every other member has a default."""

    # --- how its samples are treated ----------------------------------------------------------------------------------

    on_bad_sample: str = "error"
    """`skip`: a sample that raises `DataError` is left out, and another stands in for it; `error`: it ends the run."""
    max_bad_fraction: float = 0.0
    """The run ends when a larger share of the samples is bad."""
    truncation: str = "error"
    """`error`: a sample that raises `TooLongError` ends the run; any other value: it is left out."""
    cuts_documents: bool = False
    """Samples longer than `cutoff_len` are documents, and training takes them in pieces: see `document_pieces`."""
    is_deterministic: bool = False
    """Reading a sample draws no random numbers, so none are seeded for it. A class says so of its own code and that of
    its bases: one that derives from it and has methods of its own says it again, or it is not taken for granted."""
    basic_parameters: BasicParameters = BasicParameters()
    """Packing, shares of a mixture, `cutoff_len` and encoding ahead are read of it."""
    parts: Sequence[Part] = ()
    """The samples of each entry of `dataset`, for shares of a mixture; empty: there are no entries."""
    rows_of_a_sample: int = 1
    """Rows of a batch that a sample becomes, padded to the same length: 2 for pairs, which are not packed."""
    left_out: Mapping[str, str] = {}
    """Place → reason, of rows that were found unusable before the start."""
    prompts_for: ModelKind | None = None
    """The kind of model that can be trained on what it makes of these samples itself, which are prompts under `stage:
    prompt`; None: they are none."""
    collate_fn: Collator | None = None
    """Samples → batch. It comes before `build_collator`."""

    # --- rows of files ------------------------------------------------------------------------------------------------

    has_rows: bool = False
    """Samples are encoded from rows, of which `row`, `sample`, `outline` and `measure` tell."""
    streams: bool = False
    """Rows are found while they are asked for: there is no length, but `has` tells."""
    processor: Any = None
    """The processor or tokenizer that renders rows."""
    template: ChatTemplate | None = None
    """The chat template that renders rows."""
    plugin: Any = None
    """The media plugin that encodes their media."""
    media: MediaLoader | None = None
    """What opens their media."""
    row_numbers: Sequence[int] | None = None
    """Row of each sample, where an epoch reads some rows more than once; None: each sample is a row."""

    # --- media of generators ------------------------------------------------------------------------------------------

    sizes: Sequence[MediaSize] | None = None
    """Size of each sample, for micro-batches of one size; with it go `geometry` and `describe`."""
    geometry: MediaGeometry | None = None
    """The sizes that the model takes."""
    is_prior: Sequence[bool] | None = None
    """Whether each sample preserves the prior (DreamBooth), for pairs of both kinds; None: none does."""
    is_raw: bool = False
    """Samples are pixels and captions, encoded while training."""
    noted_components: JsonMapping = {}
    """Configurations of components that the model's folder lacks and the features know."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for base in cls.__mro__:
            if "is_deterministic" in vars(base):
                return
            if any(name != "__init__" and isinstance(member, _CODE) for name, member in vars(base).items()):
                cls.is_deterministic = False
                return

    def __len__(self) -> int:
        """How many samples there are."""
        raise NotImplementedError

    def __getitem__(self, index: int) -> Any:
        """Sample `index`. Raises `DataError` where it cannot be used."""
        raise NotImplementedError

    def item(self, index: int, epoch: int) -> Any:
        """Sample `index` as it is in an epoch."""
        return self[index]

    def has(self, index: int) -> bool:
        """Whether there is a sample `index`; where rows are streamed, this reads on until it is found."""
        return index < len(self)

    def place(self, index: int) -> Any:
        """Where sample `index` comes from: its name in messages, as `str` gives it."""
        return index

    def measure(self, index: int) -> SampleSize | None:
        """The size of sample `index`, found without encoding it; None: it has to be encoded."""
        return None

    def known_sizes(self) -> np.ndarray | None:
        """(samples, 2) int64: tokens and patches of every sample, 0 and 0 where a row gives none; None: unknown."""
        return None

    def build_collator(self, collate_param: CollateParam, *, packs: bool | None = None) -> Collator | None:
        """The collator that fits the samples; None: the one that the configuration names.

        Args:
            collate_param: `dataloader_param.collate_param`.
            packs: Put all samples of a micro-batch into one row, or each into its own; None: as configured.
        """
        return None

    def fingerprint(self) -> JsonObject:
        """What tells this data set from another: a resumed run compares it, and so do the ranks of a job."""
        return {"class": type(self.origin).__qualname__, "rows": len(self)}

    def view_notes(self) -> list[str]:
        """What the log says of how media are seen."""
        return []

    def row_notes(self) -> list[str]:
        """What the log says of fields of rows that nothing reads."""
        return []

    @property
    def origin(self) -> Any:
        """The data set as its author made it, behind parts, caches and wrappers."""
        return self

    # --- rows of files ------------------------------------------------------------------------------------------------

    def row(self, index: int) -> JsonObject:
        """Row `index` as it stands in its file; empty where there is none."""
        return {}

    def sample(self, index: int) -> Sample:
        """Row `index`, converted but not encoded. Raises `DataError` where it does not fit."""
        raise NotImplementedError

    def outline(self, index: int) -> SampleOutline | tuple[SampleOutline, SampleOutline]:
        """What encoding makes of row `index`, without decoding media; of a preference row, of both answers."""
        raise NotImplementedError

    def joined_opening(self, index: int) -> str:
        """The end of what opens the answer of row `index`, where training has it in a token with the answer's first
        letters; empty where the tokens of the question alone are those of training, or nobody knows.

        Raises:
            DataError: The row is off, or its answer holds media.
        """
        return ""

    # --- media of generators ------------------------------------------------------------------------------------------

    def describe(self, index: int) -> SampleDescription:
        """What is known of a sample without decoding it. Raises `DataError` for a false declaration of its size."""
        raise NotImplementedError

    def caption_lengths(self) -> CaptionLengths | None:
        """What measures captions. Raises `ModelFolderError` where the model's folder lacks tokenizers."""
        return None

    def null_text(self) -> dict[str, torch.Tensor] | None:
        """Features of the empty caption, padded, without batch axis; None: samples are not features."""
        return None

    def draw_captions(self, seed: int) -> None:
        """Draw captions with this seed, `training.seed`, from now on."""

    def check_encoders(self) -> None:
        """Raise `ModelFolderError` when samples are raw and the model's folder lacks an encoder."""

    def row_changes(self) -> list[Problem]:
        """How the rows that the configuration names differ from those that features were made of."""
        return []


class DatasetView(MMDataset):
    """Samples of another data set: some of them, or the same ones read in another way. What is not overridden is as in
    the other.

    Args:
        whole: The other data set.
    """

    def __init__(self, whole: MMDataset) -> None:
        self._whole = whole
        # Every class attribute above has an annotation: one without it would not be handed on here.
        for name in MMDataset.__annotations__:
            setattr(self, name, getattr(whole, name))

    def _number(self, index: int) -> int:
        """The number that sample `index` has in the other data set."""
        return index

    @property
    @override
    def origin(self) -> Any:
        return self._whole.origin

    @override
    def place(self, index: int) -> Any:
        return self._whole.place(self._number(index))

    @override
    def measure(self, index: int) -> SampleSize | None:
        return self._whole.measure(self._number(index))

    @override
    def row(self, index: int) -> JsonObject:
        return self._whole.row(self._number(index))

    @override
    def sample(self, index: int) -> Sample:
        return self._whole.sample(self._number(index))

    @override
    def outline(self, index: int) -> SampleOutline | tuple[SampleOutline, SampleOutline]:
        return self._whole.outline(self._number(index))

    @override
    def joined_opening(self, index: int) -> str:
        return self._whole.joined_opening(self._number(index))

    @override
    def describe(self, index: int) -> SampleDescription:
        return self._whole.describe(self._number(index))

    @override
    def build_collator(self, collate_param: CollateParam, *, packs: bool | None = None) -> Collator | None:
        return self._whole.build_collator(collate_param, packs=packs)

    @override
    def fingerprint(self) -> JsonObject:
        return self._whole.fingerprint()

    @override
    def view_notes(self) -> list[str]:
        return self._whole.view_notes()

    @override
    def row_notes(self) -> list[str]:
        return self._whole.row_notes()

    @override
    def caption_lengths(self) -> CaptionLengths | None:
        return self._whole.caption_lengths()

    @override
    def null_text(self) -> dict[str, torch.Tensor] | None:
        return self._whole.null_text()

    @override
    def draw_captions(self, seed: int) -> None:
        self._whole.draw_captions(seed)

    @override
    def check_encoders(self) -> None:
        self._whole.check_encoders()

    @override
    def row_changes(self) -> list[Problem]:
        return self._whole.row_changes()


class FirstEpochView(DatasetView):
    """The same samples, each in all epochs with the caption and the view that it has in the first one: for what is
    stored once for a sample."""

    def __len__(self) -> int:
        return len(self._whole)

    def __getitem__(self, index: int) -> Any:
        return self._whole[index]

    @override
    def item(self, index: int, epoch: int) -> Any:
        return {**self._whole.item(index, 0), "epoch": epoch}


class WrappedDataset(MMDataset):
    """A data set that does not derive from `MMDataset`. Members that it has take the place of the defaults.

    Args:
        wrapped: Has `__len__` and `__getitem__`: a plugin's, a `torch.utils.data.Dataset`, a list.
    """

    def __init__(self, wrapped: Any) -> None:
        self._wrapped = wrapped
        missing = object()
        for name in (*MMDataset.__annotations__, *_OPTIONAL_METHODS):
            member = getattr(wrapped, name, missing)  # foreign: what it has is found out here, once
            if member is not missing:
                setattr(self, name, member)
        self.has_rows = {"sample", "outline", "measure"} <= vars(self).keys()

    def __len__(self) -> int:
        return len(self._wrapped)

    def __getitem__(self, index: int) -> Any:
        return self._wrapped[index]

    @property
    @override
    def origin(self) -> Any:
        return self._wrapped


_OPTIONAL_METHODS = tuple(
    name for name, member in vars(MMDataset).items() if callable(member) and not name.startswith("_")
)


def as_mm_dataset(dataset: object) -> MMDataset:
    """The data set itself, or, where it is of another kind, wrapped.

    Raises:
        ConfigError: It makes samples of its own, and a base of it tells their sizes.
    """
    _check_sizes_are_of_its_samples(type(dataset))
    if isinstance(dataset, MMDataset):
        return dataset
    return WrappedDataset(dataset)


def _check_sizes_are_of_its_samples(kind: type) -> None:
    """Raise where a class overrides what makes samples, and inherits what tells their sizes: packs and budgets would
    count with the sizes of other samples, and `mm data check` would show those."""
    made_by = min(_definer(kind, name) for name in ("__getitem__", "item"))
    stale = []
    for name in ("measure", "outline"):
        told_by = _definer(kind, name)
        if made_by < told_by < len(kind.__mro__) and kind.__mro__[told_by] not in (MMDataset, DatasetView):
            stale.append((name, kind.__mro__[told_by].__name__))
    if not stale:
        return
    whole = [f"{base}.{name}" for name, base in stale]
    way_out = (
        f"Define {' and '.join(name for name, _ in stale)} in {kind.__name__}, too; where the sizes are still right, "
        f"write {' and '.join(f'{name} = {base}.{name}' for name, base in stale)} in it."
    )
    if "conversation" in dir(kind):
        way_out += " A row that is only read otherwise overrides conversation(index) instead, of which all are made."
    raise ConfigError(
        f"{kind.__name__} makes samples of its own, but their sizes come from {' and '.join(whole)}, made for others",
        key="data.dataset_param.dataset_type",
        way_out=way_out,
    )


def _definer(kind: type, name: str) -> int:
    """Place in the order of bases of the class that defines a member; their number where none does."""
    for place, base in enumerate(kind.__mro__):
        if name in vars(base):
            return place
    return len(kind.__mro__)
