"""What there is to know of one row, read in a worker: sizes, roles, media, what is trained, or what is wrong."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mindspeed_mm.core.batch import IGNORED_LABEL
from mindspeed_mm.core.errors import MMError
from mindspeed_mm.core.media_geometry import MediaSize
from mindspeed_mm.fsdp.data.data_utils.data_collator import Collator
from mindspeed_mm.fsdp.data.data_utils.decoding.audio import AudioHeader
from mindspeed_mm.fsdp.data.data_utils.decoding.image_media import ImageHeader
from mindspeed_mm.fsdp.data.data_utils.decoding.video_clip import ClipHeader
from mindspeed_mm.fsdp.data.data_utils.plugins.media_features import MediaFeatures
from mindspeed_mm.fsdp.data.data_utils.sample import MediaItem, Sample, TooLongError
from mindspeed_mm.fsdp.data.dataloader.sampler import Pick
from mindspeed_mm.fsdp.data.dataloader.sizes import read_sample
from mindspeed_mm.fsdp.data.dataset import MMDataset
from mindspeed_mm.fsdp.data.datasets.generation.pixels import MediaHeader, SampleDescription
from mindspeed_mm.fsdp.data.datasets.generation.sizes import SizeChange
from mindspeed_mm.fsdp.models.diffusion.live_encoding import CaptionLength, CaptionLengths
from mindspeed_mm.tasks.data.collated import as_pair, tokens_of
from mindspeed_mm.tasks.data.faults import FAILED, RowFault, fault_of, fault_of_length

_HASH_BYTES = 8


@dataclass(frozen=True, slots=True)
class MediumFacts:
    """What the header of a medium says."""

    kind: str
    width: int = 0
    height: int = 0
    frames: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class RoleFacts:
    """A medium that a generator is given beside the target."""

    role: str
    medium: MediumFacts
    cut: float = 0.0
    """See `SizeChange`; 0 of sound."""


@dataclass(frozen=True, slots=True)
class DenoisedFacts:
    """A generator's sample: its bucket, its medium, its captions."""

    frames: int
    height: int
    width: int
    """Width of the bucket in pixels."""
    source_frames: int = 0
    fps: float = 0.0
    """Frame rate of the medium; 0: a still image, or not known."""
    enlarged: float = 0.0
    cut: float = 0.0
    """See `SizeChange`."""
    captions: int = 1
    has_empty_caption: bool = False
    caption_tokens: int = 0
    """Length of the longest caption."""
    most_tokens: int = 0
    """Tokens of a caption that are read; 0: nobody knows."""
    contradiction: str = ""
    roles: tuple[RoleFacts, ...] = ()
    """Of the media that the row names beside the target."""

    @property
    def bucket(self) -> str:
        """The bucket's size as messages write it."""
        return str(MediaSize(self.frames, self.height, self.width))


@dataclass(slots=True)
class RowFacts:
    """Facts of one row as a worker reads it: sizes, media and, where it cannot be used, the fault."""

    index: int
    place: str
    """`file:row`."""
    fault: RowFault | None = None
    tokens: int = 0
    full_tokens: int = 0
    """Before turns were left out to fit `cutoff_len`."""
    trained: int = 0
    """Tokens that the loss counts, after the shift; drawn latents among them."""
    patches: int = 0
    shrunk: bool = False
    roles: tuple[str, ...] = ()
    media: tuple[MediumFacts, ...] = ()
    decodes: bool = False
    """Media were decoded to know the row's size."""
    content: int = 0
    """Hash of messages and media; 0: not known."""
    row_id: str | None = None
    special: str = ""
    """A special token that the row's own text holds."""
    notes: tuple[str, ...] = ()
    """How the row was read where it leaves that open."""
    has_empty_answer: bool = False
    """A turn of the model that is trained says nothing."""
    unread: tuple[str, ...] = ()
    """What the row holds and nothing reads."""
    denoised: DenoisedFacts | None = None
    """Facts of a generator's sample."""


class DenoisedLook:
    """Reads the facts of a generator's samples; goes to the workers.

    Args:
        dataset: Of `build_mm_dataset`, for a generator.
        decode: Decode every medium as well; otherwise headers are read.
        lengths: Measures captions; None: the model's folder has no tokenizer.
        seed: Of the random numbers that samples draw, `training.seed`.
    """

    def __init__(self, dataset: MMDataset, *, decode: bool, lengths: CaptionLengths | None, seed: int) -> None:
        self.dataset, self._decode, self._lengths, self._seed = dataset, decode, lengths, seed

    def __call__(self, index: int) -> RowFacts:
        """The facts of a sample; what is wrong with it is one of them."""
        facts = RowFacts(index, str(self.dataset.place(index)))
        try:
            found = self.dataset.describe(index)
            roles = tuple(self._further(found))
            if self._decode:
                read_sample(self.dataset, Pick(0, index), self._seed)
        except MMError as error:
            facts.fault = fault_of(error)
            return facts
        header, change = MediaHeader(0, 0, found.size.frames), SizeChange(0.0, 0.0)
        if found.header is not None:
            header = found.header
            change = SizeChange.of(header, found.size)
        longest = CaptionLength(0, 0)
        if self._lengths is not None:
            longest = max(self._lengths(found.captions), key=lambda length: length.tokens, default=longest)
        facts.denoised = DenoisedFacts(
            *(found.size.frames, found.size.height, found.size.width),
            source_frames=header.frames,
            fps=header.fps,
            enlarged=change.enlarged,
            cut=change.cut,
            captions=len(found.captions),
            has_empty_caption=not all(caption.strip() for caption in found.captions),
            caption_tokens=longest.tokens,
            most_tokens=longest.limit,
            contradiction=found.contradiction,
            roles=roles,
        )
        kind = "video" if header.frames > 1 else "image"
        facts.media = (_facts_of_header(kind, header), *(each.medium for each in roles))
        return facts

    def _further(self, found: SampleDescription) -> Iterator[RoleFacts]:
        """Of the other media, by their headers. Raises `DataError` when one is missing or broken."""
        for role, kind, source in found.further:
            assert self.dataset.media is not None
            yield _role_facts(role, medium_facts(kind, self.dataset.media.probe(kind, source)), found.size)
        for role, (kind, *noted) in found.beside.items():
            header = MediaHeader(0, 0, 0)  # sounds have no size
            if noted:
                header = MediaHeader(*noted)
            yield _role_facts(role, _facts_of_header(kind, header), found.size)


def _role_facts(role: str, medium: MediumFacts, size: MediaSize) -> RoleFacts:
    if not medium.height:
        return RoleFacts(role, medium)
    return RoleFacts(role, medium, SizeChange.of(MediaHeader(medium.height, medium.width), size).cut)


def _facts_of_header(kind: str, header: MediaHeader) -> MediumFacts:
    return MediumFacts(kind, header.width, header.height, header.frames, _seconds(header.frames, header.fps))


def _seconds(frames: int, fps: float) -> float:
    """Length of a clip; 0 of a still image, which has no frame rate."""
    if not fps:
        return 0.0
    return frames / fps


class RowLook:
    """Reads the facts of rows; goes to the workers.

    Args:
        dataset: Of `build_mm_dataset`. What it can tell of itself (`row`, `sample`, `outline`) is asked; a plugin's
            that only has samples is read through these.
        decode: Decode every medium as well; otherwise headers are read.
        specials: Special tokens of the tokenizer, which a text should not hold.
        check_sample: See `OpenedData.sample_check`.
        collate: See `OpenedData.own_collator`.
        seed: Of the random numbers that samples draw, `training.seed`.
    """

    def __init__(
        self,
        dataset: MMDataset,
        *,
        decode: bool,
        specials: tuple[str, ...] = (),
        check_sample: Callable[[object], None] | None = None,
        collate: Collator | None = None,
        seed: int,
    ) -> None:
        self.dataset, self._decode, self._seed = dataset, decode, seed
        self._check_sample, self._collate = check_sample, collate
        self._are_prompts = dataset.basic_parameters.stage == "prompt"
        """The model answers the rows itself: nothing of them is trained."""
        # Of no special tokens a pattern that matches nothing.
        self._specials = re.compile("|".join(map(re.escape, specials)) or r"(?!)")

    def __call__(self, index: int) -> RowFacts:
        """The facts of a row; what is wrong with it is one of them."""
        facts = RowFacts(index, str(self.dataset.place(index)))
        try:
            sample = self._describe(facts, index)
            self._measure(facts, index, sample)
            if facts.tokens and not facts.trained and not self._are_prompts:
                facts.fault = RowFault(
                    "nothing is trained", "no trainable token: there is nothing to compute a loss for"
                )
        except TooLongError as error:
            facts.fault = fault_of_length(error)
        except MMError as error:
            facts.fault = fault_of(error)
        except Exception as error:  # noqa: BLE001 (a plugin's data set is foreign code: whatever it raises is the row's)
            facts.fault = RowFault(FAILED, f"{type(error).__name__}: {error}")
        return facts

    def _describe(self, facts: RowFacts, index: int) -> Sample | None:
        """What the raw row and the converted one tell."""
        row_id = self.dataset.row(index).get("id")
        if isinstance(row_id, str | int):
            facts.row_id = str(row_id)
        if not self.dataset.has_rows:
            return None
        sample = self.dataset.sample(index)
        facts.roles = tuple(message["role"] for message in sample.messages)
        facts.unread = tuple(map(str, sample.unread))
        facts.content = content_hash(sample)
        facts.notes = tuple(sample.notes)
        for part in both(sample):
            facts.has_empty_answer |= not self._are_prompts and has_empty_answer(part)
            for text in texts_of(part):
                found = self._specials.search(text)
                if found and not facts.special:
                    facts.special = found.group()
        return sample

    def _measure(self, facts: RowFacts, index: int, row: Sample | None) -> None:
        """Sizes and the label mask."""
        if row is not None:
            before = self._decoded()
            for outline in as_pair(self.dataset.outline(index)):
                facts.tokens += outline.size.tokens
                facts.patches += outline.size.patches
                facts.full_tokens += outline.full_tokens
                facts.trained += trained_tokens(outline.labels, outline.weights)
                facts.shrunk |= outline.shrunk
            facts.decodes = self._decoded() > before
            facts.media = tuple(self._header(item) for item in row.media)
            if self._decode and facts.media:
                # what decoding raises is the row's fault
                _ = self.dataset[index]
            return
        item = read_sample(self.dataset, Pick(0, index), self._seed)
        if self._check_sample is not None:
            self._check_sample(item)
        for _, arrays in tokens_of(item, self._collate, facts.place).arrays:
            length = len(arrays.ids)
            facts.tokens, facts.full_tokens = facts.tokens + length, facts.full_tokens + length
            facts.trained += trained_tokens(arrays.labels, arrays.weights) + int(arrays.is_drawn.sum())
        for sample in as_pair(item):
            if isinstance(sample, dict):
                facts.shrunk |= bool(sample.get("shrunk"))
                for medium in sample.get("media") or ():
                    kind = "medium"  # of a plugin's own class
                    if isinstance(medium, MediaFeatures):
                        kind = medium.kind
                    facts.media += (MediumFacts(kind),)

    def _decoded(self) -> int:
        if self.dataset.media is not None:
            return self.dataset.media.decoded
        return 0

    def _header(self, item: MediaItem) -> MediumFacts:
        header = None
        if self.dataset.media is not None:
            header = self.dataset.media.probe(item.kind, item.source)
        return medium_facts(item.kind, header)


def both(sample: Sample) -> list[Sample]:
    """A row and, where it is a preference row, its worse answer."""
    if sample.rejected is None:
        return [sample]
    return [sample, sample.rejected]


def trained_tokens(labels: npt.ArrayLike | None, weights: npt.ArrayLike | None = None) -> int:
    """Labels that the loss counts: the first token has nothing before it to be told from."""
    if labels is None:
        return 0
    # (L - 1,): the label of token n is what token n - 1 is trained to predict
    counted = np.asarray(labels)[1:] != IGNORED_LABEL
    if weights is not None:
        counted &= np.asarray(weights)[1:] != 0
    return int(counted.sum())


def has_empty_answer(sample: Sample) -> bool:
    """Whether a turn of the model that counts has neither words nor media, thoughts or calls of tools: only its end
    mark would be trained."""
    for message, weight in zip(sample.messages, sample.weights, strict=True):
        if message["role"] != "assistant" or weight == 0:
            continue
        content = message["content"]
        if isinstance(content, str):
            content = content.strip()
        if not (content or message.get("tool_calls") or message.get("reasoning_content")):
            return True
    return False


def texts_of(sample: Sample) -> list[str]:
    """Every text of a sample that a person or a model wrote."""
    found = []
    if sample.text is not None:
        found.append(sample.text)
    for message in sample.messages:
        content = message.get("content")
        if isinstance(content, str):
            content = [{"text": content}]
        for part in content or ():
            text = part.get("text")
            if text:
                found.append(text)
    return found


def content_hash(sample: Sample) -> int:
    """A number that two rows share when they say the same about the same media."""
    parts = []
    for each in both(sample):
        media = list(map(_item_words, each.media))
        parts.append([each.messages, each.text, media, each.weights, each.tools])
    text = json.dumps(parts, ensure_ascii=False, default=repr).encode("utf-8", "replace")
    return int.from_bytes(hashlib.blake2b(text, digest_size=_HASH_BYTES).digest(), "big")


def _item_words(item: MediaItem) -> str:
    source = item.source
    if isinstance(source, bytes):
        return hashlib.blake2b(source, digest_size=_HASH_BYTES).hexdigest()
    return f"{item.kind} {source!r}"


def medium_facts(kind: str, header: ImageHeader | ClipHeader | AudioHeader | None) -> MediumFacts:
    """The numbers of what `MediaLoader.probe` gives: a picture's, a clip's or a recording's header."""
    match header:
        case ImageHeader():
            return MediumFacts(kind, header.width, header.height)
        case ClipHeader():
            seconds = _seconds(header.total_frames, header.fps)
            return MediumFacts(kind, header.width, header.height, header.total_frames, seconds)
        case AudioHeader():
            return MediumFacts(kind, seconds=header.seconds)
    return MediumFacts(kind)


Look = Callable[[int], RowFacts]
