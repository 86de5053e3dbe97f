"""Each element of a source is used exactly once, and each of a target written exactly once: by boxes, not by counts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from mindspeed_mm.checkpoint.conversion.ledger import SourceLedger, check_ledgers
from mindspeed_mm.checkpoint.dequantized import PackedRows, ScaledBlocks
from mindspeed_mm.checkpoint.key_ops import (
    Concat,
    InsertZeros,
    Interleave,
    Op,
    Reorder,
    Split,
    Stack,
    Transpose,
    Unstack,
)
from mindspeed_mm.checkpoint.keymap import KeyMap, KeyRule, made_by
from mindspeed_mm.checkpoint.lazy_tensor import (
    Agreeing,
    Cast,
    Computed,
    Concatenated,
    HeldTensor,
    LazyTensor,
    Padded,
    Region,
    Reshaped,
    Sliced,
)
from mindspeed_mm.core.errors import ModelFolderError

WHERE = Path("source")


def ledger(**shapes: tuple[int, ...]) -> SourceLedger:
    return SourceLedger({key: HeldTensor(torch.ones(shape)) for key, shape in shapes.items()}, WHERE)


def told(of: SourceLedger, made: Mapping[str, LazyTensor], **exceptions: object) -> str:
    with pytest.raises(ModelFolderError) as caught:
        check_ledgers([of], made.items(), **exceptions)  # type: ignore[arg-type]
    return str(caught.value)


def test_a_half_that_is_taken_twice_is_no_whole_though_the_numbers_agree() -> None:
    of = ledger(up=(4, 3))
    up = of.tensors["up"]
    twice = Concatenated([Sliced(up, 0, 0, 2), Sliced(up, 0, 0, 2)], 0)
    assert "up  is used more than once: 12 of 12 elements" in told(of, {"up": twice})
    overlapping = Concatenated([Sliced(up, 0, 0, 3), Sliced(up, 0, 2, 1)], 0)
    assert "up  is used more than once: 12 of 12 elements" in told(of, {"up": overlapping})
    assert "`times`" not in told(of, {"up": overlapping})  # which is for whole tensors
    check_ledgers([of], {"up": Concatenated([Sliced(up, 0, 2, 2), Sliced(up, 0, 0, 2)], 0)}.items())


def test_what_is_written_several_times_is_written_so_often() -> None:
    of = ledger(norm=(3,), up=(4, 3))
    norm, up = of.tensors["norm"], of.tensors["up"]
    made = {"0.norm": norm, "1.norm": norm, "0.up": Sliced(up, 0, 0, 2), "1.up": Sliced(up, 0, 2, 2)}
    check_ledgers([of], made.items(), times={"norm": 2})
    check_ledgers([of], made.items(), times={"norm": None})
    assert "norm  is used 2 times, and 3 are expected" in told(of, made, times={"norm": 3})
    twice = "norm  is used more than once: 6 of 3 elements. If that is meant (a tied tensor, written 2 times), name it "
    twice += "in `times` of Conversion."
    assert twice in told(of, made)
    lost = {**made, "0.norm": Sliced(norm, 0, 0, 2), "1.norm": Sliced(norm, 0, 0, 2)}
    assert "norm  is used in part: 2 of 3 elements" in told(of, lost, times={"norm": None})


def test_padding_and_what_is_left_out_are_not_used() -> None:
    of = ledger(words=(8, 2), extra=(2,))
    true = {"words": Sliced(of.tensors["words"], 0, 0, 5)}
    padding = [Sliced(of.tensors["words"], 0, 5, 3)]
    check_ledgers([of], true.items(), dropped=padding, left_out={"extra"})
    less, more = [Sliced(of.tensors["words"], 0, 6, 2)], [Sliced(of.tensors["words"], 0, 4, 4)]
    assert "words  is used in part: 14 of 16 elements" in told(of, true, dropped=less, left_out={"extra"})
    assert "words  is used more than once: 18 of 16" in told(of, true, dropped=more, left_out={"extra"})
    assert "name it in `left_out` of Conversion, with the reason.\n  extra  is not used" in told(
        of, true, dropped=padding
    )
    assert "`left_out`" not in told(of, true, dropped=less, left_out={"extra"})
    both = {**true, "extra": of.tensors["extra"]}
    assert "extra  is left out, and used all the same" in told(of, both, dropped=padding, left_out={"extra"})
    twice = {**true, "head": true["words"]}  # of a tied head, the padding is dropped once
    check_ledgers([of], twice.items(), dropped=padding, left_out={"extra"}, times={"words": 2})


def test_an_output_of_tensors_that_are_not_counted_is_refused() -> None:
    """The source's own instead of the ledger's."""
    of = ledger(up=(4, 3))
    said = told(of, {"up": Sliced(of.tensors["up"].base, 0, 0, 4)})
    assert "Build it of `ledger.tensors`\n  up  is read past the ledger" in said


@pytest.mark.parametrize("compared", [False, True])
def test_every_copy_of_a_tensor_is_used(compared: bool) -> None:
    of = ledger(a=(2,), b=(2,))
    copies = [of.tensors["a"], of.tensors["b"]] if compared else [of.tensors["a"], of.tensors["a"]]
    made = {"a": Agreeing(copies, ["a", "b"])}
    if compared:
        check_ledgers([of], made.items())
    else:
        assert "b  is not used" in told(of, made)


class Torn(LazyTensor):
    """Writes its first half, and nothing else or the same again."""

    def __init__(self, base: LazyTensor, again: bool) -> None:
        super().__init__(base.shape, base.dtype, [base])
        self.again = again

    def _copy_to(self, out: torch.Tensor, region: Region) -> None:
        half = self.shape[0] // 2
        for start in (0, half):
            place = 0 if self.again else start
            if self.again or start == 0:
                self.parts[0].copy_to(out.narrow(0, place, half), ((start, half), *region[1:]))


@pytest.mark.parametrize(
    ("again", "what"), [(True, "written more than once: 12 of 12"), (False, "written in part: 6 of 12")]
)
def test_a_target_that_is_not_filled_is_named(again: bool, what: str) -> None:
    of = ledger(up=(4, 3))
    assert f"new.up  is {what} elements" in told(of, {"new.up": Torn(of.tensors["up"], again)})


@pytest.mark.parametrize(
    "ops",
    [
        (Concat(0),),
        (Concat(1), Split(1, sizes=(2, 4))),
        (Interleave(0, 2, (4, 4)),),
        (InsertZeros(1), Concat(0)),
        (Concat(0), Reorder(0, (3, 2, 1, 0, 7, 6, 5, 4)), Transpose()),
        (Concat(0), Unstack(0), Stack(1)),
    ],
)
def test_every_operation_uses_and_writes_each_element_once(ops: tuple[Op, ...]) -> None:
    of = ledger(a=(4, 3), b=(4, 3))
    columns = [[of.tensors["a"]], [of.tensors["b"]]]
    for op in ops:
        columns = op.apply(columns)
    made = [tensor for column in columns for tensor in column]
    check_ledgers([of], [(str(i), tensor) for i, tensor in enumerate(made)])


def test_so_do_padding_reshaping_casting_and_computing() -> None:
    of = ledger(a=(4, 3), b=(4, 3), c=(2, 1, 6), d=())
    a, b, c, d = of.tensors.values()
    made = {
        "a": Padded(Cast(a, torch.bfloat16), 0, 8),
        "b": Reshaped(b, (2, 6)),
        "c": Computed([c], lambda read: read[0], c.shape, c.dtype),
        "d": d,
    }
    check_ledgers([of], made.items())


def test_numbers_are_computed_of_codes_and_scales_that_the_map_has_cut_apart() -> None:
    """Stacked experts with gate and up by turns, in 4 bits, and a fused projection in fp8: each read once, as the guide
    for converters has it. Computed before the map, they would be read once for each row."""
    codes = torch.randint(-(2**31), 2**31 - 1, (2, 6, 2), dtype=torch.int32)
    experts = {"up.codes": HeldTensor(codes), "up.scales": HeldTensor(torch.rand(2, 6, 4))}
    fused = {
        "qk.codes": HeldTensor(torch.randn(8, 4).to(torch.float8_e4m3fn)),
        "qk.scales": HeldTensor(torch.rand(4, 2)),
    }
    of = SourceLedger({**experts, **fused}, WHERE)
    by_turns = (Stack(0), Interleave(1, 3, (3, 3)))
    rules = [
        KeyRule(("{e}.gate.{p}", "{e}.up.{p}"), "up.{p}", by_turns),
        KeyRule(("q.{p}", "k.{p}"), "qk.{p}", (Concat(0),)),
    ]
    cut = made_by(KeyMap(rules).inverse.steps(of.tensors))
    numbers: dict[str, LazyTensor] = {}
    for name in ("0.gate", "0.up", "1.gate", "1.up"):
        numbers[name] = PackedRows(cut[f"{name}.codes"], cut[f"{name}.scales"], 16, 4)
    for name in ("q", "k"):
        numbers[name] = Cast(ScaledBlocks(cut[f"{name}.codes"], cut[f"{name}.scales"], (2, 2)), torch.bfloat16)
    check_ledgers([of], numbers.items())
    shifts = torch.arange(0, 32, 4)
    whole = ((codes[..., None].long() >> shifts & 15) - 8).flatten(-2).float()
    whole *= experts["up.scales"].read().repeat_interleave(4, dim=-1)
    assert torch.equal(numbers["1.gate"].read(), whole[1, 0::2])
    assert torch.equal(numbers["0.up"].read(), whole[0, 1::2])
    early = Computed([of.tensors["up.codes"], of.tensors["up.scales"]], lambda read: whole, whole.shape, torch.float32)
    made = made_by(KeyMap(rules[:1]).inverse.steps({"up.codes": early}))
    assert "written 12 times), name it in `times` of Conversion. `Computed` reads its parts whole" in told(of, made)
