"""`ModelHub.MODEL_MAPPINGS` is the engine's registry; the document's InternVL example is one of its classes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torch import nn

from mindspeed_mm.fsdp.utils.register import model_register
from mindspeed_mm.models.common.modelzoo import ModelHub


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
