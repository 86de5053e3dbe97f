"""Which sequence each module of a model goes over, and how long the sequences of a batch are."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from mindspeed_mm.core.batch import IGNORED_LABEL, Batch
from mindspeed_mm.core.patterns import compile_pattern
from mindspeed_mm.fsdp.models.behaviour.multi_token import NAME as FURTHER_TOKENS
from mindspeed_mm.fsdp.models.facts import facts_of
from mindspeed_mm.fsdp.models.loading.construction import is_transformers
from mindspeed_mm.fsdp.models.structure.towers import find_towers
from mindspeed_mm.fsdp.tools.flops_tool import units
from mindspeed_mm.fsdp.tools.flops_tool.audio import SoundLengths
from mindspeed_mm.fsdp.tools.flops_tool.vision import vision_lengths

_AUDIO = re.compile(r"(^|[._])(audio|speech|sound)")
_BRIDGE = re.compile(
    r"projector|connector|aligner|adapter|merger|embed_(vision|audio)|mlp1|bridge|resampler", re.IGNORECASE
)
"""Names of what stands between towers and decoder."""
_MERGED = re.compile(r"merger|downsample")
"""Names of what a tower does with squares of patches that are one token."""
_BESIDE = re.compile(
    r"(^|\.)(vq_?model|generation_|vision_(tower|model)\.|visual\.|sam_|talker|token2wav|code2wav|speaker)"
)
"""Names of parts that no step of a language model runs, and of towers that nobody here knows."""


@dataclass(frozen=True)
class Sequences:
    """What is known of one model."""

    of: Callable[[str], str]
    """Name of a module → the sequence that its layers go over; empty where nobody knows."""
    lengths: Callable[[Batch], dict[str, list[int]]]
    """Lengths of a batch on the host."""
    sides: tuple[str, ...] = ()
    """Modules in front of the main path: towers, an encoder."""
    memory: frozenset[str] = field(default_factory=frozenset)
    """Sequences that blocks read and never change."""
    sound: SoundLengths | None = None

    def side_of(self, name: str) -> str:
        """The tower that a module is in; empty on the main path."""
        return next((side for side in self.sides if f"{name}.".startswith(f"{side}.")), "")


def find_sequences(model: nn.Module, head: str, *, head_on_labels: bool) -> Sequences | None:
    """Read a model; None when it is of no kind that is known here.

    Args:
        model: Built.
        head: Name of its output head.
        head_on_labels: Whether the head sees rows that have a label, and no others.
    """
    adapter = facts_of(model).adapter
    if adapter is not None:
        return _of_generator(adapter) if adapter.streams else None
    if not is_transformers(type(model)):
        return None  # a plugin's own forward: nobody here knows what it calls with what
    if getattr(model.config, "is_encoder_decoder", False):
        return _of_encoder_decoder(model, head, head_on_labels=head_on_labels)
    if getattr(model, "code_loss_factor", 0.0):
        return _of_talker(head, head_on_labels=head_on_labels)
    return _of_decoder(model, head, head_on_labels=head_on_labels)


# --- generators -------------------------------------------------------------------------------------------------------


def _of_generator(adapter: Any) -> Sequences:
    rules = [(compile_pattern(p, key="streams"), sequence) for p, sequence in adapter.streams.items()]

    def of(name: str) -> str:
        return next((sequence for rule, sequence in rules if rule.fullmatch(name)), units.LATENTS)

    def lengths(batch: Batch) -> dict[str, list[int]]:
        samples, *shape = batch["latents"].shape
        rows = samples - batch.get("blank_rows", 0)
        picture = batch.get("image_embeds")
        return {
            units.PASSES: [1],
            units.SAMPLES: [1] * rows,
            units.LATENTS: [adapter.geometry.tokens(tuple(shape))] * rows,
            units.CAPTION: [batch["prompt_embeds"].shape[1]] * rows,
            units.PICTURE: [] if picture is None else [picture.shape[1]] * rows,
            units.SOUND: [batch["audio_latents"].shape[2] if "audio_latents" in batch else 1] * rows,
        }

    return Sequences(of, lengths, memory=frozenset(adapter.memory_streams))


# --- language models --------------------------------------------------------------------------------------------------


def _of_decoder(model: Any, head: str, *, head_on_labels: bool) -> Sequences:
    towers = {tower.module: tower.name for tower in find_towers(model)}
    sounds = [name for name, kind in towers.items() if kind == "audio"]
    decoder = _decoder_name(model)
    sound = SoundLengths.of(model.get_submodule(sounds[0])) if sounds else None
    see = vision_lengths(model) if len(towers) > len(sounds) else None

    def of(name: str) -> str:
        if head and (name == head or name.startswith(f"{head}.")):
            return units.LABELS if head_on_labels else units.TEXT
        inside = next((tower for tower in towers if name.startswith(f"{tower}.")), None)
        if inside in sounds:
            return units.SOUND_TOKENS if sound and sound.is_behind(name.removeprefix(f"{inside}.")) else units.SOUND
        if inside is not None and see is None:
            return ""
        if inside is not None:
            return units.MEDIA if _MERGED.search(name.removeprefix(inside)) else units.PATCHES
        if _BESIDE.search(name):
            return ""
        if name.startswith(f"{FURTHER_TOKENS}."):
            return units.TEXT
        if not decoder or f"{name}.".startswith(f"{decoder}."):
            return units.TEXT
        if not towers or not _BRIDGE.search(name):
            return ""
        return units.SOUND_TOKENS if _AUDIO.search(name) or len(sounds) == len(towers) else units.MEDIA

    def lengths(batch: Batch) -> dict[str, list[int]]:
        found = _text_lengths(batch, "input_ids", "attention_mask")
        if see is not None:
            found |= see(batch)
        if sound is not None:
            found |= sound(batch)
        return found

    return Sequences(of, lengths, sides=tuple(towers), sound=sound)


def _of_talker(head: str, *, head_on_labels: bool) -> Sequences:
    """A talker, and its code predictor, which goes over the codes of one frame at a time. What it hears or reads from
    (a voice, a thinker) is not known here."""

    def of(name: str) -> str:
        if name == head or name.startswith(f"{head}."):
            return units.LABELS if head_on_labels else units.TEXT
        if ".code_predictor." in name:
            return units.FRAMES if ".code_predictor.lm_head." in name else units.CODES
        return units.TEXT if name.startswith("talker.") else ""

    def lengths(batch: Batch) -> dict[str, list[int]]:
        frames, codes = len(batch["frame_places"]), batch["codec_ids"].shape[-1]
        spoken = {units.CODES: [codes] * frames, units.FRAMES: [frames]}
        return _text_lengths(batch, "input_ids", "attention_mask") | spoken

    return Sequences(of, lengths)


def _of_encoder_decoder(model: Any, head: str, *, head_on_labels: bool) -> Sequences:
    encoder = next((name for name, module in model.named_modules() if module is model.get_encoder()), "encoder")
    sound = SoundLengths.of(model.get_encoder())
    own = units.SOUND if sound is not None else "source"

    def of(name: str) -> str:
        if head and (name == head or name.startswith(f"{head}.")):
            return units.LABELS if head_on_labels else units.TEXT
        reads_encoder = re.search(r"(encoder_attn|EncDecAttention|cross_attn)\.(k|v)(_proj)?(\.|$)", name)
        return own if name.startswith(f"{encoder}.") or reads_encoder else units.TEXT

    def lengths(batch: Batch) -> dict[str, list[int]]:
        found = _text_lengths(batch, "decoder_input_ids", "decoder_attention_mask")
        source = sound(batch) if sound is not None else {own: _rows(batch, "input_ids", "attention_mask")}
        return found | source

    return Sequences(of, lengths, sides=(encoder,), memory=frozenset({own}), sound=sound)


def _decoder_name(model: Any) -> str:
    """The module that takes embeddings through the layers: what towers hand their features to."""
    stated = next((tower.decoder for tower in find_towers(model)), "")
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    return stated or next((name for name, module in model.named_modules() if module is decoder), "")


def _text_lengths(batch: Batch, ids: str, mask: str) -> dict[str, list[int]]:
    rows = _rows(batch, ids, mask)
    labels = batch.get("_rows")
    if labels is not None:
        trained = len(labels)
    else:
        trained = int((batch["shift_labels"] != IGNORED_LABEL).sum()) if "shift_labels" in batch else int(sum(rows))
    return {units.PASSES: [1], units.TEXT: rows, units.LABELS: [trained], units.SAMPLES: [1] * len(rows)}


def _rows(batch: Batch, ids: str, mask: str) -> list[int]:
    """Lengths of documents without padding."""
    if "cu_seq_lens_q" in batch:
        borders = batch["cu_seq_lens_q"].tolist()
        documents = [stop - start for start, stop in pairwise(borders)]
        return documents[:-1] if batch.get("pad_tokens") else documents
    if mask in batch:
        real: list[int] = batch[mask].sum(dim=-1).tolist()
        return real
    tokens = batch.get(ids, batch.get("shift_labels"))
    return [tokens.shape[-1]] * tokens.shape[0] if isinstance(tokens, torch.Tensor) else []


def blocks_of(name: str) -> Iterator[int]:
    """Numbers in a module's name, outermost first."""
    return (int(part) for part in name.split(".") if part.isdigit())
