"""What plugins make of pictures, videos and sounds equals what the processors of transformers make, in every family."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from mindspeed_mm.core.errors import ConfigError, DataError
from mindspeed_mm.fsdp.data.data_utils.decoding.audio import AudioClip
from mindspeed_mm.fsdp.data.data_utils.decoding.image_media import ImageHeader
from mindspeed_mm.fsdp.data.data_utils.decoding.video_clip import ClipHeader, VideoClip
from mindspeed_mm.fsdp.data.data_utils.mm_plugin import TextOnlyPlugin, build_mm_plugin, register_mm_plugin
from mindspeed_mm.fsdp.data.data_utils.plugins.media_features import (
    MediaFeatures,
    TokenMarks,
    marks_left_to_collators,
)
from mindspeed_mm.fsdp.data.data_utils.plugins.own_plugins import QwenVLPlugin
from mindspeed_mm.fsdp.data.data_utils.plugins.processor_plugin import ProcessorPlugin, video_metadata
from mindspeed_mm.fsdp.params.data_args import PreprocessParameters
from mindspeed_mm.fsdp.utils.processor import beginning_of
from tests.fsdp.data.conftest import picture
from tests.helpers.tiny_paligemma import paligemma_processor
from tests.helpers.tiny_processors import FAMILIES, build_processor, byte_tokenizer

SIZES = [(32, 32), (48, 32), (16, 80), (100, 37), (7, 9), (300, 200), (1, 1)]
SEEING = [name for name, family in FAMILIES.items() if "image" in family.kinds]
WATCHING = [name for name, family in FAMILIES.items() if "video" in family.kinds]
HEARING = [name for name, family in FAMILIES.items() if "audio" in family.kinds and name != "whisper"]
QWEN = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen2_5_omni", "qwen3_omni"]
RATE = 16000


def clip(frames: int = 5, height: int = 40, width: int = 56, seed: int = 0, fps: float = 8.0) -> VideoClip:
    """Every third frame of a video."""
    pixels = np.stack([np.asarray(picture(width, height, seed=100 * seed + i)) for i in range(frames)])
    return VideoClip(pixels, ClipHeader(height, width, tuple(range(0, 3 * frames, 3)), fps, 3 * frames))


def sound(samples: int = 9000, seed: int = 0) -> AudioClip:
    noise = 0.1 * np.random.default_rng(seed).standard_normal(samples)
    return AudioClip(noise.astype(np.float32), RATE, "sound.wav")


def plugin_of(processor: Any, **keys: Any) -> Any:
    return build_mm_plugin(processor, PreprocessParameters(**keys))


def own_call(processor: Any, text: str, **media: Any) -> dict[str, Any]:
    """What the processor makes of a text with its media, the frames of videos sampled already."""
    options: dict[str, Any] = {}
    if "crop" in media:
        options["images_kwargs"] = {"crop_to_patches": media.pop("crop")}
    if clips := media.pop("clips", None):
        media["videos"] = [one.frames for one in clips]
        options["videos_kwargs"] = {
            "do_sample_frames": False,
            "video_metadata": [video_metadata(one.header) for one in clips],
            "input_data_format": "channels_last",
            "fps": clips[0].header.sampled_fps,
        }
    if sounds := media.pop("sounds", None):
        media["audio"] = [one.samples for one in sounds]
        options["audio_kwargs"] = {"sampling_rate": RATE}
    return dict(processor(text=[text], return_tensors="pt", **media, **options))


def replaced(processor: Any, plugin: Any, text: str, media: Sequence[MediaFeatures]) -> list[int]:
    """Token ids of a text with its media: texts are put in before tokenisation, runs of tokens after it."""
    whole, runs, start = "", {}, 0
    for item in media:
        token = plugin.placeholders[item.kind].text
        at = text.index(token, start)
        whole += text[start:at]
        if item.text is None:
            runs[len(whole)] = item.token_ids
        whole += token if item.text is None else item.text
        start = at + len(token)
    encoding = processor.tokenizer(whole + text[start:])
    spans = {encoding.char_to_token(at): ids for at, ids in runs.items()}
    return [int(new) for i, token in enumerate(encoding["input_ids"]) for new in spans.get(i, [token])]


TEXT_KEYS = {"input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids"}


def check_equal(processor: Any, plugin: Any, text: str, media: Sequence[MediaFeatures], own: dict[str, Any]) -> None:
    assert replaced(processor, plugin, text, media) == own["input_ids"][0].tolist()
    for key, marks in plugin.token_marks(own["input_ids"][0].numpy()).items():
        assert marks.tolist() == own[key][0].tolist()
    made = plugin.collate(media)
    assert made.keys() == own.keys() - TEXT_KEYS - {"num_chunks_per_video"}
    for name, tensor in made.items():
        other = torch.as_tensor(own[name])
        assert tensor.dtype == other.dtype and torch.equal(tensor, other), name


@pytest.mark.parametrize("family", SEEING)
def test_pictures(family: str) -> None:
    processor = build_processor(family)
    plugin = plugin_of(processor)
    images = [picture(*size, seed=i) for i, size in enumerate(SIZES[:4])]
    token = plugin.placeholders["image"].text
    text = f"Look at {token} and {token}.\n{token}\n{token} What is shown?"
    media = [plugin.encode_image(image) for image in images]
    check_equal(processor, plugin, text, media, own_call(processor, text, images=[images]))
    with pytest.raises(AssertionError):
        check_equal(processor, plugin, text, media[::-1], own_call(processor, text, images=[images]))


def deepseek_vl() -> Any:
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "image_token": "<image_placeholder>"}
    images = transformers.DeepseekVLImageProcessor(size={"height": 16, "width": 16}, min_size=4)
    return transformers.DeepseekVLProcessor(images, byte_tokenizer(special, None), num_image_tokens=4)


def janus() -> Any:
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "image_token": "<image_placeholder>"}
    special |= {"boi_token": "<begin_of_image>", "eoi_token": "<end_of_image>"}
    images = transformers.JanusImageProcessor(size={"height": 16, "width": 16}, min_size=4)
    return transformers.JanusProcessor(images, byte_tokenizer(special, None), num_image_tokens=4)


def llava_next() -> Any:
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "image_token": "<image>"}
    side = {"height": 32, "width": 32}
    images = transformers.LlavaNextImageProcessor(
        size={"shortest_edge": 32}, crop_size=side, image_grid_pinpoints=[[32, 64], [64, 32], [64, 64], [32, 96]]
    )
    return transformers.LlavaNextProcessor(
        images, byte_tokenizer(special, None), patch_size=8, vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )  # fmt: skip


@pytest.mark.parametrize("build", [deepseek_vl, janus, llava_next])
def test_pictures_of_families_without_a_template_here(build: Callable[[], Any]) -> None:
    processor = build()
    plugin = plugin_of(processor)
    images = [picture(*size, seed=i) for i, size in enumerate(((48, 32), (100, 37), (32, 90)))]
    token = plugin.placeholders["image"].text
    text = f"Look at {token} and {token}.\n{token} What is shown?"
    own = own_call(processor, text, images=images)
    check_equal(processor, plugin, text, [plugin.encode_image(image) for image in images], own)


def test_what_a_processor_makes_of_its_placeholder_alone_stays_out_of_the_batch() -> None:
    """PaliGemma's gives labels and types of the text that it was called with: here, the picture's placeholder."""
    processor = paligemma_processor()
    image = picture(48, 32)
    made = plugin_of(processor).encode_image(image)
    assert {"labels", "token_type_ids"} <= processor(text="<image>", images=image).keys()
    assert made.tensors.keys() == {"pixel_values"}


def mllama_processor(*, begins: bool = False) -> Any:
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "image_token": "<|image|>"}
    images = transformers.MllamaImageProcessor(size={"height": 16, "width": 16}, max_image_tiles=4)
    return transformers.MllamaProcessor(images, byte_tokenizer(special, None, begins=begins))


def test_a_mark_that_processor_and_tokenizer_both_write_begins_a_text_once() -> None:
    """transformers' `apply_chat_template` leaves the tokenizer's out where the template writes one."""
    processor = mllama_processor(begins=True)
    begins = processor.tokenizer.bos_token_id
    assert list(processor(text=["a"])["input_ids"][0])[:2] == [begins, begins]
    assert beginning_of(processor) == beginning_of(mllama_processor()) == [begins]


class MllamaPictures(ProcessorPlugin):
    of_text = frozenset({"cross_attention_mask"})


def test_what_a_processor_makes_of_the_whole_text_is_refused_or_left_to_the_plugin() -> None:
    """Llama 3.2 Vision's gives a mask over words and pictures, and begins every text with a mark."""
    processor, image = mllama_processor(), picture(40, 20)
    own = processor(text="<|image|>", images=[[image]], return_tensors="pt")
    assert processor.tokenizer.bos_token_id in own["input_ids"] and "cross_attention_mask" in own
    with pytest.raises(ConfigError, match=r"MllamaProcessor makes cross_attention_mask of the whole text.*`of_text`"):
        plugin_of(processor).encode_image(image)
    made = MllamaPictures(processor, PreprocessParameters()).encode_image(image)
    assert made.token_ids.tolist() == [processor.image_token_id] and made.text is None
    names = {"pixel_values", "aspect_ratio_ids", "aspect_ratio_mask"}
    assert made.tensors.keys() == names and all(torch.equal(made.tensors[name], own[name]) for name in names)


class Questioned(ProcessorPlugin):
    of_text = frozenset({"qformer_input_ids", "qformer_attention_mask"})


def test_a_processor_that_puts_pictures_elsewhere_is_refused() -> None:
    """InstructBLIP's writes a picture's tokens in front of the text, and leaves the placeholder where it is."""
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    tokenizers = [byte_tokenizer(special, None) for _ in range(2)]
    images = transformers.BlipImageProcessor(size={"height": 16, "width": 16})
    processor = transformers.InstructBlipProcessor(images, *tokenizers, num_query_tokens=4)
    with pytest.raises(ConfigError, match="qformer_attention_mask, qformer_input_ids of the whole text"):
        plugin_of(processor).encode_image(picture(40, 20))
    with pytest.raises(ConfigError, match="does not write the tokens of its image where the placeholder stands"):
        Questioned(processor, PreprocessParameters()).encode_image(picture(40, 20))


class Florence2Processor:
    """Adds the placeholder itself, as Florence-2's, and then finds more of them than pictures."""

    def __call__(self, **inputs: Any) -> dict[str, Any]:
        raise ValueError("found 2 <image> tokens and 1 image")


def test_a_refusal_names_the_plugin_only_where_nothing_was_taken_before() -> None:
    plugin = plugin_of(build_processor("llava"))
    plugin._processor = Florence2Processor()
    with pytest.raises(DataError, match="If all are refused, Florence2Processor needs a media plugin"):
        plugin.encode_image(picture(40, 20))
    plugin._fit_to_be_asked.add("image")  # as after a picture that was taken
    with pytest.raises(DataError) as refused:
        plugin.encode_image(picture(40, 20))
    assert refused.value.problems[0].way_out == "Drop the row."


def test_types_of_tokens_that_only_a_collator_can_make() -> None:
    assert marks_left_to_collators(paligemma_processor()) == "token_type_ids"
    made_here = [build_processor(family) for family in ("gemma3", "qwen3_vl", "llava")]
    assert [marks_left_to_collators(processor) for processor in made_here] == [None] * 3
    assert marks_left_to_collators(byte_tokenizer({"pad_token": "<pad>"}, None)) is None


@pytest.mark.parametrize("frames", [1, 4, 5])
@pytest.mark.parametrize("family", WATCHING)
def test_videos(family: str, frames: int) -> None:
    processor = build_processor(family)
    plugin = plugin_of(processor)
    watched = clip(frames, seed=3)
    text = f"First {plugin.placeholders['video'].text} seven"
    # Kimi's processor fills up by itself; the others refuse fewer frames than their towers take at once.
    given = watched if family == "kimi_k25" else watched.at_least(plugin._frames_at_once)
    own = own_call(processor, text, clips=[given])
    check_equal(processor, plugin, text, [plugin.encode_video(watched)], own)
    if frames == 5 and family != "internvl":  # whose frames have no times
        slower = VideoClip(watched.frames, ClipHeader(40, 56, watched.header.indices, 1.0, watched.header.total_frames))
        made = plugin.encode_video(slower)
        has_times = made.text is not None or "second" in "".join(made.tensors)
        with pytest.raises(AssertionError) if has_times else _nothing():
            check_equal(processor, plugin, text, [made], own)


class _nothing:
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


@pytest.mark.parametrize("family", HEARING)
def test_sounds(family: str) -> None:
    processor = build_processor(family)
    plugin = plugin_of(processor)
    heard = sound(12345)
    text = f"What is said in {plugin.placeholders['audio'].text}?"
    media = [plugin.encode_audio(heard)]
    check_equal(processor, plugin, text, media, own_call(processor, text, sounds=[heard]))


@pytest.mark.parametrize("family", ["qwen2_5_omni", "qwen3_omni", "internvl", "glm4v", "kimi_k25"])
def test_kinds_side_by_side(family: str) -> None:
    processor = build_processor(family)
    plugin = plugin_of(processor)
    kinds = [kind for kind in ("video", "image", "audio") if kind in plugin.placeholders]
    text = "Compare " + " with ".join(plugin.placeholders[kind].text for kind in kinds)
    one = {"video": clip(4), "image": picture(48, 32), "audio": sound()}
    encode = {"video": plugin.encode_video, "image": plugin.encode_image, "audio": plugin.encode_audio}
    names = {"video": "clips", "image": "images", "audio": "sounds"}
    own = own_call(processor, text, **{names[kind]: [one[kind]] for kind in kinds})
    check_equal(processor, plugin, text, [encode[kind](one[kind]) for kind in kinds], own)


def test_sounds_of_different_length_are_filled_up_and_masked() -> None:
    plugin = plugin_of(build_processor("qwen3_omni"))
    media = [plugin.encode_audio(sound(n, seed=n)) for n in (9000, 16000)]
    batch = plugin.collate(media)
    frames = [int(item.tensors["feature_attention_mask"].sum()) for item in media]
    assert batch["feature_attention_mask"].sum(1).tolist() == frames
    for row, (item, count) in enumerate(zip(media, frames, strict=True)):
        assert torch.equal(batch["input_features"][row, :, :count], item.tensors["input_features"][0, :, :count])


def test_whispers_sound_stands_nowhere_in_the_text() -> None:
    processor = build_processor("whisper")
    plugin = plugin_of(processor)
    heard = [sound(9000), sound(20000, seed=1)]
    media = [plugin.encode_audio(one) for one in heard]
    assert not plugin.placeholders and not any(len(item.token_ids) for item in media)
    own = processor(audio=[one.samples for one in heard], sampling_rate=RATE, return_tensors="pt")
    assert torch.equal(plugin.collate(media)["input_features"], own["input_features"])


@pytest.mark.parametrize("family", ["qwen2_5_omni", "qwen3_asr", "whisper"])
def test_what_is_longer_than_the_models_window_is_refused_not_cut(family: str) -> None:
    processor = build_processor(family)
    plugin = plugin_of(processor)
    plugin.encode_audio(sound(2 * RATE))
    if family == "qwen3_asr":  # its window has no end
        heard = plugin.encode_audio(sound(3 * RATE)).tensors["input_features_mask"]
        assert heard.sum() * 160 == 3 * RATE
        return
    with pytest.raises(DataError, match=r"'sound.wav' is 3.0 s long; the model takes 2.0 s"):
        plugin.encode_audio(sound(3 * RATE))


@pytest.mark.parametrize("family", ["qwen2_5_omni", "qwen3_omni"])
def test_the_sound_of_videos_takes_turns_with_their_frames(family: str) -> None:
    processor = build_processor(family)
    plugin = plugin_of(processor, use_audio_in_video=True)
    silent, heard = clip(8, fps=12.0), sound(2 * RATE)  # 8 frames, 2 seconds
    made = plugin.encode_video(VideoClip(silent.frames, silent.header, heard))
    alone = plugin_of(processor)
    video, audio = alone.encode_video(silent), alone.encode_audio(heard)
    ids = made.token_ids.tolist()
    video_id, audio_id = (plugin.placeholders[kind].token_id for kind in ("video", "audio"))
    begin, end = processor.tokenizer.convert_tokens_to_ids([processor.audio_bos_token, processor.audio_eos_token])
    assert (ids[0], ids[-1]) == (begin, end)
    assert (ids.count(video_id), ids.count(audio_id)) == (len(video.token_ids), len(audio.token_ids))
    assert ids.index(audio_id) < len(ids) - 1 - ids[::-1].index(video_id) or family == "qwen2_5_omni"
    batch = plugin.collate([made])
    expected = alone.collate([video, audio])
    assert batch.pop("use_audio_in_video") is True
    assert batch.keys() == expected.keys()
    assert all(torch.equal(batch[name], expected[name]) for name in batch)
    with pytest.raises(ConfigError, match="does not take the sound of videos"):
        plugin_of(build_processor("qwen3_vl"), use_audio_in_video=True)


# --- the fast path ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", QWEN)
def test_patches_equal_the_processors_to_the_bit(family: str) -> None:
    processor = build_processor(family)
    plugin = plugin_of(processor)
    assert isinstance(plugin, QwenVLPlugin) and plugin.frame_sizes is not None
    images = [picture(*size, seed=i) for i, size in enumerate(SIZES)]
    expected = processor.image_processor(images, return_tensors="pt")
    features = [plugin.encode_image(image) for image in images]
    assert all(item.tensors["patches"].dtype == np.uint8 for item in features)
    found = plugin.collate(features)
    assert torch.equal(found["image_grid_thw"], expected["image_grid_thw"])
    assert torch.equal(found["pixel_values"], expected["pixel_values"])


@pytest.mark.parametrize("family", QWEN)
def test_the_general_plugin_gives_the_same(family: str) -> None:
    processor = build_processor(family)
    plugin, general = plugin_of(processor), ProcessorPlugin(processor, PreprocessParameters())
    watched = clip(6, 33, 47)
    ours, theirs = (
        [*(p.encode_image(picture(*size)) for size in SIZES[:4]), p.encode_video(watched)] for p in (plugin, general)
    )
    assert [(f.token_ids.tolist(), f.text) for f in ours] == [(f.token_ids.tolist(), f.text) for f in theirs]
    one, other = plugin.collate(ours), general.collate(theirs)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], torch.as_tensor(other[name])) for name in one)


@pytest.mark.parametrize("family", QWEN)
def test_sizes_from_headers_are_those_that_encoding_gives(family: str) -> None:
    plugin = plugin_of(build_processor(family), video_max_pixels=2000)
    for width, height in SIZES:
        made = plugin.encode_image(picture(width, height))
        size = plugin.measure("image", ImageHeader(height, width, 1, 0.0))
        assert (size.tokens, size.patches) == (len(made.token_ids), len(made.tensors["patches"]))
    for frames, height, width in ((1, 40, 56), (2, 16, 80), (7, 300, 200)):
        watched = clip(frames, height, width)
        size, made = plugin.measure("video", watched.header), plugin.encode_video(watched)
        assert (size.tokens, size.patches, size.text) == (
            len(made.token_ids),
            len(made.tensors["patches"]),
            made.text,
        )


@pytest.mark.parametrize("family", QWEN)
def test_plugins_travel_to_workers(family: str) -> None:
    plugin = plugin_of(build_processor(family))
    other = pickle.loads(pickle.dumps(plugin))
    for p in (plugin, other):
        p.encode_image(picture(48, 32))
    assert other.measure("video", clip().header) == plugin.measure("video", clip().header)


def test_the_configuration_narrows_the_processors_limits(processor: Any) -> None:
    def tokens(**limits: int) -> int:
        return len(plugin_of(processor, **limits).encode_image(picture(48, 48)).token_ids)

    assert tokens() == 9
    assert tokens(image_max_pixels=32 * 32) == 4
    assert tokens(image_min_pixels=64 * 64) == 16
    assert tokens(image_max_pixels=10**9) == 9
    with pytest.raises(ConfigError, match="at least 3000 and at most 1024"):
        tokens(image_max_pixels=1024, image_min_pixels=3000)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl"])
def test_limits_of_frames(family: str) -> None:
    processor = build_processor(family)

    def patches(**limits: int) -> int:
        made = plugin_of(processor, **limits).encode_video(clip(4, 48, 48))
        return len(made.tensors["patches"]) // 2

    assert patches() == 36
    assert patches(video_max_pixels=32 * 32) == 16
    assert patches(video_max_pixels=10**9) == 36
    assert patches(video_min_pixels=64 * 64) == 64
    with pytest.raises(ConfigError, match="at least 3000 and at most 1024"):
        patches(video_max_pixels=1024, video_min_pixels=3000)


@pytest.mark.parametrize("family", ["internvl", "llava", "pixtral", "glm4v"])
def test_other_processors_are_given_pictures_within_the_limits(family: str) -> None:
    processor = build_processor(family)
    plugin = plugin_of(processor, image_max_pixels=600)
    shrunk = picture(60, 40).resize((30, 20))
    one, other = plugin.encode_image(picture(60, 40)), plugin_of(processor).encode_image(shrunk)
    assert one.token_ids.tolist() == other.token_ids.tolist()
    assert torch.equal(one.tensors["pixel_values"], other.tensors["pixel_values"])


def test_tiles_of_internvl() -> None:
    processor = build_processor("internvl")
    image = picture(48, 16)
    one, several = (plugin_of(processor, crop_to_patches=crop).encode_image(image) for crop in (False, True))
    assert len(one.tensors["pixel_values"]) == 1
    assert len(several.tensors["pixel_values"]) == 4
    text = plugin_of(processor).placeholders["image"].text
    own = own_call(processor, text, images=[image], crop=True)
    check_equal(processor, plugin_of(processor, crop_to_patches=True), text, [several], own)
    with pytest.raises(ConfigError, match="has no such step"):
        plugin_of(build_processor("qwen3_vl"), crop_to_patches=True)


def test_the_most_tiles_of_internvl() -> None:
    """As transformers cuts with the same `max_patches`."""
    processor, image = build_processor("internvl"), picture(160, 40)
    asked = {"crop_to_patches": True, "min_patches": 1}
    counts = []
    for most in (1, 2, 4):
        plugin = plugin_of(processor, crop_to_patches=True, image_max_tiles=most)
        text, made = plugin.placeholders["image"].text, plugin.encode_image(image)
        own = processor(text=[text], images=[image], images_kwargs={**asked, "max_patches": most}, return_tensors="pt")
        check_equal(processor, plugin, text, [made], dict(own))
        counts.append(len(made.tensors["pixel_values"]))
    assert counts == [1, 3, 5]
    with pytest.raises(ConfigError, match=r"image_max_tiles .* cuts no tiles\. Leave it out"):
        plugin_of(build_processor("qwen3_vl"), image_max_tiles=2)
    with pytest.raises(ConfigError, match="cuts no tiles without crop_to_patches"):
        plugin_of(processor, crop_to_patches=False, image_max_tiles=2)


def test_pan_and_scan_of_gemma3() -> None:
    processor = build_processor("gemma3")
    image = picture(600, 256)
    plugin = plugin_of(processor, image_do_pan_and_scan=True)
    made = plugin.encode_image(image)
    assert made.text is not None and made.text.startswith("Here is the original image")
    assert len(made.tensors["pixel_values"]) == 3
    token = plugin.placeholders["image"].text
    own = dict(processor(text=[token], images=[[image]], images_kwargs={"do_pan_and_scan": True}, return_tensors="pt"))
    check_equal(processor, plugin, token, [made], own)


# --- what is refused -------------------------------------------------------------------------------------------------


def test_sizes_that_the_processor_refuses_are_an_error_of_the_row(processor: Any) -> None:
    plugin = plugin_of(processor)
    for candidate in (plugin, ProcessorPlugin(processor, PreprocessParameters())):
        with pytest.raises(DataError, match="10000"):
            candidate.encode_image(picture(1, 10000))
    with pytest.raises(DataError, match="10000"):
        plugin.measure("image", ImageHeader(10000, 1, 1, 0.0))


def test_batches_without_media_have_no_keys(processor: Any) -> None:
    assert plugin_of(processor).collate([]) == {}
    assert ProcessorPlugin(processor, PreprocessParameters()).collate([]) == {}


def test_kinds_that_a_model_does_not_take(tokenizer: Any) -> None:
    plugin = plugin_of(tokenizer)
    assert isinstance(plugin, TextOnlyPlugin)
    with pytest.raises(DataError, match="text only"):
        plugin.encode_image(picture())
    for family in ("llava", "qwen3_vl"):
        with pytest.raises(DataError, match="the row has an audio, but the model takes none"):
            plugin_of(build_processor(family)).encode_audio(sound())
    with pytest.raises(DataError, match="the row has a video, but the model takes none"):
        plugin_of(build_processor("llava")).encode_video(clip())
    with pytest.raises(ConfigError, match="the model takes 16000 samples per second"):
        plugin_of(build_processor("qwen3_asr"), audio_sampling_rate=8000)


def test_plugins_come_from_outside_by_the_processors_name(processor: Any) -> None:
    class SomeProcessor:
        tokenizer = processor.tokenizer

    with pytest.raises(ConfigError, match="does not say how media become tokens"):
        plugin_of(SomeProcessor())

    @register_mm_plugin("SomeProcessor")
    class Plugin:
        def __init__(self, processor: Any, preprocess: Any) -> None:
            self.pixels = preprocess.image_max_pixels

    assert plugin_of(SomeProcessor(), image_max_pixels=7).pixels == 7


@pytest.mark.edge("F2")
@pytest.mark.parametrize("told_by", ["attribute", "defaults"])
def test_types_of_tokens_are_made_wherever_the_library_says_that_they_are_wanted(
    told_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers 5.17 says it among the defaults of a processor's arguments, 5.23 on the processor; a family need not
    list the name among its inputs."""
    processor = build_processor("qwen3_vl")
    kind, is_attribute = type(processor), told_by == "attribute"
    defaults = {"text_kwargs": {"return_mm_token_type_ids": not is_attribute}}
    monkeypatch.setattr(kind, "return_mm_token_type_ids", True if is_attribute else None, raising=False)
    monkeypatch.setattr(kind, "valid_processor_kwargs", SimpleNamespace(_defaults=defaults))
    monkeypatch.setattr(kind, "text_kwargs", None, raising=False)
    text, image, video = 5, processor.image_token_id, processor.video_token_id
    for is_listed in (True, False):
        marks = TokenMarks(processor)(np.array([text, image, image, video]))
        assert {name: values.tolist() for name, values in marks.items()} == {"mm_token_type_ids": [0, 1, 1, 2]}
        if is_listed:
            monkeypatch.delattr(kind, "model_input_names")
