"""Every lazy node gives, region by region, what the same torch operation gives on whole tensors."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch

from mindspeed_mm.checkpoint.lazy_tensor import (
    Agreeing,
    Computed,
    Concatenated,
    HeldTensor,
    LazyTensor,
    Reordered,
    Selected,
    Sliced,
    Stacked,
    Stored,
    Transposed,
    stored_keys,
)
from mindspeed_mm.core.errors import CheckpointError

TENSORS = {name: torch.randn(4, 6, generator=torch.Generator().manual_seed(i)) for i, name in enumerate("abc")}
ORDER = torch.tensor([3, 4, 5, 0, 2, 1])


class Memory:
    def get_tensor(self, key: str) -> torch.Tensor:
        return TENSORS[key]


def stored(name: str) -> Stored:
    return Stored(name, (4, 6), torch.float32, Memory)


def everything() -> LazyTensor:
    experts = Stacked([Transposed(stored(name), 0, 1) for name in "abc"], 0)
    return Concatenated([Sliced(experts, 2, 0, 1), Reordered(experts, 1, ORDER)], 2)


def everything_eagerly() -> torch.Tensor:
    experts = torch.stack([TENSORS[name].T for name in "abc"], 0)
    return torch.cat([experts[:, :, :1], experts[:, ORDER]], 2)


CASES: dict[str, tuple[Callable[[], LazyTensor], Callable[[], torch.Tensor]]] = {
    "stored": (lambda: stored("a"), lambda: TENSORS["a"]),
    "concatenated": (
        lambda: Concatenated([stored("a"), stored("b")], 1),
        lambda: torch.cat([TENSORS["a"], TENSORS["b"]], 1),
    ),
    "stacked": (lambda: Stacked([stored(n) for n in "abc"], 1), lambda: torch.stack(list(TENSORS.values()), 1)),
    "sliced": (lambda: Sliced(stored("a"), 1, 2, 3), lambda: TENSORS["a"][:, 2:5]),
    "selected": (lambda: Selected(stored("a"), 0, 2), lambda: TENSORS["a"][2]),
    "transposed": (lambda: Transposed(stored("a"), 0, 1), lambda: TENSORS["a"].T),
    "reordered": (lambda: Reordered(stored("a"), 1, ORDER), lambda: TENSORS["a"][:, ORDER]),
    "computed": (
        lambda: Computed([stored("a"), stored("b")], lambda read: read[0] * read[1], (4, 6), torch.float32),
        lambda: TENSORS["a"] * TENSORS["b"],
    ),
    "all of them": (everything, everything_eagerly),
}


@pytest.mark.parametrize("name", CASES)
def test_every_region_equals_the_eager_operation(name: str) -> None:
    lazy, eager = CASES[name][0](), CASES[name][1]()
    assert lazy.shape == tuple(eager.shape)
    assert torch.equal(lazy.read(), eager)
    spans = [[(0, size), (1, size - 1), (size - 1, 1), (1, 0)] for size in eager.shape]
    for region in itertools.product(*spans):
        out = torch.full([length for _, length in region], torch.nan, dtype=torch.float64)
        lazy.copy_to(out, region)
        assert torch.equal(out, eager[tuple(slice(start, start + length) for start, length in region)].double()), region


def test_stored_keys_in_reading_order() -> None:
    assert list(stored_keys(everything())) == ["a", "b", "c", "a", "b", "c"]


def test_unequal_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot stack"):
        Stacked([stored("a"), Transposed(stored("b"), 0, 1)], 0)
    with pytest.raises(ValueError, match="cannot concatenate"):
        Concatenated([stored("a"), Transposed(stored("b"), 0, 1)], 0)


def held(*numbers: float, dtype: torch.dtype = torch.float32) -> HeldTensor:
    return HeldTensor(torch.tensor(numbers, dtype=dtype))


@pytest.mark.parametrize("node", [Concatenated, Stacked])
def test_parts_of_different_types_are_refused(node: type[Concatenated] | type[Stacked]) -> None:
    """Cast to the first one's, 300 would become 44."""
    with pytest.raises(ValueError, match=r"different types, torch.int8 and torch.float32"):
        node([held(1, dtype=torch.int8), held(300)], 0)


def test_copies_of_different_types_or_shapes_are_refused_by_name() -> None:
    with pytest.raises(
        CheckpointError, match=r"b  is torch.int8 of shape \[1\], and a is torch.float32 of shape \[1\]"
    ):
        Agreeing([held(1), held(1, dtype=torch.int8)], ["a", "b"])
    with pytest.raises(CheckpointError, match=r"b  is torch.float32 of shape \[2\], and a is"):
        Agreeing([held(1), held(1, 1)], ["a", "b"])


def test_copies_are_compared_as_stored_and_not_as_read() -> None:
    """In bfloat16 both are 1."""
    out = torch.empty(1, dtype=torch.bfloat16)
    with pytest.raises(CheckpointError, match="b  differs from a"):
        Agreeing([held(1), held(1.0001)], ["a", "b"]).copy_to(out, ((0, 1),))
    Agreeing([held(1.0001), held(1.0001)], ["a", "b"]).copy_to(out, ((0, 1),))
    assert out.item() == 1


def test_copies_with_the_same_nan_are_equal() -> None:
    assert Agreeing([held(1, torch.nan), held(1, torch.nan)], ["a", "b"]).read().isnan().tolist() == [False, True]
    with pytest.raises(CheckpointError, match="differs"):
        Agreeing([held(1, torch.nan), held(2, torch.nan)], ["a", "b"]).read()
