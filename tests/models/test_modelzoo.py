"""`ModelHub.MODEL_MAPPINGS` is the engine's registry; the document's InternVL example is one of its classes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torch import nn

from mindspeed_mm.fsdp.utils.register import model_register
from mindspeed_mm.fsdp.utils.torchvision_guard import prepare_for_transformers
from mindspeed_mm.models.audio import find_audio_tower
from mindspeed_mm.models.common.embedding import embedding_of
from mindspeed_mm.models.common.modelzoo import ModelHub
from mindspeed_mm.models.common.spec import resolve_spec
from mindspeed_mm.models.model_registry import ModelRegistry
from mindspeed_mm.models.text_decoder import find_layered_decoder

prepare_for_transformers()

import transformers  # noqa: E402  (the guard comes first)


class Registered(nn.Module):
    """A user's class."""


def test_a_class_that_is_set_is_registered() -> None:
    ModelHub.MODEL_MAPPINGS["of the test of model hubs"] = Registered
    assert model_register.get("of the test of model hubs") is Registered
    config = SimpleNamespace(model_id="of the test of model hubs")
    assert ModelHub.build(config) is Registered
    by_type = SimpleNamespace(architectures=["Unknown"], model_type="of the test of model hubs")
    assert ModelHub.build(SimpleNamespace(), by_type) is Registered
    assert "qwen3_vl" in ModelHub.MODEL_MAPPINGS and len(ModelHub.MODEL_MAPPINGS) > 10


def test_the_registry_of_the_text_suite_is_the_same() -> None:
    """Document 004: `ModelRegistry._REGISTRY`."""
    ModelRegistry._REGISTRY["of the test of registries"] = Registered
    assert ModelHub.MODEL_MAPPINGS["of the test of registries"] is Registered
    ModelRegistry.register("a second of the test of registries", Registered)
    assert model_register.get("a second of the test of registries") is Registered
    assert ModelRegistry.get_model_class("a second of the test of registries") is Registered


def test_parts_of_a_model_are_found_at_the_documented_paths() -> None:
    """Document 003: text decoder, audio, embedding and specification of a model."""
    whisper = transformers.WhisperForConditionalGeneration._from_config(
        transformers.WhisperConfig(
            d_model=8, encoder_layers=1, decoder_layers=1, encoder_attention_heads=1, decoder_attention_heads=1,
            encoder_ffn_dim=8, decoder_ffn_dim=8, vocab_size=20, pad_token_id=0, bos_token_id=0, eos_token_id=0,
            decoder_start_token_id=0, num_mel_bins=4, max_source_positions=4, max_target_positions=4,
        )
    )  # fmt: skip
    assert find_audio_tower(whisper) is None  # its decoder reads the encoder in every layer
    text = transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(
            hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=1, num_key_value_heads=1,
            head_dim=8, vocab_size=20,
        )
    )  # fmt: skip
    assert find_layered_decoder(text) is text.model and embedding_of(text) is text.model.embed_tokens
    assert resolve_spec(text).blocks == ["model.layers.0", "model.layers.1"]
    assert find_audio_tower(text) is None


def test_a_class_that_nobody_registered() -> None:
    with pytest.raises(ValueError, match="no class is registered for nothing"):
        ModelHub.build(SimpleNamespace(model_id="nothing"))
    with pytest.raises(KeyError):
        ModelHub.MODEL_MAPPINGS["nothing"]


def test_the_documents_example_of_a_librarys_class() -> None:
    from transformers import InternVLForConditionalGeneration

    from mindspeed_mm.models.hf_src.internvl3_5 import InternVLChatModelGeneration as Source
    from mindspeed_mm.models.transformers.internvl3_5 import InternVLChatModelGeneration

    assert InternVLChatModelGeneration is Source
    assert issubclass(InternVLChatModelGeneration, InternVLForConditionalGeneration)
    assert InternVLChatModelGeneration._init_weights is InternVLForConditionalGeneration._init_weights
