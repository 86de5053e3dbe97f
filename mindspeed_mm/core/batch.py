"""The keys of a batch, defined once: the collator checks them, the engine strips what a model does not take."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from mindspeed_mm.core.errors import DataError

Batch = dict[str, Any]
"""A collated micro-batch: key → tensor (or list, for `sample_ids`). B rows, L tokens, N media items."""

IGNORED_LABEL = -100
"""The label of a token that no loss is computed for."""

SEEN, LATENT = 1, 2
"""In `token_kinds`, where text has 0: features of a picture that is seen, and latents of one that is given or drawn."""

NO_CODE, SPEAKER_CODE = -1, -2
"""In `codec_ids`: nothing is added; the embedding of a speaker is."""

BATCH_KEYS: dict[str, str] = {
    "input_ids": "(B, L) int64 token ids, right-padded",
    "attention_mask": "(B, L) int64, 1 on real tokens; absent from packed batches",
    "labels": "(B, L) int64, the token itself where trained, -100 elsewhere (not shifted)",
    "shift_labels": "(B, L) int64, labels shifted once to the left inside each document; -100 on its last token",
    "loss_weights": "(B, L) float32, how much the loss of each of shift_labels counts; absent: all alike",
    "position_ids": "(B, L), or (4, B, L) for mRoPE models: text positions, then time, height, width; int32: fp32 bits",
    "decoder_input_ids": "(B, L) int64 tokens of an encoder-decoder's decoder, right-padded",
    "decoder_attention_mask": "(B, L) int64, 1 on real tokens of the decoder",
    "mm_token_type_ids": "(B, L) int32, 0 text, 1 image, 2 video (models with mRoPE)",
    "token_type_ids": "(B, L) int64, 1 on image tokens (Gemma3)",
    "cu_seq_lens_q": "(D+1,) int32 document borders of a packed row, from 0 to L",
    "cu_seq_lens_k": "same as cu_seq_lens_q",
    "max_length_q": "int, longest document of a packed row",
    "max_length_k": "same as max_length_q",
    "pad_tokens": "int, tokens at the end of a packed row that only fill it up: a document of their own, if any",
    "pixel_values": "image patches or images, in the layout of the model's processor",
    "drawn_images": "(N_images,) bool, pictures that the model draws, in order of place (Janus-Pro)",
    "drawn_pixel_values": "(N_drawn, 3, side, side) float32 in -1..1, the pictures that the model draws",
    "drawn_places": "(N_codes,) int64 places of their codes in the flattened rows; added by the loss",
    "image_grid_thw": "(N_images, 3) int64 patch grid: time, height, width",
    "pixel_attention_mask": "(N_images, tiles, height, width) int64, 1 on real pixels of a tile (Idefics3, SmolVLM)",
    "batch_num_images": "int64 pictures of each row that has some, neighbours with several as one (LLaVA-OneVision)",
    "image_sizes_videos": "(N_videos, 2) int64 pixels of frames",
    "image_sizes": "(N_images, 2) int64 pixels",
    "pixel_values_videos": "video patches",
    "video_grid_thw": "(N_videos, 3) int64 patch grid",
    "second_per_grid_ts": "(N_videos,) float seconds per temporal patch",
    "video_second_per_grid": "the same, as the omni models call it",
    "use_audio_in_video": "bool, whether the sound of videos stands between their frames (omni models)",
    "image_position_ids": "(N_images, patches, 2) int64 places of patches in the image (Gemma4)",
    "input_features": "audio features in the layout of the model's processor",
    "feature_attention_mask": "(N_audios, frames) int64, 1 on real frames",
    "input_features_mask": "the same, as Qwen3-ASR calls it",
    "audio_codes": "(frames, codebooks) int64 codes of sounds that are heard, in whole groups (MiMo-V2.5)",
    "codec_ids": "(B, L, G) int64 codes of speech, first codebook first; negative where there are none",
    "thinker_input_ids": "(B, K) int64 of a conversation as far as it has media, beside the talker's rows (Qwen3-Omni)",
    "thinker_attention_mask": "(B, K) int64, 1 on real tokens of it",
    "media_places": "(N_tokens,) int64 places of media in the talker's flattened rows",
    "media_sources": "(N_tokens,) int64 the same places in the flattened thinker_input_ids",
    "frame_places": "(N_frames,) int64 places, in the flattened rows, that have a code of every codebook",
    "code_places": "(N_places,) int64 places, in the flattened rows, that codes of speech are predicted at (MOSS-TTS)",
    "code_targets": "(N_places, G) int64 the codes that follow them, -100 where none is trained",
    "speaker_places": "(N_speakers,) int64 places of speakers in the flattened rows",
    "speaker_features": "(frames, mels) float32 spectra of the speakers of a batch, one behind the other",
    "speaker_frames": "(N_speakers,) int64 frames of each",
    "part_ids": "(B, L) int64, 0 for text, n > 0 for the tokens of a picture, n < 0 for those of a noised one (BAGEL)",
    "token_kinds": "(B, L) int64, 1 where a token is of a picture that is seen, 2 where it is latents of one (BAGEL)",
    "picture_pixels": "uint8, (3, H, W) of each picture that has latents, flattened, one behind the other (BAGEL)",
    "picture_posteriors": "(2, C, h, w) instead of pixels: what latents are drawn from, flattened likewise",
    "picture_sizes": "(N_pictures, 2) int64 height and width of each of them in pixels",
    "picture_is_drawn": "(N_pictures,) bool, whether the model draws it; otherwise it is given",
    "picture_seeds": "(N_pictures,) int64, what noise and noise level of a picture are drawn with",
    "state_positions": "(S, 3) float32 frame, row and column of each state that a picture is drawn from (InternVL-U)",
    "state_lengths": "(K,) int64 how many states they are of each sample that draws (InternVL-U)",
    "latent_tokens": "(M, C · p²) latents with their noise, in order of place; added by the loss, as the next ones",
    "latent_times": "(M,) their noise levels, 0 where a picture is given",
    "latent_positions": "(M,) int64 their places in the table of places",
    "latent_places": "(M,) int64 their places in the flattened rows",
    "sample_ids": "list of B strings: which sample a row came from; never given to a model",
    "epochs": "list of B ints: in which epoch each sample was drawn; with its id it decides noise and timestep",
    "latents": "(B, C, H, W) of images or (B, C, T, H, W) of videos, as the VAE gives them, normalised",
    "pixels": "(B, 3, T, H, W) uint8, media that are encoded while training; T is 1 for images",
    **{
        f"pixels_{role}": f"(B, 3, T, H, W) uint8, the {role.replace('_', ' ')} that a sample is conditioned on"
        for role in ("first_frame", "last_frame", "source", "mask", "control", "reference")
    },
    **{
        f"pixels_{role}_{number}": f"(B, 3, 1, H, W) uint8, further pictures like pixels_{role}"
        for role in ("source", "reference")
        for number in (2, 3)
    },
    "pixels_rejected": "(B, 3, T, H, W) uint8, the rejected sides of preference pairs, whose chosen ones are `pixels`",
    "rejected_latents": "the same of `latents`",
    "scores": "(B, 2) float64, what the chosen and the rejected side of each pair are worth",
    "sound": "(B, channels, samples) float32 in -1..1, the sound of clips that is encoded while training",
    "fps": "list of B floats: frames a second of each clip as it is shown to the model; 0 of a picture",
    "is_prior": "(B,) bool, samples that preserve the prior: a loss term of their own",
    "captions": "list of B strings, of media that are encoded while training",
    "prompt_embeds": "(B, L, D) text features",
    "prompt_mask": "(B, L) int64, 1 on real text features; absent where a model takes no mask",
    "glyph_embeds": "(B, G, E) features of the words that a caption has in quotes (HunyuanVideo-1.5)",
    "glyph_mask": "(B, G) int64, 1 on real features of such words",
    "pooled_prompt_embeds": "(B, D) pooled text features",
    "clip_embeds": "(B, N, E) features of a second text encoder, padding and all (Step-Video)",
    "audio_latents": "(B, C, L, M) normalised latents of the sound of clips, which are learned beside `latents`",
    "audio_prompt_embeds": "(B, L, E) text features for the sound",
    "condition_latents": "(B, C, T, H, W) normalised latents of the frames that a video goes on from",
    "image_embeds": "(B, N, D) features of the image that a video goes on from",
    "source_latents": "(B, C, H, W) normalised latents of the picture that is edited",
    **{f"source_{number}_latents": "the same of a further picture" for number in (2, 3)},
    "reference_latents": "(B, C, N, H, W) normalised latents of pictures in front of a video, learned beside `latents`",
    "mask_latents": "(B, C, H, W) mask of the part that is filled, folded into the positions of latents",
    "control_latents": "(B, C, T, H, W) latents of a control video and its folded mask",
    "mm_context": "the share of a sequence that is spread over ranks; added by the engine, read by attention",
    "prompts": "list of B encoded prompts, which the model answers itself before it is trained on the answers",
    "reward_places": "(B, K) int64 places in their rows at which scores are read (VideoAlign)",
    "preferences": "(P, K) int64 of each pair: 1 where the first is better, -1 the second, 0 a tie, 2 where unknown",
    "pairs": "int, how many preference pairs: rows of the chosen answers, then those of the rejected ones",
    "shared_media": "list of keys of media that are held once, by the first of `media_copies` blocks of rows",
    "media_copies": "int, how many blocks of B / media_copies rows show the same media, in the same order",
    "blank_rows": "int, rows at the end that only fill up a validation batch: they count for nothing",
}

ENGINE_KEYS = frozenset(
    {"labels", "shift_labels", "loss_weights", "sample_ids", "epochs", "fps", "blank_rows", "pairs", "shared_media"}
    | {"media_copies", "preferences"}
)
"""Keys that the engine reads and a model's `forward` is not given (unless its own loss asks for `labels`)."""


TRAINED_KEYS = frozenset({"shift_labels", "latents", "pixels", "prompts"})
"""What a loss is taken from; a batch holds one of them."""


def first_of(inputs: Mapping[str, object], keys: Iterable[str]) -> Any:
    """The value of the first of these keys that there is; None where there is none of them."""
    for key in keys:
        if key in inputs:
            return inputs[key]
    return None


def check_batch(batch: Batch, extra_keys: frozenset[str] = frozenset()) -> None:
    """Raise `DataError` when a batch holds an undocumented key, or nothing that training could start from."""
    unknown = sorted(batch.keys() - BATCH_KEYS.keys() - extra_keys)
    if unknown:
        raise DataError(
            f"the batch has undocumented keys: {unknown}",
            way_out="Declare a plugin's keys with `register_collator(name, keys=[...])`.",
        )
    if not (TRAINED_KEYS | {"labels"}) & batch.keys():
        raise DataError(
            f"the batch has nothing to train on: its keys are {', '.join(map(repr, batch))}",
            key="labels",
            way_out="Give it `labels`, (B, L) with -100 where not trained"
            f" (or one of {', '.join(sorted(TRAINED_KEYS))}).",
        )
