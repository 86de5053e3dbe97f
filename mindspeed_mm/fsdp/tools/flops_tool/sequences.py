"""Which sequence each module of a model goes over, and how long the sequences of a batch are."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import nn

from mindspeed_mm.core.batch import IGNORED_LABEL, LATENT, Batch
from mindspeed_mm.core.patterns import compile_pattern
from mindspeed_mm.fsdp.models.behaviour.multi_token import NAME as FURTHER_TOKENS
from mindspeed_mm.fsdp.models.diffusion.adapter import DiffusionAdapter
from mindspeed_mm.fsdp.models.diffusion.media_roles import REJECTED_LATENTS
from mindspeed_mm.fsdp.models.facts import facts_of
from mindspeed_mm.fsdp.models.loading.construction import is_transformers
from mindspeed_mm.fsdp.models.structure.towers import find_towers
from mindspeed_mm.fsdp.tools.flops_tool import units
from mindspeed_mm.fsdp.tools.flops_tool.media_lengths import SoundLengths, VisionLengths, vision_lengths
from mindspeed_mm.fsdp.utils.model_parts import setting_of

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
"""Names of parts that no step of a language model runs, and of towers that are not known here."""
_READS_ENCODER = re.compile(r"(encoder_attn|EncDecAttention|cross_attn)\.(k|v)(_proj)?(\.|$)")
"""Names of the layers of a decoder that read what the encoder has made."""


@dataclass(frozen=True)
class Sequences:
    """What is known of one model."""

    of: Callable[[str], str]
    """Name of a module → the sequence that its layers go over; empty where it is not known."""
    lengths: Callable[[Batch], dict[str, list[int]]]
    """Lengths of a batch on the host."""
    sides: tuple[str, ...] = ()
    """Modules in front of the main path: towers, an encoder."""
    memory: frozenset[str] = field(default_factory=frozenset)
    """Sequences that blocks read and never change."""
    sound: SoundLengths | None = None

    def side_of(self, name: str) -> str:
        """The tower that a module is in; empty on the main path."""
        for side in self.sides:
            if _is_in(name, side):
                return side
        return ""


def find_sequences(model: nn.Module, head: str, *, head_on_labels: bool) -> Sequences | None:
    """Read a model; None when its kind is not known here.

    Args:
        model: Built.
        head: Name of its output head.
        head_on_labels: Whether the head sees rows that have a label, and no others.
    """
    adapter = facts_of(model).adapter
    if adapter is not None:
        if adapter.streams:
            return _of_generator(adapter)
        return None
    if not is_transformers(type(model)):
        return None  # a plugin's own forward: it is not known what it calls its modules with
    head_sequence = units.LABELS if head_on_labels else units.TEXT
    if setting_of(model.config, bool, "is_encoder_decoder"):
        return _of_encoder_decoder(model, head, head_sequence)
    if setting_of(model, float, "code_loss_factor"):
        return _of_talker(head, head_sequence)
    return _of_decoder(model, head, head_sequence)


def _is_in(name: str, module: str) -> bool:
    """Whether a module is another one, or inside it; no module is in one that is not there ("")."""
    return bool(module) and f"{name}.".startswith(f"{module}.")


# --- generators -------------------------------------------------------------------------------------------------------


def _of_generator(adapter: DiffusionAdapter) -> Sequences:
    rules = [(compile_pattern(p, key="streams"), sequence) for p, sequence in adapter.streams.items()]

    def of(name: str) -> str:
        for rule, sequence in rules:
            if rule.fullmatch(name):
                return sequence
        return units.LATENTS

    def lengths(batch: Batch) -> dict[str, list[int]]:
        samples, *shape = batch["latents"].shape
        rows = samples - batch.get("blank_rows", 0)
        if REJECTED_LATENTS in batch:  # both sides of a pair
            rows *= 2
        of_each = {
            units.SAMPLES: 1,
            units.LATENTS: adapter.geometry.tokens(tuple(shape)) + adapter.given_tokens(batch),
            units.CAPTION: batch["prompt_embeds"].shape[1],
            units.SOUND: 1,
        }
        if "audio_latents" in batch:
            of_each[units.SOUND] = batch["audio_latents"].shape[2]
        if "image_embeds" in batch:
            of_each[units.PICTURE] = batch["image_embeds"].shape[1]
        found = {units.PASSES: [1]}
        for sequence, length in of_each.items():
            found[sequence] = [length] * rows
        return found

    return Sequences(of, lengths, memory=frozenset(adapter.memory_streams))


# --- language models --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _DecoderParts:
    """The parts of a model with a decoder, and perhaps towers in front of it, by which its modules are told apart."""

    head: str
    head_sequence: str
    decoder: str
    seeing: tuple[str, ...]
    hearing: tuple[str, ...]
    vision: VisionLengths | None
    sound: SoundLengths | None
    of_latents: tuple[str, ...] = ()
    """Parts of the names of modules that latents of pictures go through, and no other tokens."""
    mixing: tuple[str, ...] = ()
    """Beginnings of the names of what stands between a vision tower and the decoder and has attention: its queries may
    be of windows, and its keys patches (Granite 4 Vision), so its work is not known."""
    code_heads: str = ""
    """The list of heads of text and codebooks (`code_heads`); all but the first see places that codes follow."""

    def of(self, name: str) -> str:
        """See `Sequences.of`. The order of the questions counts: a head may be inside the decoder."""
        if _is_in(name, self.head):
            return self.head_sequence
        if any(part in name for part in self.of_latents):
            return units.LATENT_TOKENS
        if _is_in(name, self.code_heads):
            return units.FRAMES
        for tower in (*self.hearing, *self.seeing):
            if name.startswith(f"{tower}."):
                return self._of_tower(tower, name.removeprefix(f"{tower}."))
        if _BESIDE.search(name):
            return ""
        if name.startswith(f"{FURTHER_TOKENS}.") or not self.decoder or _is_in(name, self.decoder):
            return units.TEXT
        has_towers = bool(self.hearing or self.seeing)
        if not has_towers or not _BRIDGE.search(name) or name.startswith(self.mixing):
            return ""
        if not self.seeing or _AUDIO.search(name):
            return units.SOUND_TOKENS
        return units.MEDIA

    def _of_tower(self, tower: str, name: str) -> str:
        if tower in self.hearing:
            is_behind = self.sound is not None and self.sound.is_behind(name)
            if is_behind:
                return units.SOUND_TOKENS
            return units.SOUND
        if self.vision is None:
            return ""
        if _MERGED.search(name):
            return units.MEDIA
        return units.PATCHES

    def lengths(self, batch: Batch) -> dict[str, list[int]]:
        """Return the lengths of a batch's sequences, by the name of the sequence."""
        found = _text_lengths(batch, "input_ids", "attention_mask")
        if self.of_latents:
            latents = _latents_of(batch, found[units.TEXT])
            others = [whole - part for whole, part in zip(found[units.TEXT], latents, strict=True)]
            found |= {units.TEXT: others, units.LATENT_TOKENS: latents}
        if self.vision is not None:
            found |= self.vision(batch)
        if self.sound is not None:
            found |= self.sound(batch)
        if self.code_heads:
            found[units.FRAMES] = [len(batch["code_places"])]
        return found


def _of_decoder(model: nn.Module, head: str, head_sequence: str) -> Sequences:
    kinds = {tower.module: tower.name for tower in find_towers(model)}  # the last one, where several share a module
    seeing: list[str] = []
    hearing: list[str] = []
    for name, kind in kinds.items():
        if kind == "audio":
            hearing.append(name)
        else:
            seeing.append(name)
    sound = vision = None
    if hearing:
        sound = SoundLengths.of(model.get_submodule(hearing[0]))
    if seeing:
        vision = vision_lengths(model)
    of_latents = setting_of(model, tuple, "latent_modules") or ()
    if of_latents and head_sequence == units.TEXT:
        head_sequence = f"{units.TEXT}+{units.LATENT_TOKENS}"  # it goes over all tokens
    towers = (tuple(seeing), tuple(hearing))
    parts = _DecoderParts(
        head,
        head_sequence,
        _decoder_name(model),
        *towers,
        vision,
        sound,
        of_latents,
        _mixing_bridges(model),
        code_heads=setting_of(model, str, "code_heads") or "",
    )
    return Sequences(parts.of, parts.lengths, sides=tuple(kinds), sound=sound)


def _mixing_bridges(model: nn.Module) -> tuple[str, ...]:
    """Beginnings of names, with the dot behind them, of what stands in front of a decoder and has attention."""
    found: dict[str, None] = {}
    for name, module in model.named_modules():
        bridge = _BRIDGE.search(name)
        if bridge is None or _AUDIO.search(name) or "Attention" not in type(module).__name__:
            continue
        rest = name[bridge.end() :].partition(".")[0]
        found[f"{name[: bridge.end()]}{rest}."] = None
    return tuple(found)


def _of_talker(head: str, head_sequence: str) -> Sequences:
    """A talker, and its code predictor, which goes over the codes of one frame at a time. What it hears or reads from
    (a voice, a thinker) is not known here."""

    def of(name: str) -> str:
        if _is_in(name, head):
            return head_sequence
        if ".code_predictor.lm_head." in name:
            return units.FRAMES
        if ".code_predictor." in name:
            return units.CODES
        if name.startswith("talker."):
            return units.TEXT
        return ""

    def lengths(batch: Batch) -> dict[str, list[int]]:
        frames, codes = len(batch["frame_places"]), batch["codec_ids"].shape[-1]
        spoken = {units.CODES: [codes] * frames, units.FRAMES: [frames]}
        return _text_lengths(batch, "input_ids", "attention_mask") | spoken

    return Sequences(of, lengths)


def _of_encoder_decoder(model: nn.Module, head: str, head_sequence: str) -> Sequences:
    encoder = model.get_encoder()  # type: ignore[operator]  # transformers' models have it
    encoder_name = _name_of(encoder, model) or "encoder"
    sound = SoundLengths.of(encoder)
    source = "source" if sound is None else units.SOUND

    def of(name: str) -> str:
        if _is_in(name, head):
            return head_sequence
        if name.startswith(f"{encoder_name}.") or _READS_ENCODER.search(name):
            return source
        return units.TEXT

    def lengths(batch: Batch) -> dict[str, list[int]]:
        found = _text_lengths(batch, "decoder_input_ids", "decoder_attention_mask")
        if sound is not None:
            return found | sound(batch)
        return found | {source: _rows(batch, "input_ids", "attention_mask")}

    return Sequences(of, lengths, sides=(encoder_name,), memory=frozenset({source}), sound=sound)


def _decoder_name(model: nn.Module) -> str:
    """The module that takes embeddings through the layers: what towers hand their features to."""
    towers = find_towers(model)
    if towers and towers[0].decoder:
        return towers[0].decoder
    if not hasattr(model, "get_decoder"):
        return ""
    return _name_of(model.get_decoder(), model)


def _name_of(module: nn.Module, model: nn.Module) -> str:
    """The name of a module of a model; empty where it is not one of them."""
    for name, each in model.named_modules():
        if each is module:
            return name
    return ""


def _text_lengths(batch: Batch, ids: str, mask: str) -> dict[str, list[int]]:
    rows = _rows(batch, ids, mask)
    if "_rows" in batch:  # prepared by the objective
        trained = len(batch["_rows"])
    elif "shift_labels" in batch:
        trained = int((batch["shift_labels"] != IGNORED_LABEL).sum())
    else:
        trained = int(sum(rows))
    return {units.PASSES: [1], units.TEXT: rows, units.LABELS: [trained], units.SAMPLES: [1] * len(rows)}


def _rows(batch: Batch, ids: str, mask: str) -> list[int]:
    """Lengths of documents without padding."""
    if "cu_seq_lens_q" in batch:
        borders = batch["cu_seq_lens_q"].tolist()
        if batch.get("pad_tokens"):
            borders.pop()  # the padding is the last document
        return [stop - start for start, stop in pairwise(borders)]
    if mask in batch:
        real: list[int] = batch[mask].sum(dim=-1).tolist()
        return real
    tokens = batch.get(ids, batch.get("shift_labels"))
    if not isinstance(tokens, torch.Tensor):
        return []
    return [tokens.shape[-1]] * tokens.shape[0]


def _latents_of(batch: Batch, documents: list[int]) -> list[int]:
    """How many tokens of each document are latents.

    Args:
        batch: On the host.
        documents: Tokens of each.
    """
    kinds = batch.get("token_kinds")
    if kinds is None:
        return [0] * len(documents)
    if "cu_seq_lens_q" not in batch:
        rows: list[int] = (kinds == LATENT).sum(dim=-1).tolist()
        return rows
    pieces = kinds[0, : sum(documents)].split(documents)
    return [int((piece == LATENT).sum()) for piece in pieces]


def blocks_of(name: str) -> Iterator[int]:
    """Numbers in a module's name, outermost first."""
    return map(int, filter(str.isdigit, name.split(".")))
