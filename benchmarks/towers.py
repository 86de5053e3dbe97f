"""Operations of a block of a vision or audio tower by the number of pictures, clips or sounds that it is given at once,
for every family; counts, which are the same on every machine. Besides: gradients are those of the library's attention.

The packed kernel of a device is one call, and so is torch's kernel of a norm: stand-ins of one call each way take their
places where operations are counted. What is left is what a host launches. A CPU has no kernel of a norm, so that the
same is counted once more with the operations that a norm takes there. Blocks are told from the rest of a tower by
adding some. The processor time of the Qwen3-VL-shaped tower is that of the kernels of a CPU, which take documents of
one length in one call.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from benchmarks.figures import Figure
from benchmarks.layers import Operations
from mindspeed_mm import ensure_torchvision

PICTURES = (1, 64, 256)
PATCHES = 4096
"""Of all pictures together, in the Qwen3-VL-shaped tower."""
MORE_BLOCKS = 2
MOST_OUTSIDE = 100
TOLERANCE = 1e-9
REPEATS = 3

Item = dict[str, torch.Tensor]
"""Tensors of a picture, clip or sound."""


def run(_work: Path) -> dict[str, Any]:
    """Count, and compare with the bars."""
    ensure_torchvision()
    every = kinds()
    counts = {f"{name}, {kind}": of_kind(name, kind) for name, taken in every.items() for kind in taken}
    on_cpu = {
        f"{name}, {kind}": of_kind(name, kind, PICTURES[:1], norms=False)["1"]["outside"]
        for name, taken in every.items()
        for kind in taken
    }
    deep = {words: {str(n): of_shape(n, equal=words == "equal") for n in PICTURES} for words in ("equal", "different")}
    spent = {str(n): processor_ms(n) for n in PICTURES}
    parity = {name: worst_difference(name) for name in every}
    return {
        "unit": "operations of a block, forward and backward, beside attention",
        "families": counts,
        "families, norms of a CPU": on_cpu,
        "qwen3-vl, 4096 patches": deep,
        "processor_ms": spent,
        "parity": parity,
        "figures": [figure.to_dict() for figure in figures(counts, on_cpu, deep, spent, parity)],
    }


def figures(
    counts: dict[str, Any],
    on_cpu: dict[str, float],
    deep: dict[str, Any],
    spent: dict[str, float],
    parity: dict[str, float],
) -> list[Figure]:
    """The worst of all families, and the Qwen3-VL-shaped tower by itself."""
    cases = [case for by_number in counts.values() for case in by_number.values()]
    grown = [by_number[str(PICTURES[-1])]["outside"] - by_number["1"]["outside"] for by_number in counts.values()]
    found = [
        Figure("families and kinds of media", len(counts), ""),
        Figure("calls of attention of a block, the most", max(case["attention"] for case in cases), "", 1),
        Figure("operations beside it, the most", max(case["outside"] for case in cases), "", MOST_OUTSIDE),
        Figure("the same, the median", statistics.median(case["outside"] for case in cases), "", MOST_OUTSIDE),
        Figure("the same with the norms of a CPU, the most", max(on_cpu.values()), ""),
        Figure(f"more of them with {PICTURES[-1]} pictures than with one, the most", max(grown), "", 0),
    ]
    for words, by_number in deep.items():
        for number, case in by_number.items():
            name = f"Qwen3-VL, {PATCHES} patches, {number} pictures, {words} sizes"
            found.append(Figure(f"{name}: calls of attention", case["attention"], "", 1))
            found.append(Figure(f"{name}: beside it", case["outside"], "operations", MOST_OUTSIDE))
    found += [Figure(f"Qwen3-VL, {number} pictures: processor time", ms, "ms") for number, ms in spent.items()]
    found.append(Figure("worst difference of a gradient from the library's", max(parity.values()), "", TOLERANCE))
    return found


# --- every family -----------------------------------------------------------------------------------------------------


def families() -> dict[str, Any]:
    """Tiny models that take media, by name."""
    from tests.helpers.llava_next import LLAVA_NEXT
    from tests.helpers.packed_families import FAMILIES
    from tests.helpers.packed_more_families import MORE

    return {name: family for name, family in {**FAMILIES, **MORE, **LLAVA_NEXT}.items() if family.media}


def kinds() -> dict[str, list[str]]:
    """Kinds of media of each family that has towers."""
    from mindspeed_mm.fsdp.models.structure.towers import find_towers

    return {name: list(items_of(family)) for name, family in families().items() if find_towers(family.build())}


def items_of(family: Any) -> dict[str, list[Item]]:
    """Kind → what the family's samples have of it."""
    found: dict[str, list[Item]] = {}
    for sample in family.samples():
        for item in sample["media"]:
            found.setdefault(item.kind, []).append(item.tensors)
    return found


def features(model: Any, kind: str, items: Sequence[Item]) -> torch.Tensor:
    """A sum over all that the tower hands to the text model."""
    from mindspeed_mm.fsdp.models.structure.towers import handed_on

    joined = {name: torch.cat([item[name] for item in items]) for name in items[0] if name != "video_second_per_grid"}
    getter = f"get_{kind}_features"
    holder = model.model if hasattr(model.model, getter) else model  # of the model itself in some omni models
    return sum((out.sum() for out in handed_on(getattr(holder, getter)(*joined.values(), return_dict=True))), ZERO)


ZERO = torch.zeros((), dtype=torch.float64)


def prepared(model: Any, *, norms: bool = True) -> Any:
    """As a run prepares it, on a device that has a kernel of norms or on one that has none."""
    from mindspeed_mm.fsdp.features.speed.tower_operators import apply_tower_operators
    from mindspeed_mm.fsdp.models.behaviour.host_grids import attend_to_pictures_at_once, read_grids_on_host
    from mindspeed_mm.fsdp.ops.attention import ATTENTION_NAME, register_attention

    register_attention()
    model.set_attn_implementation(ATTENTION_NAME)
    read_grids_on_host(model)
    attend_to_pictures_at_once(model)
    apply_tower_operators(model, norms=norms)
    return model


def of_kind(name: str, kind: str, numbers: Sequence[int] | None = None, *, norms: bool = True) -> dict[str, Any]:
    """Number of pictures → operations of a block of a family's tower."""
    from mindspeed_mm.fsdp.models.behaviour.host_grids import KeptRows
    from mindspeed_mm.fsdp.models.structure.towers import find_towers
    from mindspeed_mm.tasks.verify.faults import swapped
    from tests.helpers.packed_families import InDouble

    family = families()[name]
    items = items_of(family)[kind]
    few = prepared(family.build(), norms=norms)
    (tower, *_) = (tower for tower in find_towers(few) if tower.name == kind)
    more = with_more_blocks(prepared(family.build(), norms=norms), tower.module)
    found = {}
    for number in numbers or PICTURES:
        given = list(islice(cycle(items), number))
        # Rows of grids that are kept would be made for the first model alone, and counted against it.
        with InDouble(), swapped(KeptRows, "of", KeptRows.made):
            counts = [operations(model, partial(features, model, kind, given)) for model in (few, more)]
        found[str(number)] = of_block(*counts)
    return found


def with_more_blocks(model: Any, tower: str) -> Any:
    """The model, not called yet, after its tower got more blocks like its last one."""
    encoder = model.get_submodule(tower)
    for name, blocks in encoder.named_modules():
        if isinstance(blocks, nn.ModuleList) and name.rpartition(".")[2] in ("blocks", "layers", "layer"):
            blocks.extend(copy.deepcopy(blocks[-1]) for _ in range(MORE_BLOCKS))
            encoder.config.num_hidden_layers = len(blocks)  # which some go by
            return model
    raise ValueError(f"{tower} of {type(model).__name__} has no list of blocks")


def of_block(few: Counter[str], more: Counter[str]) -> dict[str, float]:
    """What each of the added blocks adds; attention is a call forward and one backward."""
    added = {name: more[name] - few[name] for name in more}
    attention = added.pop(ATTENTION, 0) / 2 / MORE_BLOCKS
    if not attention:
        raise ValueError("the added blocks were not called")
    return {"attention": attention, "outside": sum(added.values()) / MORE_BLOCKS}


# --- counting ---------------------------------------------------------------------------------------------------------

ATTENTION, NORM = "call of attention", "call of torch's norm"


def operations(model: nn.Module, compute: Any) -> Counter[str]:
    """Of a tower's forward and backward pass, with attention as one call of each."""
    model.zero_grad()  # a first gradient is kept, not added
    with one_call_of_attention() as counts, _NormsAtOnce(counts), counts:
        compute().backward()
    return counts.counts


@contextmanager
def one_call_of_attention() -> Iterator[Operations]:
    """Stand in for the attention that towers look up; it hands on values, and counts as one operation."""
    from transformers import AttentionInterface

    from mindspeed_mm.fsdp.ops.attention import ATTENTION_NAME, register_attention

    counting = Operations()

    def attend(module: nn.Module, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> tuple[torch.Tensor, None]:
        return _OneCall.apply(counting, query, key, value), None  # type: ignore[no-untyped-call]

    AttentionInterface.register(ATTENTION_NAME, attend)
    try:
        yield counting
    finally:
        register_attention()


class _OneCall(torch.autograd.Function):
    """(B, H, T, D) → (B, T, H, D), and gradients for queries, keys and values, of which there may be other numbers."""

    @staticmethod
    @override
    def forward(ctx: Any, counting: Operations, query: Any, key: Any, value: Any) -> torch.Tensor:
        ctx.counting, ctx.keys = counting, key.shape[2]
        with counting.as_one(ATTENTION):
            return (query + (key + value).mean(2, keepdim=True)).transpose(1, 2).contiguous()

    @staticmethod
    @override
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        with ctx.counting.as_one(ATTENTION):
            of_key = grad.mean(1, keepdim=True).expand(-1, ctx.keys, -1, -1)
            return None, *(each.clone().transpose(1, 2) for each in (grad, of_key, of_key))


class _NormsAtOnce(TorchFunctionMode):
    """Stands in for torch's RMS norm, which is a kernel each way on a device."""

    def __init__(self, counting: Operations) -> None:
        super().__init__()
        self._counting = counting

    @override
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is not F.rms_norm:
            return function(*args, **(kwargs or {}))
        return _OneNorm.apply(self._counting, args[0], kwargs["weight"])  # type: ignore[no-untyped-call]


class _OneNorm(torch.autograd.Function):
    """(…, H) → (…, H), and gradients for numbers and weights."""

    @staticmethod
    @override
    def forward(ctx: Any, counting: Operations, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        ctx.counting, ctx.has_weight = counting, weight is not None
        with counting.as_one(NORM):
            return x.clone()

    @staticmethod
    @override
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        with ctx.counting.as_one(NORM):
            if ctx.has_weight:
                return None, grad.clone(), grad.flatten(0, -2).sum(0)
            return None, grad.clone(), None


# --- the tower of Qwen3-VL --------------------------------------------------------------------------------------------


def tower_of(depth: int) -> Any:
    """Qwen3-VL's, narrow."""
    from transformers import Qwen3VLConfig
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

    from mindspeed_mm.fsdp.features.speed.tower_operators import fit_tower

    sizes = {"hidden_size": 64, "num_heads": 4, "intermediate_size": 128, "out_hidden_size": 64, "patch_size": 4}
    others = {"spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 1024}
    vision = {"depth": depth, "deepstack_visual_indexes": [], **sizes, **others}
    torch.manual_seed(0)
    tower = prepared(Qwen3VLVisionModel(Qwen3VLConfig(vision_config=vision).vision_config))
    fit_tower(tower, norms=True)
    return tower


def grids_of(pictures: int, *, equal: bool) -> list[list[int]]:
    """[frames, height, width] of pictures with `PATCHES` patches together, of one size or of several."""
    patches = PATCHES // pictures
    if equal:
        side = int(patches**0.5)
        return [[1, side, side]] * pictures
    smaller, larger = [1, 2, patches // 4], [1, 2, patches - patches // 2 + patches // 4]
    return ([[1, 2, patches // 2]] * (pictures % 2)) + [larger, smaller] * (pictures // 2)


def features_of(tower: Any, pictures: int, *, equal: bool) -> Any:
    """What computes a sum over the features."""
    grids = grids_of(pictures, equal=equal)
    pixels = torch.randn(sum(t * h * w for t, h, w in grids), 3 * 2 * 4 * 4, generator=torch.Generator().manual_seed(0))
    return lambda: tower(pixels, grid_thw=torch.tensor(grids)).pooler_output.sum()


def of_shape(pictures: int, *, equal: bool) -> dict[str, float]:
    """Operations of a block."""
    towers = [tower_of(depth) for depth in (1, 1 + MORE_BLOCKS)]
    return of_block(*(operations(tower, features_of(tower, pictures, equal=equal)) for tower in towers))


def processor_ms(pictures: int) -> float:
    """Of the forward and backward pass of three blocks; the least of some."""
    compute, found = features_of(tower_of(3), pictures, equal=True), []
    for _ in range(REPEATS):
        began = time.process_time()
        compute().backward()
        found.append(1000 * (time.process_time() - began))
    return min(found)


# --- parity -----------------------------------------------------------------------------------------------------------


def worst_difference(name: str) -> float:
    """Largest norm of a gradient's difference, over its norm and a thousandth of that of all, in fp64: all media of a
    family's samples at once against the library's own attention."""
    family = families()[name]
    found = gradients(prepared(family.build(attention="sdpa")), family)
    expected = gradients(family.build(attention="sdpa"), family)
    if found.keys() != expected.keys():
        raise ValueError(f"{name}: only one side has {sorted(found.keys() ^ expected.keys())[:3]}")
    whole = float(torch.stack([each.square().sum() for each in expected.values()]).sum().sqrt())
    return max(
        float((found[key] - each).norm()) / (float(each.norm()) + 1e-3 * whole) for key, each in expected.items()
    )


def gradients(model: Any, family: Any) -> dict[str, torch.Tensor]:
    """Of a function of all features that lets none of their kinds outweigh the others, and is flat nowhere."""
    from tests.helpers.packed_families import InDouble

    with InDouble():
        total = sum((features(model, kind, items).asinh() for kind, items in items_of(family).items()), ZERO)
        total.backward()
    return {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
