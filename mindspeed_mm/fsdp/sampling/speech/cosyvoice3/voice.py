"""CosyVoice3 as a voice: language model, flow and vocoder of one model folder. Speech tokens are chosen by the
published sampling.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from pydantic import TypeAdapter, ValidationError
from torch import nn
from transformers import DynamicCache
from typing_extensions import override

from mindspeed_mm.checkpoint.cosyvoice3_release import FLOW, VOCODER
from mindspeed_mm.checkpoint.pt_files import load_weights
from mindspeed_mm.core.errors import ModelFolderError, UsageError
from mindspeed_mm.core.suggest import did_you_mean
from mindspeed_mm.fsdp.data.datasets.cosyvoice.cosyvoice_dataset import SpeechRows
from mindspeed_mm.fsdp.models.cosyvoice3.flow import NOISE_FRAMES, CosyVoice3Flow, FlowSizes
from mindspeed_mm.fsdp.models.cosyvoice3.language_model import CosyVoice3LM
from mindspeed_mm.fsdp.models.cosyvoice3.vocoder import CosyVoice3Vocoder, VocoderSizes
from mindspeed_mm.fsdp.models.loading.folder import check_all_loaded, load_model_config, load_pretrained
from mindspeed_mm.fsdp.sampling.answers.asking import RowsView
from mindspeed_mm.fsdp.sampling.answers.choosing import Sampling
from mindspeed_mm.fsdp.sampling.finite import not_finite, rows_are_finite
from mindspeed_mm.fsdp.sampling.speech.cosyvoice3.reference import Guide, Listener
from mindspeed_mm.fsdp.sampling.speech.voice import SpeechJob, Voice, room_for
from mindspeed_mm.fsdp.utils.device import current_device
from mindspeed_mm.fsdp.utils.processor import load_processor

END_OF_PROMPT = "<|endofprompt|>"
_ASSISTANT = "You are a helpful assistant."
"""First sentence of the published prompts."""
_OF_TRAINING = "generator."
"""Prefix of weight names in a vocoder that was saved together with its discriminators."""
_MARKS = 2
"""Tokens before and after the text of a sequence."""
_Sizes = TypeVar("_Sizes")


class CosyVoice3Voice(Voice):
    """Speaks with the voice of a recording or with a saved voice.

    A recording with its words is continued (published as zero-shot). Without words (cross-lingual) or with
    instructions (instruct), the language model gets only the prompt, and the flow copies the voice.

    Args:
        folder: The model folder, with `flow.pt` and `hift.pt`.
        view: Not used, since the model does not answer.

    Raises:
        ModelFolderError: Weights, configuration or tokenizer are missing or broken.
    """

    usual_tokens = NOISE_FRAMES // 2
    copies = reads_reference = follows_instructions = True

    def __init__(self, folder: Path, view: RowsView | None = None) -> None:
        config = load_model_config(folder)
        flow_sizes = _sizes(FlowSizes, config, "flow_config", folder)
        vocoder_sizes = _sizes(VocoderSizes, config, "hift_config", folder)
        self._flow: CosyVoice3Flow = _part(CosyVoice3Flow, flow_sizes, folder / FLOW)
        self._vocoder: CosyVoice3Vocoder = _part(CosyVoice3Vocoder, vocoder_sizes, folder / VOCODER)
        self._talker = TokenSpeaker(load_pretrained(CosyVoice3LM, folder, config).to(current_device()))
        _check_fit(config.speech_token_size, flow_sizes, vocoder_sizes, folder)
        self._tokenizer: Any = load_processor(folder)
        self._check_tokenizer(folder)
        self.rate = vocoder_sizes.sampling_rate
        self._listener = Listener(folder, flow_sizes, self.rate, vocoder_sizes.samples_a_frame)
        self._saved = self._listener.saved()
        self.names = {name.lower(): name for name in self._saved}
        self.usual_name = next(iter(self._saved), None)

    @property
    @override
    def parts(self) -> Mapping[str, nn.Module]:
        return {"": self._talker.model, f"{FLOW}: ": self._flow, f"{VOCODER}: ": self._vocoder}

    @override
    def _say(self, job: SpeechJob) -> tuple[np.ndarray, bool]:
        guide = self._guide(job)
        prompt, spoken = self._prompt(job, guide)
        choice = RepetitionAware.of(job.sampling)
        longest = NOISE_FRAMES // self._flow.sizes.token_mel_ratio - len(guide.tokens)
        left = job.sampling.max_new_tokens
        waves: list[np.ndarray] = []
        is_whole = True
        parts = [self._ids(passage) for passage in passages(job.text.strip(), lambda text: len(self._ids(text)))]
        around = len(prompt) + len(spoken) + _MARKS
        rooms = [room_for(self._talker.model.config.llm_config, around + len(part), longest) for part in parts]
        for part, room in zip(parts, rooms, strict=True):
            if left <= 0 or job.is_given_up():
                is_whole = False
                break
            tokens, ended = self._talker.talk(prompt, part, spoken, choice, min(left, room), job.is_given_up)
            left, is_whole = left - len(tokens), is_whole and ended
            if tokens:
                waves.append(self._wave(without_long_silence(tokens), guide))
        return np.concatenate(waves) if waves else np.zeros(0, dtype=np.float32), is_whole

    def _guide(self, job: SpeechJob) -> Guide:
        """The voice of a job.

        Raises:
            UsageError: The job names none, and the folder has none.
            DataError: The recording cannot be used.
        """
        if job.reference is None:
            if job.name is not None:
                return self._saved[job.name]
            way_out = "Give some seconds of speech: --audio recording.wav, with its words in --audio-text."
            raise UsageError("the model has no voice of its own", key="--audio", way_out=way_out)
        guide = self._listener.hear(job.reference)
        words = (job.reference.words or "").strip()
        if words:
            return replace(guide, prompt=self._ids(f"{_ASSISTANT}{END_OF_PROMPT}{words}"))
        return guide

    def _prompt(self, job: SpeechJob, guide: Guide) -> tuple[Sequence[int], Sequence[int]]:
        """Text and speech tokens of the prompt. Instructions that are a whole prompt, as in rows for training, are kept
        as they are."""
        instructions, usual = job.instructions.strip(), f"{_ASSISTANT}{END_OF_PROMPT}"
        if instructions and instructions != usual:
            whole = instructions if END_OF_PROMPT in instructions else f"{_ASSISTANT} {instructions}{END_OF_PROMPT}"
            return self._ids(whole), ()
        if guide.prompt is None:
            return self._ids(usual), ()
        return guide.prompt, guide.tokens

    def _wave(self, tokens: Sequence[int], guide: Guide) -> np.ndarray:
        """Samples (N,) of speech tokens.

        Raises:
            NotFiniteError: The mel is not finite.
        """
        device = current_device()
        mel_TM = self._flow(
            torch.tensor(tokens, device=device),
            guide.vector_S.to(device),
            torch.tensor(guide.tokens, dtype=torch.long, device=device),
            guide.mel_TM.to(device),
        )
        if not mel_TM.isfinite().all():
            raise not_finite("the mel frames of the voice", self.parts)
        wave: np.ndarray = self._vocoder(mel_TM).float().cpu().numpy()
        return wave

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def _check_tokenizer(self, folder: Path) -> None:
        """Raise `ModelFolderError` if the tokenizer lacks the tokens that the release adds to Qwen2's."""
        if len(self._ids(END_OF_PROMPT)) != 1:
            what = f"the tokenizer has no token '{END_OF_PROMPT}', which ends every prompt"
            way_out = "Make the folder of the release: mm convert RELEASE FOLDER."
            raise ModelFolderError(what, where=str(folder), way_out=way_out)


def _sizes(kind: type[_Sizes], config: object, section: str, folder: Path) -> _Sizes:
    """Sizes of a part; defaults are the release's.

    Raises:
        ModelFolderError: The section of config.json has unknown keys or wrong types.
    """
    given = getattr(config, section, None) or {}
    known = [each.name for each in fields(kind)]  # type: ignore[arg-type]
    where, way_out = str(folder / "config.json"), "Compare it with the model's YAML."
    if not isinstance(given, dict):
        raise ModelFolderError(f"{given!r:.80} is not a section", where=where, key=section, way_out=way_out)
    for key in given:
        if key not in known:
            raise ModelFolderError("unknown key", where=where, key=f"{section}.{key}", way_out=did_you_mean(key, known))
    try:
        sizes = TypeAdapter(kind).validate_python(given)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, (section, *first["loc"])))
        raise ModelFolderError(first["msg"], where=where, key=key, way_out=way_out) from error
    for name in known:
        value = getattr(sizes, name)
        if min(value if isinstance(value, Sequence) else [value], default=0) <= 0:
            raise ModelFolderError(f"{value} is not above 0", where=where, key=f"{section}.{name}", way_out=way_out)
    return sizes


def _part(kind: Callable[[_Sizes], nn.Module], sizes: _Sizes, path: Path) -> Any:
    """Load a part with its weights, on this process's device.

    Raises:
        CheckpointError: The file is broken.
        ModelFolderError: The file is missing, its weights do not fit, or the sizes do not fit together.
    """
    if not path.is_file():
        way_out = "The language model alone makes no sound: copy flow.pt and hift.pt of the release into the folder."
        raise ModelFolderError("does not exist", where=str(path), key="--speak", way_out=way_out)
    stored = load_weights(path)
    tensors = stored.items() if isinstance(stored, dict) else ()
    weights = {name.removeprefix(_OF_TRAINING): value for name, value in tensors if isinstance(value, torch.Tensor)}
    try:
        with torch.device("meta"):
            module = kind(sizes)
    except (ValueError, RuntimeError, IndexError) as error:
        what = f"the sizes of {path.name} do not fit together: {error}"
        way_out = "Compare the section with the model's YAML."
        raise ModelFolderError(what, where=str(path.with_name("config.json")), way_out=way_out) from error
    try:
        report = module.load_state_dict(weights, strict=False, assign=True)
    except RuntimeError as error:
        first = str(error).splitlines()[1:2] or [str(error)]
        what, way_out = f"weights do not fit: {first[0].strip()}", "Use the file of the release."
        raise ModelFolderError(what, where=str(path), way_out=way_out) from error
    check_all_loaded(report._asdict(), path)
    return module.eval().requires_grad_(False).to(current_device())


def _check_fit(codec: int, flow: FlowSizes, vocoder: VocoderSizes, folder: Path) -> None:
    """Raise `ModelFolderError` for parts of different models."""
    for what, one, other in (
        ("speech tokens of the language model and of the flow", codec, flow.vocab_size),
        ("mel bins of the flow and of the vocoder", flow.mel_dim, vocoder.in_channels),
    ):
        if one != other:
            way_out = "Use the parts of one release."
            raise ModelFolderError(f"{what} differ: {one} and {other}", where=str(folder), way_out=way_out)


# --- parts of a long text ---------------------------------------------------------------------------------------------
# Splits long texts for CosyVoice3 into parts of whole sentences, about 60 to 80 tokens each, as published
# (FunAudioLLM/CosyVoice, `utils/frontend_utils.py`).

_LONGEST, _LONG_ENOUGH, _TOO_SHORT = 80, 60, 20
_END = re.compile(r"""[.?!;:。？！；：、]+['"”’)\]]*\s*""")
"""End of a sentence or clause, with closing quotes."""


def passages(text: str, length: Callable[[str], int]) -> list[str]:
    """A text in parts.

    Args:
        text: Not empty.
        length: Number of tokens of a text.

    Returns:
        Parts without surrounding spaces. A part exceeds 80 tokens only if a sentence is long.
    """
    if length(text) <= _LONGEST:
        return [text.strip()]
    parts, current = list[str](), ""
    for sentence in _sentences(text):
        if current and length(current + sentence) > _LONGEST and length(current) > _LONG_ENOUGH:
            parts.append(current)
            current = ""
        current += sentence
    if parts and length(current) < _TOO_SHORT:
        parts[-1] += current
    else:
        parts.append(current)
    return [part.strip() for part in parts if any(map(str.isalnum, part))] or [text.strip()]


def _sentences(text: str) -> list[str]:
    found, start = list[str](), 0
    for end in _END.finditer(text):
        around = text[max(0, end.start() - 1) : end.start()] + text[end.end() : end.end() + 1]
        if len(end.group()) == 1 and len(around) == 2 and around.isdigit():
            continue  # inside a number or a time
        found.append(text[start : end.end()])
        start = end.end()
    if start < len(text):
        return [*found, text[start:]]
    return found


LEAST_PER_TOKEN, MOST_PER_TOKEN = 2, 20
"""Speech tokens for each token of text."""
_TOP_P, _TOP_K = 0.8, 25
_WINDOW, _MOST_ALIKE = 10, 1
"""A token that occurs this often among the last `_WINDOW` is drawn again, from all tokens."""
_SILENT = frozenset({1, 2, 28, 29, 55, 248, 494, 2241, 2242, 2322, 2323})
"""Tokens of silence and breath, as listed in the published code."""
_MOST_SILENT = 5


@dataclass(frozen=True)
class RepetitionAware:
    """Repetition aware sampling (VALL-E 2, arXiv:2406.05370): a token of the nucleus; if it repeats itself, one of all
    tokens."""

    temperature: float
    """0 always takes the likeliest token."""
    top_p: float
    top_k: int
    """0: all tokens."""
    generator: torch.Generator

    @classmethod
    def of(cls, sampling: Sampling) -> RepetitionAware:
        """The sampling of a job, with published defaults."""
        generator = torch.Generator()
        if sampling.seed is None:
            generator.seed()
        else:
            generator.manual_seed(sampling.seed)
        return cls(
            1.0 if sampling.temperature is None else sampling.temperature,
            _TOP_P if sampling.top_p is None else sampling.top_p,
            _TOP_K if sampling.top_k is None else sampling.top_k,
            generator,
        )

    def choose(self, scores_V: torch.Tensor, said: Sequence[int]) -> int:
        """The next token.

        Args:
            scores_V: Logits on the CPU.
            said: Tokens so far.
        """
        if not self.temperature:
            return int(scores_V.argmax())
        scores_V = scores_V / self.temperature
        token = self._from_nucleus(scores_V)
        if list(said[-_WINDOW:]).count(token) >= _MOST_ALIKE:
            scores_V[token] = -torch.inf
            token = self._drawn(scores_V.softmax(dim=0))
        return token

    def _from_nucleus(self, scores_V: torch.Tensor) -> int:
        shares, tokens = scores_V.softmax(dim=0).sort(descending=True, stable=True)
        kept = 1 + int((shares.cumsum(dim=0)[:-1] < self.top_p).sum())  # the last of them reaches the border
        kept = min(kept, self.top_k or kept)
        return int(tokens[self._drawn(shares[:kept])])

    def _drawn(self, shares: torch.Tensor) -> int:
        return int(shares.multinomial(1, replacement=True, generator=self.generator))


class TokenSpeaker:
    """The language model, ready to generate speech tokens.

    Args:
        model: The model on its device.
    """

    def __init__(self, model: CosyVoice3LM) -> None:
        self.model = model.eval()
        config = model.config
        self._codec: int = config.speech_token_size
        self._rows = SpeechRows(config.llm_config.vocab_size, self._codec, *config.mix_ratio)

    @torch.inference_mode()
    def talk(
        self,
        prompt: Sequence[int],
        text: Sequence[int],
        reference: Sequence[int],
        choice: RepetitionAware,
        most: int,
        is_given_up: Callable[[], bool] = lambda: False,
    ) -> tuple[list[int], bool]:
        """Speech tokens of a text, and whether the model ended by itself.

        Args:
            prompt: Text tokens of the instruction and of the words of the reference.
            text: Text tokens to say.
            reference: Speech tokens of the reference, which are continued.
            choice: How tokens are chosen.
            most: Maximum number of tokens; `MOST_PER_TOKEN` for each token of text is another limit.
            is_given_up: Asked between tokens.

        Raises:
            NotFiniteError: Scores are not finite.
        """
        ids, _ = self._rows.whole(prompt, text, reference).arrays()
        ids_1L = torch.from_numpy(ids[None, :-1])  # without the end mark
        least, most = LEAST_PER_TOKEN * len(text), min(MOST_PER_TOKEN * len(text), most)
        cache, said = DynamicCache(config=self.model.config.llm_config), list[int]()
        while len(said) < most and not is_given_up():
            inputs = ids_1L.to(self.model.device)
            logits_1LV = self.model(input_ids=inputs, past_key_values=cache, use_cache=True).logits
            scores_V = logits_1LV[0, -1].float().cpu()
            if not rows_are_finite(scores_V):
                raise not_finite(f"the scores of speech token {len(said) + 1}", {"": self.model})
            if len(said) < least:
                scores_V[self._codec :] = -torch.inf
            token = choice.choose(scores_V, said)
            if token >= self._codec:
                return said, True
            said.append(token)
            ids_1L = torch.tensor([[self._rows.text_rows + token]])
        return said, False


def without_long_silence(tokens: Sequence[int]) -> list[int]:
    """The tokens, with at most five of silence or breath in a row, as published."""
    kept, silent = list[int](), 0
    for token in tokens:
        silent = silent + 1 if token in _SILENT else 0
        if silent <= _MOST_SILENT:
            kept.append(token)
    return kept
