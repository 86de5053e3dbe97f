"""Language models whose rows are spread over ranks train like one process, fp64: padded and packed, with images, over
ring, Ulysses and both, sharded over the same ranks. Planted faults fail."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from mindspeed_mm.core.errors import ConfigError, DataError, MMError
from mindspeed_mm.fsdp.distributed.context import apply as context_parallel
from mindspeed_mm.fsdp.distributed.context.apply import (
    ContextParallel,
    apply_to_decoder,
    split_rows,
    take_share,
)
from mindspeed_mm.fsdp.distributed.context.plan import context_problems
from mindspeed_mm.fsdp.distributed.context.towers import SpreadPatches
from mindspeed_mm.fsdp.loss.objectives import TokenCrossEntropy
from mindspeed_mm.fsdp.ops.attention import AttentionError
from mindspeed_mm.fsdp.ops.context_attention import language
from mindspeed_mm.fsdp.ops.context_attention.language import rule_of
from mindspeed_mm.fsdp.ops.context_attention.layer import ContextGroups
from mindspeed_mm.fsdp.ops.context_attention.layout import build_layout
from mindspeed_mm.fsdp.ops.context_attention.share import ContextShare
from tests.fsdp.distributed.context_step import (
    LENGTHS,
    make_tiny_sinks,
    make_tiny_softcap,
    make_tiny_windows,
    plain_step,
    spread_step,
)
from tests.fsdp.distributed.tensor_parallel_step import SEQUENCE
from tests.helpers.distributed import run_ranks
from tests.helpers.parity import ParityError, StepRecord, compare_steps
from tests.helpers.tiny_models import make_tiny_qwen3, make_tiny_qwen3_vl

TOLERANCE = 1e-9
RING = {"ring_attention_size": 2}
ULYSSES = {"ulysses_parallel_size": 2}
FEW = (1, 2, 2, 1)
WINDOW = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
"""Of the second layer."""
BOTH = RING | ULYSSES
TENSOR: dict[str, Any] = {"tensor_parallel_size": 2}
SLOW = pytest.mark.slow

# name → (model, packed, ranks, plan, more)
CASES: dict[str, tuple[str, bool, int, dict[str, Any], dict[str, Any]]] = {
    "text, ring": ("text", False, 2, RING, {}),
    "text, ulysses": ("text", False, 2, ULYSSES, {}),
    "text, packed, ring, recompute": ("text", True, 2, RING, {"recompute": True, "per_sample": True}),
    "text, packed, ulysses": ("text", True, 2, ULYSSES, {}),
    "images, ring": ("images", False, 2, RING, {}),
    "images, ulysses": ("images", False, 2, ULYSSES, {"recompute": True}),
    "images, split tower, ring": ("images", False, 2, RING, {"split_towers": True, "recompute": True}),
    "images, split tower, packed, ulysses": ("images", True, 2, ULYSSES, {"split_towers": True}),
    "windows, split tower, ring": ("windows", False, 2, RING, {"split_towers": True}),
    "window, ring": ("window", False, 2, RING, {}),
    "window, packed, ring, recompute": ("window", True, 2, RING, {"recompute": True}),
    "window, packed, ulysses": ("window", True, 2, ULYSSES, {}),
    "sinks and window, ulysses": ("sinks", False, 2, ULYSSES, {}),
    "sinks and window, packed, ring": ("sinks", True, 2, RING, {"recompute": True}),
    "softcap and window, ring": ("softcap", False, 2, RING, {}),
    "softcap and window, packed, ulysses": ("softcap", True, 2, ULYSSES, {}),
    "images, packed, ring": ("images", True, 2, RING, {}),
    "images, packed, ulysses": ("images", True, 2, ULYSSES, {}),
    "text, both": ("text", False, 4, BOTH, {}),
    "text, packed, both": ("text", True, 4, BOTH, {}),
    "text, packed, ring of 4": ("text", True, 4, {"ring_attention_size": 4}, {}),
    "text, ulysses of 4, 2 key heads": ("text", False, 4, {"ulysses_parallel_size": 4}, {}),
    "text, two data ranks, ring": ("text", True, 4, RING, {"per_sample": True}),
    "text, two copies, ulysses": ("text", False, 4, ULYSSES | {"fully_shard_parallel_size": 2}, {}),
    "one or two tokens a row, ulysses of 4": ("text", False, 4, {"ulysses_parallel_size": 4}, {"lengths": FEW}),
    "one or two tokens a document, both": ("text", True, 4, BOTH, {"lengths": FEW}),
    "images, split tower, ring of 4": ("images", False, 4, {"ring_attention_size": 4}, {"split_towers": True}),
    "images, both": ("images", False, 4, BOTH, {}),
    "images, packed, two data ranks, ring": ("images", True, 4, RING, {"recompute": True}),
    "images, split tower, both": ("images", True, 4, BOTH, {"split_towers": True}),
    "window, packed, both": ("window", True, 4, BOTH, {}),
    "window, one or two tokens a row, ring of 4": ("window", False, 4, {"ring_attention_size": 4}, {"lengths": FEW}),
    "sinks and window, both": ("sinks", False, 4, BOTH, {}),
    "softcap and window, packed, both": ("softcap", True, 4, BOTH, {"recompute": True}),
    "text, packed, tensor, ring": ("text", True, 4, TENSOR | RING, {}),
    "text, tensor, ulysses, sequence": ("text", False, 4, TENSOR | ULYSSES | SEQUENCE, {"per_sample": True}),
    "one or two tokens a row, tensor, ring, sequence": ("text", False, 4, TENSOR | RING | SEQUENCE, {"lengths": FEW}),
    "images, packed, split tower, tensor, ring": ("images", True, 4, TENSOR | RING | SEQUENCE, {"split_towers": True}),
    "images, tensor, ulysses": ("images", False, 4, TENSOR | ULYSSES, {}),
    "window, packed, tensor, ulysses": ("window", True, 4, TENSOR | ULYSSES | SEQUENCE, {}),
    "sinks and window, tensor, ring": ("sinks", False, 4, TENSOR | RING, {}),
    "softcap and window, packed, tensor, ring": ("softcap", True, 4, TENSOR | RING, {}),
    "softcap and window, two data ranks, ring": ("softcap", True, 4, RING, {}),
    "images, packed, ulysses of 4": ("images", True, 4, {"ulysses_parallel_size": 4}, {}),
}

IN_SHORT = {
    "text, ring",
    "text, packed, ring, recompute",
    "text, packed, ulysses",
    "images, packed, ring",
    "images, split tower, packed, ulysses",
    "windows, split tower, ring",
    "window, packed, ring, recompute",
    "sinks and window, ulysses",
    "softcap and window, ring",
    "text, packed, both",
    "one or two tokens a document, both",
    "images, split tower, both",
    "text, tensor, ulysses, sequence",
    "sinks and window, tensor, ring",
}


def border_token_lost(_: ContextParallel) -> AbstractContextManager[Any]:
    """The first of a rank's tokens twice, its last not at all."""
    real = ContextShare.positions_on

    def off_by_one(self: ContextShare, device: torch.device) -> torch.Tensor:
        own = real(self, device)
        return torch.cat([own[:1], own[:-1]])

    return mock.patch.object(ContextShare, "positions_on", off_by_one)


def documents_joined(_: ContextParallel) -> AbstractContextManager[Any]:
    real = context_parallel.build_layout
    return mock.patch.object(
        context_parallel, "build_layout", lambda *args, borders, **more: real(*args, borders=None, **more)
    )


def label_lost(context: ContextParallel) -> AbstractContextManager[Any]:
    real = ContextParallel.split

    def thinned(self: ContextParallel, batch: Any) -> Any:
        own = real(self, batch)
        return own | {name: own[name][1:] for name in ("_rows", "_targets", "_weights")}

    return mock.patch.object(ContextParallel, "split", thinned)


def gradients_averaged(_: ContextParallel) -> AbstractContextManager[Any]:
    """As data parallelism of other libraries does it: each rank's part is taken for a whole."""
    real = TokenCrossEntropy.terms

    def halved(self: Any, model: Any, batch: Any) -> Any:
        return {"loss": real(self, model, batch)["loss"] / dist.get_world_size()}

    return mock.patch.object(TokenCrossEntropy, "terms", halved)


def features_not_summed(_: ContextParallel) -> AbstractContextManager[Any]:
    real = ContextShare.gather
    return mock.patch.object(
        ContextShare, "gather", lambda self, own, dim, **_: real(self, own, dim, sum_gradients=False)
    )


def window_off_by_one(_: ContextParallel) -> AbstractContextManager[Any]:
    real = language.seen_keys

    def narrower(queries: Any, keys: Any, rule: Any, device: Any) -> Any:
        return real(queries, keys, rule if rule.window is None else replace(rule, window=rule.window - 1), device)

    return mock.patch.object(language, "seen_keys", narrower)


# name → (model, packed, plan, fault)
FAULTS: dict[str, tuple[str, bool, dict[str, int], Callable[[ContextParallel], AbstractContextManager[Any]]]] = {
    "a token lost at a border": ("text", False, RING, border_token_lost),
    "documents see each other": ("text", True, RING, documents_joined),
    "gradients averaged over context ranks": ("text", False, ULYSSES, gradients_averaged),
    "features of media not summed": ("images", False, RING, features_not_summed),
    "a label lost": ("text", False, ULYSSES, label_lost),
    "a window one token short": ("window", False, RING, window_off_by_one),
    "keys' gradients not summed": ("softcap", False, RING, features_not_summed),
}
WRITTEN_OUT = {"window", "sinks", "softcap"}
"""Models whose reference is transformers' own attention, written out."""


def run_on_ranks(folders: dict[str, str], in_short: bool) -> dict[str, StepRecord]:
    here = dist.get_world_size()
    records = {
        name: spread_step(folders[model], packed, plan, **more)
        for name, (model, packed, ranks, plan, more) in CASES.items()
        if ranks == here and (name in IN_SHORT) == in_short
    }
    if here == 2 and in_short:
        for name, (model, packed, plan, fault) in FAULTS.items():
            records[name] = spread_step(folders[model], packed, plan, split_towers=True, fault=fault)
    return records


@cache
def results(ranks: int, in_short: bool, folders: tuple[tuple[str, str], ...]) -> list[dict[str, StepRecord]]:
    return run_ranks(ranks, run_on_ranks, dict(folders), in_short)


@cache
def reference(
    folder: str, packed: bool, per_sample: bool, lengths: tuple[int, ...] = LENGTHS, attention: str | None = None
) -> StepRecord:
    return plain_step(folder, packed, per_sample=per_sample, lengths=lengths, attention=attention)


def attention_of(model: str) -> str | None:
    return "eager" if model in WRITTEN_OUT else None


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root: Path = tmp_path_factory.mktemp("context")
    return {
        "text": str(make_tiny_qwen3(root / "text", dtype=torch.float64)),
        "images": str(make_tiny_qwen3_vl(root / "images", dtype=torch.float64)),
        "windows": str(make_tiny_windows(root / "windows", root / "images")),
        "window": str(make_tiny_qwen3(root / "window", dtype=torch.float64, **WINDOW)),
        "sinks": str(make_tiny_sinks(root / "sinks")),
        "softcap": str(make_tiny_softcap(root / "softcap")),
    }


@pytest.mark.parametrize("name", [name if name in IN_SHORT else pytest.param(name, marks=SLOW) for name in CASES])
def test_spread_rows_train_like_one_process(name: str, folders: dict[str, str]) -> None:
    model, packed, ranks, _, more = CASES[name]
    how = (more.get("per_sample", False), more.get("lengths", LENGTHS), attention_of(model))
    # transformers' gpt-oss lets packed documents see each other: its rows are padded in the reference.
    expected = reference(folders[model], packed and model != "sinks", *how)
    for measured in results(ranks, name in IN_SHORT, tuple(folders.items())):
        compare_steps(expected, measured[name], TOLERANCE)


@pytest.mark.parametrize("name", FAULTS)
def test_planted_fault_is_seen(name: str, folders: dict[str, str]) -> None:
    model, packed, *_ = FAULTS[name]
    with pytest.raises(ParityError):
        expected = reference(folders[model], packed, False, LENGTHS, attention_of(model))
        compare_steps(expected, results(2, True, tuple(folders.items()))[0][name], TOLERANCE)


ROW = {"shift_labels": torch.tensor([[5, 6, -100, -100]]), "sample_ids": ["a"]}


def test_left_padding_is_refused() -> None:
    with pytest.raises(DataError, match="not padded on the right"):
        split_rows(ROW | {"attention_mask": torch.tensor([[0, 1, 1, 1]])}, ContextGroups())


def test_what_an_unknown_objective_prepared_is_refused() -> None:
    with pytest.raises(MMError, match="_pairs"):
        split_rows(ROW | {"_pairs": torch.zeros(2)}, ContextGroups())


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ({"layer_types": ["chunked_attention"]}, "chunked_attention"),
        ({"attention_chunk_size": 8}, "attention_chunk_size is 8"),
        ({"attention_dropout": 0.1}, "attention_dropout is 0.1"),
    ],
)
def test_attention_that_cannot_be_spread_is_known_beforehand(settings: dict[str, Any], what: str) -> None:
    (problem,) = context_problems(SimpleNamespace(**settings))
    assert what in problem.what


def test_windows_and_softcaps_are_no_problem() -> None:
    kinds = ["full_attention", "sliding_attention"]
    settings = {"layer_types": kinds, "sliding_window": 4, "attn_logit_softcapping": 50.0, "attention_dropout": 0.0}
    assert context_problems(SimpleNamespace(**settings)) == []


def test_a_model_without_an_interface_to_its_attention() -> None:
    with pytest.raises(ConfigError, match="Linear has no decoder"):
        apply_to_decoder(torch.nn.Linear(2, 2))


QUERY = torch.zeros(1, 2, 8, 4)


@pytest.mark.parametrize(
    ("mask", "asked", "what"),
    [
        (None, {"dropout": 0.1}, "dropout"),
        (None, {"sliding_window": 5, "is_causal": False}, "a window of 5 tokens to both sides"),
        (torch.ones(1, 1, 8, 8), {}, "a mask of its own"),
    ],
)
def test_a_layer_that_asks_for_more(mask: Any, asked: dict[str, Any], what: str) -> None:
    share = ContextShare(ContextGroups(), build_layout(8, 1, 1, borders=(0, 2, 8)))
    with pytest.raises(AttentionError, match=what):
        rule_of(torch.nn.Identity(), QUERY, mask, share, asked)


def test_a_window_of_the_longest_document_is_none() -> None:
    share = ContextShare(ContextGroups(), build_layout(8, 1, 1, borders=(0, 2, 8)))
    assert rule_of(torch.nn.Identity(), QUERY, None, share, {"sliding_window": 6}).is_plain
    assert rule_of(torch.nn.Identity(), QUERY, None, share, {"sliding_window": 5}).window == 5


@pytest.mark.parametrize("mask", [{"full_attention": None}, torch.ones(1, 1, 8, 8)])
def test_a_model_with_masks_of_its_own(mask: Any) -> None:
    share = ContextShare(ContextGroups(), build_layout(8, 1, 1))
    inputs = {"mm_context": share, "attention_mask": mask, "input_ids": torch.zeros(1, 8, dtype=torch.long)}
    with pytest.raises(ConfigError, match="makes attention masks of its own"):
        take_share(torch.nn.Identity(), (), inputs)


@pytest.mark.parametrize(("ranks", "kept"), [(8, 4), (2, 2)])
def test_a_tower_with_fewer_features_than_ranks_works_on_all_patches(ranks: int, kept: int) -> None:
    groups: Any = SimpleNamespace(ring_size=ranks, ulysses_size=1, ring_rank=0, ulysses_rank=0)
    inputs = {
        "mm_context": ContextShare(groups, build_layout(64, ranks, 1)),
        "cu_seqlens": torch.tensor([0, 4]),
        "position_embeddings": (torch.zeros(4, 2),),
    }
    patches = SpreadPatches(unit=1)
    (hidden,), seen = patches.before_block(True, torch.nn.Identity(), (torch.zeros(4, 2),), inputs)
    assert len(hidden) == len(seen["position_embeddings"][0]) == kept
    assert ("mm_context" in seen) == (kept < 4)
    if kept == 4:
        assert patches.after_merger(torch.nn.Identity(), None, hidden) is hidden
