"""A small folder of CosyVoice3 with all that it speaks with."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mindspeed_mm.fsdp.utils.torchvision_guard import ensure_torchvision

ensure_torchvision()

from mindspeed_mm.fsdp.models.cosyvoice3.flow import CosyVoice3Flow, FlowSizes  # noqa: E402
from mindspeed_mm.fsdp.models.cosyvoice3.language_model import CosyVoice3Config, CosyVoice3LM  # noqa: E402
from mindspeed_mm.fsdp.models.cosyvoice3.vocoder import CosyVoice3Vocoder, VocoderSizes  # noqa: E402
from mindspeed_mm.fsdp.sampling.answers.choosing import Sampling  # noqa: E402
from mindspeed_mm.fsdp.sampling.speech.cosyvoice3.voice import RepetitionAware, without_long_silence  # noqa: E402
from tests.helpers.tiny_processors import byte_tokenizer  # noqa: E402

CODEC, EXTRA = 50, 8
SPECIAL = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "prompt_end": "<|endofprompt|>"}
LLM: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "tie_word_embeddings": True,
}  # fmt: skip
FLOW = FlowSizes(
    vocab_size=CODEC, mel_dim=8, spk_embed_dim=12, pre_lookahead_channels=16, dim=32, depth=2, heads=4, dim_head=8,
    conv_pos_groups=4, conv_pos_kernel=5, time_dim=16, static_chunk_size=10,
)  # fmt: skip
VOCODER = VocoderSizes(
    in_channels=8, base_channels=16, nb_harmonics=2, f0_cond_channels=8, upsample_rates=(4, 3, 2),
    upsample_kernel_sizes=(8, 5, 3), resblock_dilations=(1, 3),
)  # fmt: skip


def small_flow() -> CosyVoice3Flow:
    """With weights of a size that all of its parts act."""
    torch.manual_seed(1)
    flow = CosyVoice3Flow(FLOW).eval()
    _draw(flow, 0.2)
    return flow


def small_vocoder() -> CosyVoice3Vocoder:
    """With voiced and unvoiced frames, and a wave that is not cut off."""
    torch.manual_seed(2)
    vocoder = CosyVoice3Vocoder(VOCODER).eval()
    _draw(vocoder, 0.2)
    with torch.no_grad():
        vocoder.f0_predictor.classifier.weight.mul_(300)
        vocoder.m_source.l_linear.weight.mul_(10)
        vocoder.conv_post.parametrizations.weight.original0.mul_(0.1)
    return vocoder


@torch.no_grad()
def _draw(module: torch.nn.Module, scale: float) -> None:
    for name, parameter in module.named_parameters():
        if name.endswith(("alpha", "original0")):
            parameter.copy_(torch.rand(parameter.shape) + 0.5)
        else:
            parameter.copy_(torch.randn(parameter.shape) * scale)


def make_tiny_cosyvoice3(folder: Path, *, dtype: torch.dtype = torch.float32) -> Path:
    """Language model, tokenizer, flow, vocoder and two saved voices: one with a recording, one without."""
    tokenizer = byte_tokenizer(SPECIAL, None)
    torch.manual_seed(0)
    config = CosyVoice3Config(
        llm_config=LLM | {"vocab_size": len(tokenizer)}, speech_token_size=CODEC, extra_speech_rows=EXTRA,
        mix_ratio=[2, 3], architectures=["CosyVoice3LM"],
    )  # fmt: skip
    CosyVoice3LM(config).to(dtype).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text())
    written |= {"flow_config": dataclasses.asdict(FLOW), "hift_config": dataclasses.asdict(VOCODER)}
    (folder / "config.json").write_text(json.dumps(written))
    torch.save(small_flow().state_dict(), folder / "flow.pt")
    vocoder = {f"generator.{name}": value for name, value in small_vocoder().state_dict().items()}
    torch.save(vocoder, folder / "hift.pt")
    torch.save({"Vera": recorded_voice(tokenizer), "anna": {"embedding": torch.randn(1, 12)}}, folder / "spk2info.pt")
    return folder


def sound_by_parts(voice: Any, text: str, prompt: str | list[int], spoken: list[int], guide: Any) -> np.ndarray:
    """What the language model says after a prompt, through a flow and a vocoder that this test made."""
    ids = voice._tokenizer(prompt, add_special_tokens=False)["input_ids"] if isinstance(prompt, str) else prompt
    words = voice._tokenizer(text, add_special_tokens=False)["input_ids"]
    tokens, _ = voice._talker.talk(ids, words, spoken, RepetitionAware.of(Sampling(99, seed=7)), 99)
    vector, told, mel = guide
    made = small_flow()(torch.tensor(without_long_silence(tokens)), vector, torch.tensor(told, dtype=torch.long), mel)
    return small_vocoder()(made).numpy()


def recorded_voice(tokenizer: Any) -> dict[str, torch.Tensor]:
    """A voice as CosyVoice saves one of a recording of 5 speech tokens."""
    words = tokenizer("Speak.<|endofprompt|>seven", add_special_tokens=False, return_tensors="pt")["input_ids"]
    tokens, vector = torch.tensor([[3, 14, 15, 9, 2]]), torch.randn(1, 12)
    return {
        "prompt_text": words, "llm_prompt_speech_token": tokens, "flow_prompt_speech_token": tokens,
        "prompt_speech_feat": torch.randn(1, 10, 8), "llm_embedding": vector, "flow_embedding": vector,
    }  # fmt: skip
