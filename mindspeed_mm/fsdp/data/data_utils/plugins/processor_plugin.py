"""Any processor of transformers as a media plugin: it is asked for the tensors of an item and for what takes its place.

Nothing is known of families here: the processor is called with its own placeholder for a text and one item, and says
itself what replaces it. So a new model whose processor is of this kind needs no code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property, partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image

from mindspeed_mm.core.batch import BATCH_KEYS, Batch, first_of
from mindspeed_mm.core.errors import ConfigError, DataError
from mindspeed_mm.core.json_file import JsonMapping
from mindspeed_mm.fsdp.data.data_utils.decoding.audio import AudioClip
from mindspeed_mm.fsdp.data.data_utils.decoding.video_clip import ClipHeader, FrameSizes, VideoClip
from mindspeed_mm.fsdp.data.data_utils.media import PixelBudget
from mindspeed_mm.fsdp.data.data_utils.plugins.media_features import (
    ItemSize,
    MediaFeatures,
    Placeholder,
    TokenMarks,
    complete_of,
    no_such_media,
    placeholders_of,
    tells_replacements,
)
from mindspeed_mm.fsdp.data.data_utils.rendering.placement import TextWriter, WritingProbe, WrittenItem, without
from mindspeed_mm.fsdp.data.data_utils.sample import MediaKind
from mindspeed_mm.fsdp.params.data_args import PreprocessParameters
from mindspeed_mm.fsdp.utils.model_parts import setting_of
from mindspeed_mm.fsdp.utils.processor import tokenizer_of

if TYPE_CHECKING:
    from transformers.video_utils import VideoMetadata

    from mindspeed_mm.fsdp.utils.processor import Processor

_KEY = "data.dataset_param.preprocess_parameters"
_ARGUMENTS = {"image": "images", "video": "videos", "audio": "audio"}
_TEXT_KEYS = frozenset(
    {
        *("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "labels"),
        *("text_replacement_offsets", "video_metadata"),
    }
)
_COUNTS = frozenset({"num_patches", "num_crops", "num_audio_tokens", "num_chunks_per_video"})
"""What processors count for themselves and no model's `forward` takes."""
_PADDED = frozenset(
    {"pixel_values", "pixel_attention_mask", "input_features", "feature_attention_mask", "input_features_mask"}
)
"""Names of the tensors that are padded with zeros where items differ in size or number of tiles, as the processors do.
A mask or a size says where, or the model ignores a tile of zeros."""
_SHOWN = ((224, 168), (168, 336))
"""Width and height of the pictures that a processor is shown to see what it writes."""
_REFUSALS = (ValueError, RuntimeError, TypeError, LookupError, AttributeError, DataError)
_PICTURES_OF_ROWS = "batch_num_images"
"""What a processor returns that cuts an image into tiles only where it is alone in its row (LLaVA-OneVision)."""


class ProcessorPlugin:
    """Asks the processor.

    Args:
        processor: The model's processor.
        preprocess: `preprocess_parameters`.

    Raises:
        ConfigError: The processor does not say how media become tokens, or has no step that is asked for.
    """

    is_deterministic = True
    """Encoding draws no random numbers; a subclass says so itself, or is taken to draw some."""

    frame_sizes: FrameSizes | None = None
    """How large frames are kept; None: within the pixel limits of the configuration."""

    of_text: frozenset[str] = frozenset()
    """What the processor makes of whole texts, such as a mask that says which tokens see which picture: a subclass
    makes these of whole rows, in `complete` (`CompleteBatch`)."""

    def __init__(self, processor: Processor, preprocess: PreprocessParameters) -> None:
        self._processor, self._tokenizer = processor, tokenizer_of(processor)
        self._borders = {setting_of(self._tokenizer, int, f"{name}_token_id") for name in ("bos", "eos", "cls", "sep")}
        self._fit_to_be_asked = set[MediaKind]()
        self._preprocess, self._within = preprocess, dict[tuple[tuple[str, int], ...], ProcessorPlugin]()
        self._of_many: ProcessorPlugin | None = None
        self.placeholders: Mapping[str, Placeholder] = placeholders_of(processor)
        self._marks = TokenMarks(processor)
        self._hears: Any = setting_of(processor, object, "feature_extractor")
        if not self.placeholders and self._hears is None:
            raise ConfigError(
                f"{type(processor).__name__} does not say how media become tokens",
                key="model.model_name_or_path",
                way_out="Write a plugin for it: `register_mm_plugin`.",
            )
        self._special_ids = np.array(sorted(self._tokenizer.get_added_vocab().values()), dtype=np.int64)
        self._image_options = _image_options(processor, preprocess)
        self._budget = PixelBudget(preprocess.image_max_pixels, preprocess.image_min_pixels or 0)
        self.pictures_seen_alone: int | None = _pictures_seen_alone(processor)
        """Pictures of a row beyond which the processor shows each otherwise than alone."""
        self._is_among_others = False
        """A picture is shown to the processor as one of several in a row."""
        self.hears_videos = bool(preprocess.use_audio_in_video)
        """Whether the sound of videos is loaded with them."""
        self._check_sound(preprocess)

    def within(self, bounds: Mapping[str, int]) -> ProcessorPlugin:
        """The same plugin with other keys of `preprocess_parameters` for the sizes of media."""
        key = tuple(sorted(bounds.items()))
        if key not in self._within:
            self._within[key] = type(self)(self._processor, self._preprocess.model_copy(update=dict(bounds)))
        return self._within[key]

    def among(self, pictures: int) -> ProcessorPlugin:
        """The plugin that shows a picture as the processor shows it in a row of so many.

        Args:
            pictures: Of the row, this one included.

        Raises:
            DataError: The processor shows it otherwise than alone, and has no `images_kwargs_of_many` to ask for it.
        """
        most = self.pictures_seen_alone
        if most is None or pictures <= most:
            return self
        if self._of_many is None:
            options = setting_of(self._processor, Mapping, "images_kwargs_of_many")
            if options is None and not _counts_pictures(self._processor):
                raise DataError(
                    f"the row has {pictures} pictures, and this model's processor cuts more than {most} otherwise "
                    "than one",
                    key="images",
                    way_out=f"Give such models rows of at most {most}, or take a model of another family.",
                )
            # Shares all but two settings with this plugin; made once.
            self._of_many = copy(self)
            self._of_many._image_options = {**self._image_options, **(options or {})}
            self._of_many._is_among_others = options is None
        return self._of_many

    # --- one item ----------------------------------------------------------------------------------------------------

    def encode_image(self, image: Image.Image) -> MediaFeatures:
        """A picture, within the pixel limits of the configuration."""
        height, width = self._budget.size(1, image.height, image.width)
        if (height, width) != (image.height, image.width):
            image = Image.fromarray(self._budget.resize(image, height, width))
        what = f"an image of {width} × {height}"
        if not self._is_among_others:
            return self._asked("image", image, what, images_kwargs=self._image_options)
        # Any second picture will do: the first one's tensors and tokens do not depend on it.
        made = self._asked("image", [image, Image.new("RGB", (32, 32))], what, images_kwargs=self._image_options)
        return replace(made, tensors={name: values[:1] for name, values in made.tensors.items()})

    def encode_video(self, clip: VideoClip) -> MediaFeatures:
        """A clip; one that the processor refuses with so few frames is filled up to what towers take at once."""
        try:
            return self._encode_clip(clip)
        except DataError:
            if len(clip.frames) >= self._frames_at_once:
                raise
            return self._encode_clip(clip.at_least(self._frames_at_once))

    def _encode_clip(self, clip: VideoClip) -> MediaFeatures:
        what = f"a video of {len(clip.frames)} frames of {clip.frames.shape[2]} × {clip.frames.shape[1]}"
        around = ("", "")
        inputs: dict[str, Any] = {"videos_kwargs": self._video_options(clip.header)}
        if clip.sound is not None:
            inputs |= {"audio": [clip.sound.samples], "audio_kwargs": {"sampling_rate": clip.sound.rate}}
            if tells_replacements(self._processor):
                inputs |= {"audio_from_video_indices": [0], "load_audio_from_video": True}
            else:  # as the processors of transformers 5.17 take a video with its sound: with the marks around it
                inputs["videos_kwargs"] |= {"use_audio_in_video": True}
                around = (self._processor.vision_bos_token, self._processor.vision_eos_token)
        made = self._asked("video", clip.frames, what, around, **inputs)
        if clip.sound is not None:
            self._check_window(clip.sound, made.tensors)
        return made

    def encode_audio(self, sound: AudioClip) -> MediaFeatures:
        """A sound that fits the model's window.

        Raises:
            DataError: The model takes no sound, or the sound does not fit.
        """
        options = {"sampling_rate": sound.rate}
        if "audio" in self.placeholders:
            made = self._asked("audio", sound.samples, f"a sound of {sound.seconds:.2f} s", audio_kwargs=options)
        elif self._hears is not None:  # an encoder of its own: nothing stands in the text
            tensors = dict(self._hears(sound.samples, return_tensors="pt", **options))
            made = MediaFeatures("audio", np.zeros(0, dtype=np.int64), tensors)
        else:
            raise no_such_media("audio")
        self._check_window(sound, made.tensors)
        return made

    def measure(self, kind: MediaKind, header: object) -> ItemSize | None:
        """A processor does not tell."""
        is_heard = kind == "audio" and self._hears is not None
        if kind not in self.placeholders and not is_heard:
            raise no_such_media(kind)
        return None

    # --- many --------------------------------------------------------------------------------------------------------

    def collate(self, media: Sequence[MediaFeatures]) -> Batch:
        """Join along the first axis, that of items or patches."""
        values: dict[str, list[object]] = {}
        for item in media:
            for name, value in item.tensors.items():
                values.setdefault(name, []).append(value)
        batch: Batch = {name: self._joined(name, of_items) for name, of_items in values.items()}
        if _PICTURES_OF_ROWS in batch:
            batch[_PICTURES_OF_ROWS] = _counts_of_rows(batch[_PICTURES_OF_ROWS].tolist())
        if self.hears_videos and any(item.kind == "video" for item in media):
            batch["use_audio_in_video"] = True
        return batch

    def token_marks(self, input_ids: np.ndarray) -> dict[str, np.ndarray]:
        """As the processor marks them."""
        return self._marks(input_ids)

    def _joined(self, name: str, values: Sequence[object]) -> torch.Tensor:
        tensors = [torch.as_tensor(value) for value in values]
        shapes = {tensor.shape[1:] for tensor in tensors}
        have_same_axes = len(set(map(len, shapes))) == 1
        if len(shapes) > 1 and name in _PADDED and have_same_axes:
            tensors = _padded(tensors)
        try:
            return torch.cat(tensors)
        except RuntimeError as error:
            sizes = sorted({str(tuple(tensor.shape)) for tensor in tensors})
            raise DataError(f"media of a batch do not join ({name}: {', '.join(sizes)}): {error}") from error

    # --- the processor -----------------------------------------------------------------------------------------------

    def _asked(
        self, kind: MediaKind, item: object, what: str, around: tuple[str, str] = ("", ""), **inputs: object
    ) -> MediaFeatures:
        """Call the processor with one item and its placeholder; with a list of pictures as with a row of them, of which
        the first one's tokens are returned."""
        if kind not in self.placeholders:
            raise no_such_media(kind)
        count = 1
        if isinstance(item, list):
            count = len(item)
        ask = partial(
            self._processor,
            return_text_replacement_offsets=True,
            return_tensors="pt",
            **{_ARGUMENTS[kind]: [item]},
            **inputs,
        )
        text = (self.placeholders[kind].text * count).join(around)
        try:
            made = ask(text=[text])
            tensors = {name: made[name] for name in made if name not in _TEXT_KEYS | _COUNTS | self.of_text}
            if count == 1 and kind not in self._fit_to_be_asked:
                self._check_asked_alone(kind, tensors, made, ask, text)
        except (ValueError, RuntimeError) as error:
            way_out = "Drop the row."
            if kind not in self._fit_to_be_asked:
                name = type(self._processor).__name__
                way_out += f" If all are refused, {name} needs a media plugin: `register_mm_plugin` (docs/data.md, B)."
            raise DataError(f"the processor refuses {what}: {error}", way_out=way_out) from error
        return self._features(kind, self._written(made).removeprefix(around[0]).removesuffix(around[1]), tensors)

    def _check_asked_alone(
        self,
        kind: MediaKind,
        tensors: Mapping[str, object],
        alone: Mapping[str, object],
        ask: partial[Mapping[str, object]],
        text: str,
    ) -> None:
        """Raise `ConfigError` where what a processor makes of an item's placeholder alone says nothing of the item in a
        text: tensors made of the text, and placeholders that it does not replace where they stand."""
        unknown = tensors.keys() - BATCH_KEYS.keys()
        # The second call costs as much as the first: it is made for the first item of a kind alone.
        if unknown or not _tells_places(alone):
            among_words = ask(text=[f"a {text} b"])
            of_text = [name for name in sorted(unknown) if not _same(tensors[name], among_words.get(name))]
            name = type(self._processor).__name__
            if of_text:
                raise ConfigError(
                    f"{name} makes {', '.join(of_text)} of the whole text, not of its {kind} alone",
                    key="model.model_name_or_path",
                    way_out="Write a media plugin for it (`register_mm_plugin`) that derives from ProcessorPlugin, "
                    "lists these names in `of_text` and makes them of whole rows in `complete` (docs/data.md, B).",
                )
            if kind != "image" and not _tells_places(alone):  # pictures are asked about in `_writer`
                ours = self._tokenizer(f"a {self._written(alone)} b")["input_ids"]
                if without(self._borders, ours) != without(self._borders, _ids_of(among_words)):
                    raise self._writes_elsewhere(kind)
        if kind == "image":
            self.written_items(text)
            if complete_of(self) is None:
                self._check_joined(tensors, ask, text)
        self._fit_to_be_asked.add(kind)

    def _check_joined(self, tensors: Mapping[str, object], ask: partial[Mapping[str, object]], text: str) -> None:
        """Raise `ConfigError` where whole numbers that a processor makes of two pictures are not those of each, joined:
        Molmo2's count patches through all pictures of a call."""
        try:
            of_two = ask(text=[text * 2], images=[ask.keywords["images"] * 2])
            joined = self.collate([MediaFeatures("image", np.zeros(0, dtype=np.int64), dict(tensors))] * 2)
        except _REFUSALS:
            # It takes a single picture, or one way to give it.
            return
        apart = []
        for name in joined.keys() & of_two.keys():
            own, whole = torch.as_tensor(joined[name]), torch.as_tensor(of_two[name])
            if own.shape == whole.shape and not own.is_floating_point() and not own.equal(whole):
                apart.append(name)
        if apart:
            raise ConfigError(
                f"{type(self._processor).__name__} makes {', '.join(sorted(apart))} of all pictures of a call, not of "
                "each by itself",
                key="model.model_name_or_path",
                way_out="Write a media plugin for it (`register_mm_plugin`) that derives from ProcessorPlugin and "
                "whose `collate` moves these numbers as the processor does (docs/data.md, B).",
            )

    # --- pictures among words ----------------------------------------------------------------------------------------

    def written_items(self, text: str) -> Sequence[WrittenItem] | None:
        """What the processor writes for each picture of a text, where that is not what it writes for each alone.

        Args:
            text: Rendered, with placeholders; None of them is a user's word.

        Raises:
            ConfigError: What it writes depends on what stands around a picture, and on the picture.
            DataError: It changes the words, too.
        """
        if self._writer is None:
            return None
        return self._writer.items(text)

    @cached_property
    def _writer(self) -> TextWriter | None:
        """Writes whole texts; None where the processor's own call gives the tokens of every picture alone, put into the
        text, whatever stands around it. A plugin that encodes pictures itself is believed."""
        if "image" not in self.placeholders or type(self).encode_image is not ProcessorPlugin.encode_image:
            return None
        placeholder = self.placeholders["image"].text
        pictures = [Image.new("RGB", size) for size in _SHOWN]

        def show(text: str, order: Sequence[int]) -> list[int]:
            return _ids_of(self._shown(text, [pictures[number] for number in order]))

        alone = [self._written(self._shown(placeholder, [picture])) for picture in pictures]
        own = [self._features("image", written, {}) for written in alone]
        probe = WritingProbe(self._processor, placeholder, show, own, self._borders)
        try:
            return probe.find_writer(with_several=self.pictures_seen_alone is None)
        except _REFUSALS as error:
            raise self._writes_elsewhere("image") from error

    def _shown(self, text: str, pictures: Sequence[Image.Image]) -> JsonMapping:
        """What the processor makes of a text with pictures."""
        ask = partial(
            self._processor,
            text=[text],
            images_kwargs=self._image_options,
            return_text_replacement_offsets=True,
            return_tensors="pt",
        )
        made: JsonMapping
        try:
            made = ask(images=[list(pictures)])  # those of each text in a list of their own
        except _REFUSALS:
            made = ask(images=list(pictures))
        return made

    def _writes_elsewhere(self, kind: MediaKind) -> ConfigError:
        return ConfigError(
            f"{type(self._processor).__name__} does not write the tokens of its {kind} where the placeholder stands in "
            "a text, or writes others among words than alone",
            key="model.model_name_or_path",
            way_out="Write a media plugin for it (`register_mm_plugin`) that derives from ProcessorPlugin and "
            f"encodes a single {kind} (docs/data.md, B).",
        )

    def _written(self, made: JsonMapping) -> str:
        """What a processor wrote in the place of the only placeholder."""
        if _tells_places(made):
            return made["text_replacement_offsets"][0][0]["replacement"]
        # Some processors do not tell it, those of the omni models in transformers 5.17 and those that know no
        # replacements. The text is nothing else, but for the tokens that begin and end every text.
        ids = made["input_ids"][0].tolist()
        while ids and ids[0] in self._borders:
            del ids[0]
        while ids and ids[-1] in self._borders:
            del ids[-1]
        return self._tokenizer.decode(ids)

    def _features(self, kind: MediaKind, replacement: str, tensors: dict[str, Any]) -> MediaFeatures:
        ids = np.asarray(self._tokenizer(replacement, add_special_tokens=False)["input_ids"], dtype=np.int64)
        # A run of special tokens stays itself wherever it stands; other text is tokenised with its neighbours.
        if np.isin(ids, self._special_ids).all():
            return MediaFeatures(kind, ids, tensors)
        return MediaFeatures(kind, ids, tensors, replacement)

    @property
    def _frames_at_once(self) -> int:
        return setting_of(setting_of(self._processor, object, "video_processor"), int, "temporal_patch_size") or 1

    def _video_options(self, header: ClipHeader) -> dict[str, object]:
        return {
            "do_sample_frames": False,
            "video_metadata": [video_metadata(header)],
            "input_data_format": "channels_last",
            "fps": header.sampled_fps,
        }

    def _check_sound(self, preprocess: PreprocessParameters) -> None:
        takes = setting_of(self._hears, int, "sampling_rate")
        if takes is not None and preprocess.audio_sampling_rate not in (None, takes):
            raise ConfigError(
                f"the model takes {takes} samples per second",
                key=f"{_KEY}.audio_sampling_rate",
                way_out=f"Leave it out, or set it to {takes}.",
            )
        hears_both = {"video", "audio"} <= self.placeholders.keys()
        if setting_of(self._processor, bool, "takes_sound_of_videos") is False:
            hears_both = False
        if self.hears_videos and not hears_both:
            raise ConfigError(
                f"{type(self._processor).__name__} does not take the sound of videos",
                key=f"{_KEY}.use_audio_in_video",
                way_out="Set it to false.",
            )

    def _check_window(self, sound: AudioClip, tensors: Mapping[str, object]) -> None:
        """Feature extractors cut what is too long without a word."""
        hop, most = setting_of(self._hears, int, "hop_length"), setting_of(self._hears, int, "n_samples")
        if hop is None or most is None or len(sound.samples) <= most:
            return
        mask = first_of(tensors, ("feature_attention_mask", "input_features_mask"))
        heard = most
        if mask is not None:
            heard = int(mask.sum()) * hop
        # Two hops: the last window of a sound may be counted or left out.
        if heard < len(sound.samples) - 2 * hop:
            raise DataError(
                f"'{sound.name}' is {sound.seconds:.1f} s long; the model takes {heard / sound.rate:.1f} s",
                way_out="Cut it into pieces or drop the row.",
            )


def _ids_of(made: JsonMapping) -> list[int]:
    ids: list[int] = made["input_ids"][0].tolist()
    return ids


def _tells_places(made: Mapping[str, object]) -> bool:
    """Whether a processor said what it wrote in the place of each placeholder."""
    return "text_replacement_offsets" in made


def _same(first: object, second: object) -> bool:
    """Whether two things that a processor made hold the same numbers."""
    if second is None:
        return False
    one, other = torch.as_tensor(first), torch.as_tensor(second)
    return one.shape == other.shape and one.equal(other)


def _pictures_seen_alone(processor: object) -> int | None:
    """How many pictures a row may have for each to be shown as if it were alone; None: any number."""
    own = setting_of(processor, int, "pictures_seen_alone")
    if own is not None:
        return own
    if _counts_pictures(processor):
        return 1
    return None


def _counts_pictures(processor: object) -> bool:
    """Whether a processor tells how many pictures each row has."""
    inputs = setting_of(setting_of(processor, object, "image_processor"), Sequence, "model_input_names") or ()
    return _PICTURES_OF_ROWS in inputs


def _counts_of_rows(of_pictures: Sequence[int]) -> torch.Tensor:
    """Numbers of pictures that rows have, from that of each picture's row. All that a model reads of them is whether a
    picture is alone; so neighbouring rows of several are counted as one, as turns may have been left out of a row."""
    counts: list[int] = []
    for is_alone, pictures in groupby(number == 1 for number in of_pictures):
        number = len(list(pictures))
        if is_alone:
            counts += [1] * number
        else:
            counts.append(number)
    return torch.tensor(counts, dtype=torch.long)


def video_metadata(header: ClipHeader) -> VideoMetadata:
    """A clip's times as the processors of transformers take them."""
    from transformers.video_utils import VideoMetadata  # loaded with the processor

    return VideoMetadata(
        total_num_frames=header.total_frames,
        fps=header.fps,
        width=header.width,
        height=header.height,
        duration=header.total_frames / header.fps,
        frames_indices=list(header.indices),
    )


def _image_options(processor: object, preprocess: PreprocessParameters) -> dict[str, int]:
    """Steps of image processors that the configuration turns on and off, and bounds of tiles."""
    steps = {"crop_to_patches": "crop_to_patches", "do_pan_and_scan": "image_do_pan_and_scan"}
    images = setting_of(processor, object, "image_processor")
    known = setting_of(setting_of(images, type, "valid_kwargs"), dict, "__annotations__") or {}
    options: dict[str, int] = {}
    for step, key in steps.items():
        asked = preprocess[key]
        if step in known and asked is not None:
            options[step] = asked
        elif asked:
            raise ConfigError(f"{type(images).__name__} has no such step", key=f"{_KEY}.{key}", way_out="Leave it out.")
    if preprocess.image_max_tiles is not None:
        if not is_tiled(images) or preprocess.crop_to_patches is False:
            what = f"{type(images).__name__} cuts no tiles"
            if is_tiled(images):
                what += " without crop_to_patches"
            raise ConfigError(what, key=f"{_KEY}.image_max_tiles", way_out="Leave it out.")
        options |= tile_bounds(images, preprocess.image_max_tiles)
    return options


def is_tiled(images: object) -> bool:
    """Whether an image processor cuts images into tiles, as many as its `min_patches` and `max_patches` allow."""
    return all(setting_of(images, int, name) is not None for name in TILE_BOUNDS)


def tile_bounds(images: Any, most: int) -> dict[str, int]:
    """The settings of a tiling image processor under which an image has at most so many tiles."""
    return {"min_patches": min(images.min_patches, most), "max_patches": most}


TILE_BOUNDS = ("min_patches", "max_patches")


def _padded(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Filled up with zeros at the end of each axis but the first."""
    shapes = [tensor.shape[1:] for tensor in tensors]
    largest = [max(sizes) for sizes in zip(*shapes, strict=True)]
    padded = []
    for tensor in tensors:
        whole = tensor.new_zeros(len(tensor), *largest)
        whole[tuple(map(slice, tensor.shape))] = tensor
        padded.append(whole)
    return padded
