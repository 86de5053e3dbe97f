"""Towers call attention once for all pictures, and what they compute is what transformers' own classes compute."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mindspeed_mm.fsdp.features.speed.tower_operators import apply_tower_operators
from mindspeed_mm.fsdp.models.behaviour.host_grids import attend_to_pictures_at_once, read_grids_on_host
from mindspeed_mm.fsdp.ops import attention
from mindspeed_mm.fsdp.ops.attention import ATTENTION_NAME, register_attention
from tests.fsdp.models.test_towers import WITH_MEDIA, _features
from tests.helpers.packed_families import InDouble

ROWS_OF_PATCHES = (
    *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "omni", "glm4v", "glm4v_moe"),
    *("kimi_k25", "mistral3", "qwen3_omni", "qwen3_asr", "minimax_m3_vl"),
)
"""Families with a tower that takes all pictures as one row; those of the others takes a batch of them."""
QUICK = ("qwen2_5_vl", "omni", "mistral3", "gemma4")
BATCH_OR_ROW = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in WITH_MEDIA]
VIEWS = frozenset(
    {"view", "_unsafe_view", "transpose", "t", "permute", "expand", "slice", "split", "split_with_sizes", "unbind"}
    | {"select", "unsqueeze", "squeeze", "detach", "alias", "_reshape_alias", "as_strided", "reshape"}
)


def prepared(model: Any) -> Any:
    register_attention()
    model.set_attn_implementation(ATTENTION_NAME)
    read_grids_on_host(model)
    attend_to_pictures_at_once(model)
    apply_tower_operators(model, norms=True)
    return model


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Documents of each call of the attention function."""
    calls: list[int] = []
    real = attention._Layer.attend_documents

    def attend(layer: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_q: Any, cu_k: Any) -> torch.Tensor:
        calls.append(len(cu_q) - 1)
        return real(layer, q, k, v, cu_q, cu_k)

    with monkeypatch.context() as patch:
        patch.setattr(attention._Layer, "attend_documents", attend)
        yield calls


def run(model: Any, family: Any) -> tuple[float, dict[str, torch.Tensor], dict[str, int]]:
    """Sum of all features, gradients, and how many pictures, clips and sounds there were."""
    media = [item for sample in family.samples() for item in sample["media"]]
    total, counts = torch.zeros((), dtype=torch.float64), {}
    with InDouble():
        for kind in dict.fromkeys(item.kind for item in media):
            tensors = [item.tensors for item in media if item.kind == kind]
            counts[kind] = len(tensors)
            joined = {name: torch.cat([each[name] for each in tensors]) for name in tensors[0]}
            total = total + (_features(model, kind, joined) / 3).tanh()
        total.backward()
    return float(total.detach()), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, counts


@pytest.mark.parametrize("name", BATCH_OR_ROW)
def test_features_and_gradients_are_those_of_the_library(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    family = WITH_MEDIA[name]
    expected, gradients, counts = run(family.build(attention="sdpa"), family)
    with counted(monkeypatch) as calls:
        found, found_gradients, _ = run(prepared(family.build(attention="sdpa")), family)
    if name != "gemma3":  # whose normed features are not finite in a sum of this size
        assert found == pytest.approx(expected, rel=1e-12, abs=1e-12)
    assert found_gradients.keys() == gradients.keys()
    for parameter, gradient in gradients.items():
        torch.testing.assert_close(found_gradients[parameter], gradient, rtol=1e-9, atol=1e-12, equal_nan=True)
    assert bool(calls) == (name in ROWS_OF_PATCHES)
    if calls:
        assert max(calls) >= max(counts.values()), (calls, counts)


class Operations(TorchDispatchMode):
    """Counts what is computed, views left out."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).split(".")[1]
        if name not in VIEWS:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


EQUAL = {pictures: [[1, side, side]] * pictures for pictures, side in ((1, 64), (64, 8), (256, 4))}
DIFFERENT = {3: [[1, 8, 4], [2, 4, 4], [1, 2, 2]], 65: [*[[1, 8, 4], [1, 4, 4], [1, 2, 6], [1, 4, 8]] * 16, [1, 2, 2]]}


def operations(grids: list[list[int]], depth: int, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Of a tower of so many blocks, forward and backward: kernels of attention, and all else."""
    from transformers import Qwen3VLConfig
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

    sizes = {"hidden_size": 32, "num_heads": 2, "intermediate_size": 64, "out_hidden_size": 32, "patch_size": 4}
    others = {"spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 256}
    vision = {"depth": depth, "deepstack_visual_indexes": [], **sizes, **others}
    tower = prepared(Qwen3VLVisionModel(Qwen3VLConfig(vision_config=vision).vision_config))
    patches = torch.randn(sum(t * h * w for t, h, w in grids), 3 * 2 * 4 * 4)
    with counted(monkeypatch) as calls, Operations() as found:
        tower(patches, grid_thw=torch.tensor(grids)).pooler_output.sum().backward()
    assert calls == [sum(grid[0] for grid in grids)] * depth  # one call a block, with all documents
    kernels = sum(count for name, count in found.counts.items() if "scaled_dot_product" in name)
    return kernels, sum(found.counts.values()) - kernels


@pytest.mark.parametrize("grids", [*EQUAL.values(), *DIFFERENT.values()], ids=[*map(str, EQUAL), "3 sizes", "4 sizes"])
def test_operations_of_a_block_do_not_grow_with_the_pictures(
    grids: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (kernels, few), (more_kernels, more) = (operations(grids, depth, monkeypatch) for depth in (1, 3))
    lengths = len({h * w for _, h, w in grids})
    assert more_kernels - kernels == 2 * 2 * lengths  # forward and backward of two blocks
    assert (more - few) / 2 <= 70 + 6 * lengths  # what joins and parts the documents of a length
