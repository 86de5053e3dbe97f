"""The voice of MOSS-TTS with a delay pattern: a Qwen3 that says text and the codes of all codebooks at once, and the
codec MOSS-Audio-Tokenizer.

What speech goes on from is written as training writes its rows. The loop and its defaults of sampling are the
published ones (`MossTTSDelayModel.generate` of the MOSS-TTS repository), with one difference: text that is cut off
gives the frames that are whole. Shapes: L places of the prompt, G codebooks, C codes of each, N frames.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import DynamicCache
from typing_extensions import override

from mindspeed_mm.core.batch import NO_CODE
from mindspeed_mm.core.errors import ModelFolderError
from mindspeed_mm.fsdp.data.datasets.moss_tts_delay.layout import DelayedSequence, undelayed
from mindspeed_mm.fsdp.data.datasets.moss_tts_delay.moss_tts_delay_dataset import TurnWriter
from mindspeed_mm.fsdp.models.loading.folder import load_model_config, load_pretrained
from mindspeed_mm.fsdp.models.moss_tts_delay.audio_codec import even_loudness, load_codec, needed_codec
from mindspeed_mm.fsdp.models.moss_tts_delay.modeling_moss_tts_delay import MossTTSDelayModel
from mindspeed_mm.fsdp.sampling.answers.asking import RowsView
from mindspeed_mm.fsdp.sampling.answers.choosing import RowChoices, RowStart, TokenChoice, generator_of
from mindspeed_mm.fsdp.sampling.finite import not_finite, rows_are_finite
from mindspeed_mm.fsdp.sampling.speech.voice import Reference, SpeechJob, Voice, room_for
from mindspeed_mm.fsdp.utils.device import current_device
from mindspeed_mm.fsdp.utils.processor import load_processor, tokenizer_of

_OF_TEXT = SimpleNamespace(temperature=1.5, top_k=50, top_p=1.0, do_sample=True)
_OF_CODES = SimpleNamespace(temperature=1.7, top_k=25, top_p=0.8, do_sample=True)
_USUAL_TOKENS = 4096


class MossTTSDelayVoice(Voice):
    """The model with its codec. It takes on the voice of a recording, and speaks as instructions say.

    Args:
        folder: The model's; the codec lies inside it or beside it.
        view: Of families that answer.

    Raises:
        ModelFolderError: Weights, configuration or codec are missing or broken.
    """

    copies = follows_instructions = True
    usual_tokens = _USUAL_TOKENS

    def __init__(self, folder: Path, view: RowsView | None = None) -> None:
        config = load_model_config(folder)
        self._codec = load_codec(needed_codec(folder))
        if self._codec.books < config.n_vq or self._codec.codes != config.audio_vocab_size:
            raise ModelFolderError(
                f"the codec has {self._codec.books} codebooks of {self._codec.codes} codes, the model {config.n_vq} of "
                f"{config.audio_vocab_size}",
                where=str(folder),
                way_out="Copy the codec that the model was released with.",
            )
        self._writer = TurnWriter(tokenizer_of(load_processor(folder)), config, folder)
        self.model: Any = load_pretrained(MossTTSDelayModel, folder, config).to(current_device())
        self._codec.to(current_device())
        self.rate, self.names = self._codec.rate, {}

    @property
    @override
    def parts(self) -> Mapping[str, nn.Module]:
        return {"": self.model, "MOSS-Audio-Tokenizer.": self._codec}

    @override
    def _say(self, job: SpeechJob) -> tuple[np.ndarray, bool]:
        voices = None if job.reference is None else [self._codes_of(job.reference)]
        asked = {"text": job.text, "instruction": job.instructions or None}
        prompt = self._writer.question(asked, voices, "--prompt")
        choice = DelayChoice(
            TokenChoice.of(replace(job.sampling, repetition_penalty=None), _OF_TEXT),
            TokenChoice.of(job.sampling, _OF_CODES),
            room_for(self.model.config, len(prompt.input_ids), job.sampling.max_new_tokens),
            job.is_given_up,
        )
        sounds, finished = speak_delayed(self.model, prompt, choice)
        with torch.inference_mode():
            samples = [self._codec.decode(torch.from_numpy(codes).to(self.model.device)) for codes in sounds]
        told = torch.cat(samples) if samples else torch.zeros(0)
        return told.float().cpu().numpy(), finished

    @torch.inference_mode()
    def _codes_of(self, reference: Reference) -> np.ndarray:
        """(N, G) codes of a recording."""
        samples = even_loudness(torch.from_numpy(reference.at(self.rate)).to(self.model.device))
        codes: np.ndarray = self._codec.encode(samples)[:, : self.model.config.n_vq].cpu().numpy()
        return codes


@dataclass(frozen=True)
class DelayChoice:
    """How what follows is chosen."""

    text: TokenChoice
    codes: TokenChoice
    most_places: int
    is_given_up: Callable[[], bool]


class _Delay:
    """What may follow, place after place.

    A place that chooses the mark of delay still has a code of the first codebook, and the mark is said once for each
    codebook from there on, as published; in rows it is said once less.

    Args:
        config: Of the model.
    """

    def __init__(self, config: Any) -> None:
        self._config, self._places = config, 0
        self._in_sound = False
        self._running = 0
        """Codebooks that have begun, or more."""
        self._ended: int | None = None
        """Codebooks that have ended; None: the sound still goes on."""

    def forced_text(self) -> int | None:
        """The token of text that has to follow; None: it is chosen."""
        if self._ended is None:
            return None
        is_over = self._ended == self._config.n_vq
        mark = self._config.audio_end_token_id if is_over else self._config.audio_assistant_delay_slot_token_id
        return int(mark)

    def kept(self) -> list[int]:
        """Tokens of text that alone are chosen from; empty: all but `left_out`."""
        config = self._config
        slots = [config.audio_assistant_gen_slot_token_id, config.audio_assistant_delay_slot_token_id]
        if self._in_sound:
            return slots
        return []

    def left_out(self) -> list[int]:
        """Tokens of text that are not chosen."""
        config, out = self._config, []
        if not self._in_sound:
            out += [config.pad_token_id, config.audio_assistant_gen_slot_token_id, config.audio_end_token_id]
            out.append(config.audio_assistant_delay_slot_token_id)
        if self._places <= config.n_vq:
            out.append(config.im_end_token_id)
        return out

    def books(self) -> range:
        """Codebooks that have a code at the next place."""
        return range(self._ended or 0, min(self._running, self._config.n_vq))

    def take(self, token: int) -> None:
        """Go on behind a place with this token of text."""
        config = self._config
        delay = config.audio_assistant_delay_slot_token_id
        self._places += 1
        if token == config.audio_start_token_id:
            self._in_sound = True
        if token in (config.audio_start_token_id, config.audio_assistant_gen_slot_token_id, delay):
            self._running += 1
        if token == config.audio_end_token_id:
            self._in_sound, self._running, self._ended = False, 0, None
        elif self._ended is not None or token == delay:
            self._ended = (self._ended or 0) + 1


@torch.inference_mode()
def speak_delayed(
    model: MossTTSDelayModel, prompt: DelayedSequence, choice: DelayChoice
) -> tuple[list[np.ndarray], bool]:
    """What a model says.

    Args:
        model: The model.
        prompt: All in front of the answer.
        choice: How tokens and codes are chosen.

    Returns:
        Codes (N, G) of each sound, and whether the model ended by itself.

    Raises:
        NotFiniteError: Scores are not finite.
    """
    config, device = model.config, model.device
    generator = generator_of(choice.text, device)
    choose_text = RowChoices([choice.text], [RowStart(0, 0)], device, generators=[generator])
    choose_code = RowChoices([choice.codes], [RowStart(0, 0)], device, generators=[generator])
    state, cache = _Delay(config), DynamicCache(config=config.language_config)
    ids_1L = torch.from_numpy(prompt.input_ids)[None].to(device)
    codes_1LG = torch.from_numpy(prompt.codec_ids)[None].to(device)
    told: list[list[torch.Tensor]] = [[] for _ in range(config.n_vq)]
    """Of each codebook."""
    sounds: list[list[torch.Tensor]] = []
    token, place = None, 0
    while place < choice.most_places and token != config.im_end_token_id and not choice.is_given_up():
        hidden_11H = model.language_model(
            inputs_embeds=model.embed(ids_1L, codes_1LG), past_key_values=cache, use_cache=True
        ).last_hidden_state[:, -1:]
        text_1V = model.lm_heads[0](hidden_11H[:, 0]).float()
        codes_1GC = model.code_logits_at(hidden_11H[:, 0]).float()
        is_finite = rows_are_finite(text_1V) & rows_are_finite(codes_1GC.flatten(1))
        forced = state.forced_text()
        if forced is None:
            chosen = choose_text(ids_1L[:, :0], _allowed(text_1V, state)).argmax(dim=-1)
        else:
            chosen = torch.tensor([forced], device=device)
        new_G = codes_1LG.new_full((config.n_vq,), NO_CODE)
        for book in state.books():
            before = torch.stack(told[book])[None] if told[book] else ids_1L[:, :0]
            new_G[book] = choose_code(before, codes_1GC[:, book].clone()).argmax()
            told[book].append(new_G[book])
        token, good = torch.stack([chosen[0], is_finite.all().long()]).tolist()  # one read of the device at each place
        if not good:
            raise not_finite(f"the scores of place {place + 1} of the speech", {"": model})
        if len(state.books()):
            sounds[-1].append(new_G)
        elif token == config.audio_start_token_id:
            sounds.append([])
        state.take(token)
        ids_1L, codes_1LG = chosen[None], new_G[None, None]
        place += 1
    whole = [undelayed(torch.stack(places).cpu().numpy()) for places in sounds if len(places) >= config.n_vq]
    return whole, token == config.im_end_token_id


def _allowed(scores_1V: torch.Tensor, state: _Delay) -> torch.Tensor:
    """Scores of text with those left out that may not follow."""
    if kept := state.kept():
        only = torch.full_like(scores_1V, -torch.inf)
        only[:, kept] = scores_1V[:, kept]
        scores_1V = only
    else:
        scores_1V = scores_1V.clone()
    scores_1V[:, state.left_out()] = -torch.inf
    return scores_1V
