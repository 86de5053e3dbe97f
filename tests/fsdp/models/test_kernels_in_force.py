"""The chosen kernel is the one that computes: where its numbers are wrong, parity is lost in every kind of model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mindspeed_mm.fsdp.models.behaviour.attention import attention_name
from mindspeed_mm.fsdp.models.behaviour.packed_rows import apply_packed_rows
from mindspeed_mm.fsdp.models.modelhub import ModelHub
from mindspeed_mm.fsdp.ops.context_attention.layer import ContextGroups, context_attention
from mindspeed_mm.fsdp.ops.context_attention.layout import build_layout
from mindspeed_mm.fsdp.params.model_args import ModelArguments
from tests.helpers.fake_kernels import fresh_process, pretend_device, pretend_installed, registered, wrong_numbers
from tests.helpers.tiny_generators import make_tiny_wan
from tests.helpers.tiny_models import make_tiny_qwen3, make_tiny_qwen3_vl

BF16, CPU = torch.bfloat16, torch.device("cpu")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("models")
    return {
        "text": make_tiny_qwen3(base / "text"),
        "vision": make_tiny_qwen3_vl(base / "vision"),
        "generator": make_tiny_wan(base / "wan", attention_head_dim=16, num_attention_heads=2),
    }


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    with fresh_process():
        yield


def built(folder: Path) -> Any:
    """A model in fp32 of which a plan in bf16 was made: a CPU's kernels are compared in full precision."""
    given = ModelArguments(model_name_or_path=str(folder))
    model = ModelHub.build(given, param_dtype=BF16)
    ModelHub.load_weights(model, given, seed=3, device=CPU)
    return model


def packed_row(folders: dict[str, Path]) -> torch.Tensor:
    model = built(folders["text"])
    apply_packed_rows(model)
    borders = torch.tensor([0, 4, 9], dtype=torch.int32)
    row = {"cu_seq_lens_q": borders, "cu_seq_lens_k": borders, "max_length_q": 5, "max_length_k": 5}
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    logits: torch.Tensor = model(torch.arange(20, 29)[None], position_ids=positions, use_cache=False, **row).logits
    return logits


def tower(folders: dict[str, Path]) -> torch.Tensor:
    visual = built(folders["vision"]).model.visual
    patches = torch.randn(32, 384, generator=torch.Generator().manual_seed(1))
    features: torch.Tensor = visual(patches, grid_thw=torch.tensor([[1, 4, 4]] * 2)).pooler_output
    return features


def ring(folders: dict[str, Path]) -> torch.Tensor:
    built(folders["text"])  # it is a model that puts a kernel into force
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(1, 12, 2, 8, generator=generator) for _ in range(3))
    layout = build_layout(12, 1, 1)
    return context_attention(q, k, v, ContextGroups(), layout, layout, causal=True)


def generator_of_clips(folders: dict[str, Path]) -> torch.Tensor:
    model = built(folders["generator"])
    random = torch.Generator().manual_seed(4)
    latents = torch.randn(1, 16, 1, 4, 4, generator=random)
    text = torch.randn(1, 6, model.config.text_dim, generator=random)
    sample: torch.Tensor = model(latents, torch.tensor([500.0]), text, return_dict=False)[0]
    return sample


CONSUMERS = [packed_row, tower, ring, generator_of_clips]


@pytest.mark.parametrize("consumer", CONSUMERS)
def test_what_is_chosen_computes(
    consumer: Callable[[dict[str, Path]], torch.Tensor],
    folders: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with torch.no_grad(), registered("FA3", wrong_numbers):
        expected = consumer(folders)
        pretend_device(monkeypatch, "cuda", (9, 0))
        torch.testing.assert_close(consumer(folders), expected, rtol=0, atol=0)  # it is not installed
        pretend_installed(monkeypatch, tmp_path, "flash-attn-3", "3.0.0")
        with pytest.raises(AssertionError, match="not close"):
            torch.testing.assert_close(consumer(folders), expected)


def test_a_package_that_does_not_load_is_passed_over_and_told(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_device(monkeypatch, "cuda", (9, 0))
    pretend_installed(monkeypatch, tmp_path, "flash-attn-3", "3.0.0")
    with registered("FA3", None):
        told = attention_name(built(folders["text"]))
    others = "flash-attn-4 is not installed; cudnn needs version 91501, and torch has none"
    assert told == f"mm_varlen by torch_flash (flash-attn-3 does not load: undefined symbol; {others})"
