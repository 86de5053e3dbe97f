"""What a plugin for media makes and must be able to do: the contract between loading, rendering and batching."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from PIL import Image

from mindspeed_mm.core.errors import DataError
from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.fsdp.data.data_utils.decoding.audio import AudioClip
from mindspeed_mm.fsdp.data.data_utils.decoding.video_clip import VideoClip
from mindspeed_mm.fsdp.data.data_utils.sample import MEDIA_KINDS, MediaKind
from mindspeed_mm.fsdp.utils.model_parts import attribute_at, setting_of
from mindspeed_mm.fsdp.utils.processor import tokenizer_of

if TYPE_CHECKING:
    from mindspeed_mm.fsdp.utils.processor import Processor


@dataclass(frozen=True, slots=True)
class MediaFeatures:
    """One picture, video or sound, encoded."""

    kind: MediaKind
    token_ids: np.ndarray
    """(T,) int64, what takes the place of the item's placeholder token. Empty where the model has no placeholder."""
    tensors: dict[str, Any]
    """What the plugin's `collate` joins."""
    text: str | None = None
    """Where the replacement is not a run of special tokens (times of frames, line breaks): the text that takes the
    place of the placeholder's text before tokenisation, for its tokens depend on their neighbours. `token_ids` are
    then those of the text on its own."""


class Placeholder(NamedTuple):
    """What a chat template writes for an item."""

    token_id: int
    text: str


class ItemSize(NamedTuple):
    """What an item will be, known from its file's header."""

    tokens: int
    """The length of `MediaFeatures.token_ids`."""
    patches: int
    """Work of the encoder: patches of pictures and frames, frames of spectra."""
    text: str | None = None
    """As `MediaFeatures.text`."""


class MediaPlugin(Protocol):
    """Encodes the media of one kind of processor.

    It may also have `frame_sizes`, a `FrameSizes` that says how large frames are kept while a video is decoded,
    `hears_videos`, whether videos are loaded with their sound, `complete` (`CompleteBatch`), and `is_deterministic =
    True` in its own class: encoding draws no random numbers, so none are seeded, and samples may be encoded up front.
    """

    placeholders: Mapping[str, Placeholder]
    """Kind of media → what the chat template writes for an item; kinds that the model does not take are missing."""

    def encode_image(self, image: Image.Image) -> MediaFeatures:
        """Encode an RGB picture. Raises `DataError` for a size that the processor refuses."""

    def encode_video(self, clip: VideoClip) -> MediaFeatures:
        """Encode a decoded clip into token ids and the tensors of the model's tower."""

    def encode_audio(self, sound: AudioClip) -> MediaFeatures:
        """Encode a decoded sound into token ids and the tensors of the model's tower."""

    def measure(self, kind: MediaKind, header: object) -> ItemSize | None:
        """The size that encoding would give, from what `MediaLoader.probe` read; None: encode it to know.

        Raises:
            DataError: Encoding would refuse it.
        """

    def collate(self, media: Sequence[MediaFeatures]) -> dict[str, torch.Tensor]:
        """Join the tensors of a batch's media, in order, under the names that the model's `forward` takes."""

    def token_marks(self, input_ids: np.ndarray) -> dict[str, np.ndarray]:
        """Further inputs of the model with one number a token, of one sample (L,): `mm_token_type_ids` or the like."""


class CompleteBatch(Protocol):
    """The method `complete` of a media plugin whose model takes its media row by row, or a mask that says which tokens
    see which picture."""

    def __call__(self, batch: Mapping[str, object], media_of_rows: Sequence[Sequence[MediaFeatures]]) -> dict[str, Any]:
        """Return keys to add to a batch, or to replace, once its rows are padded and its media joined.

        It is called for the batches of training and for the questions of inference, evaluation and rollouts alike.

        Args:
            batch: `input_ids` and `attention_mask` (B, L), padded on the right in training and on the left before an
                answer, and what `collate` returned. Labels exist in training only. Of a packed row B is 1, and
                `cu_seq_lens_q` has its borders.
            media_of_rows: The media of each sample, in order.
        """


def complete_of(plugin: object) -> CompleteBatch | None:
    """The method `complete` of a media plugin; None where it has none."""
    complete: CompleteBatch | None = attribute_at(plugin, "complete")
    return complete


def no_such_media(kind: str) -> DataError:
    """The error of a row with a medium that the model does not take."""
    article = "an"
    if kind == "video":
        article = "a"
    return DataError(
        f"the row has {article} {kind}, but the model takes none",
        way_out="Name a model that takes them, or drop the row.",
    )


def placeholders_of(processor: object) -> dict[str, Placeholder]:
    """Kind of media → the token that stands for an item in a processor's chat template."""
    found: dict[str, Placeholder] = {}
    for kind in MEDIA_KINDS:
        token = setting_of(processor, object, f"{kind}_token")
        if token is not None:
            text = str(token)
            number = tokenizer_of(processor).convert_tokens_to_ids(text)
            if number is None:  # several tokens: the processor says which of them counts
                number = setting_of(processor, int, f"{kind}_token_id")
            found[kind] = Placeholder(int(number), text)
    return found


def tokens_of_media(processor: object) -> tuple[str, ...]:
    """Added tokens that a processor writes for media although the tokenizer does not call them special: those that its
    settings name (`img_patch_token`), and those that begin with such a name (`TILE_1`)."""
    tokenizer = tokenizer_of(processor)  # type: ignore[arg-type]
    if tokenizer is processor:
        return ()
    named = tuple(
        value
        for name, value in vars(processor).items()
        if name.endswith("_token") and isinstance(value, str) and value and not value.isspace()
    )
    added = tokenizer.added_tokens_decoder.values()
    return tuple(sorted(token.content for token in added if not token.special and token.content.startswith(named)))


class TokenMarks:
    """`mm_token_type_ids` (or `token_type_ids`, as Gemma3 calls them), where the processor's model takes them.

    Args:
        processor: The model's processor.
    """

    def __init__(self, processor: Processor) -> None:
        self._processor = processor
        self._name = None
        if _asks_for_marks(processor):
            self._name = _name_of_marks(processor)
        self._is_by_id = _owner_of(processor, "create_mm_token_type_ids") == "ProcessorMixin"
        """The general one marks a token by its id alone; a family's own may look further, as GLM's does."""
        self._of_ids = np.zeros(0, dtype=np.int32)

    def __call__(self, input_ids: np.ndarray) -> dict[str, np.ndarray]:
        """The marks of one sample (L,)."""
        if self._name is None:
            return {}
        if not self._is_by_id:
            return {self._name: self._ask(input_ids)}
        highest = int(input_ids.max(initial=-1))
        if highest >= len(self._of_ids):
            # Asked once for all ids: then the marks of a sample are one look-up instead of a loop in Python.
            self._of_ids = self._ask(np.arange(max(highest + 1, len(tokenizer_of(self._processor)))))
        return {self._name: self._of_ids[input_ids]}

    def _ask(self, input_ids: np.ndarray) -> np.ndarray:
        return np.asarray(self._processor.create_mm_token_type_ids([input_ids.tolist()])[0], dtype=np.int32)


def tells_replacements(processor: object) -> bool:
    """Whether a processor says what takes a placeholder's place. The omni models' do not in transformers 5.17."""
    return _owner_of(processor, "replace_video_token") != "ProcessorMixin"


def defaults_of(processor: object, part: str) -> JsonObject:
    """What a processor tells its tokenizer or the processor of a kind of media, unless a call says otherwise.

    Args:
        processor: The model's processor.
        part: `text_kwargs`, `videos_kwargs` and so on.
    """
    own = setting_of(processor, Mapping, part)
    if own is not None:
        return dict(own)
    of_class = setting_of(setting_of(processor, object, "valid_processor_kwargs"), Mapping, "_defaults") or {}
    return dict(of_class.get(part, {}))


def _asks_for_marks(processor: object) -> bool:
    """transformers says it on the processor; 5.17 among what it tells the tokenizer."""
    told = setting_of(processor, bool, "return_mm_token_type_ids")
    if told is not None:
        return told
    return bool(defaults_of(processor, "text_kwargs").get("return_mm_token_type_ids"))


def _name_of_marks(processor: Processor) -> str:
    """`token_type_ids` where the family itself lists it; many tokenizers do, and mean segments of text."""
    names = processor.model_input_names
    is_listed = _owner_of(processor, "model_input_names") != "ProcessorMixin" and "token_type_ids" in names
    if is_listed and "mm_token_type_ids" not in names:
        return "token_type_ids"
    return "mm_token_type_ids"


def marks_left_to_collators(processor: object) -> str | None:
    """`token_type_ids` where a family's processor gives them with every text and nothing here makes them; else None.

    PaliGemma's tell questions, which are seen in both directions, from answers: a collator makes them of the labels.
    """
    if setting_of(processor, object, "tokenizer") is None or _asks_for_marks(processor):
        return None
    name = _name_of_marks(processor)
    if name == "token_type_ids":
        return name
    return None


def _owner_of(processor: object, attribute: str) -> str:
    """Name of the class that a processor has an attribute from."""
    for kind in type(processor).__mro__:
        if attribute in vars(kind):
            return kind.__name__
    return ""
