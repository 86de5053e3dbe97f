"""Key maps rename, merge, split, stack and transpose, lead back bitwise, and account for every key."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from mindspeed_mm.checkpoint.key_ops import (
    Concat,
    Duplicate,
    Interleave,
    Op,
    Reorder,
    Reshape,
    Split,
    Stack,
    Transpose,
    Unstack,
)
from mindspeed_mm.checkpoint.keymap import KeyMap, KeyRule, RuleMatch, check_used_once, natural_order
from mindspeed_mm.checkpoint.lazy_tensor import LazyTensor, Stored
from mindspeed_mm.core.errors import CheckpointError, ConfigError, ModelFolderError

MAP = KeyMap(
    [
        KeyRule("blocks.{n}.norm.{part*}", "layers.{n}.input_layernorm.{part*}"),
        KeyRule(
            ("{at*}.q.weight", "{at*}.k.weight", "{at*}.v.weight"),
            "{at*}.qkv.weight",
            (Concat(0, sizes=(8, 4, 4)), Reorder(0, tuple(range(15, -1, -1)))),
        ),
        KeyRule(
            ("{at*}.experts.{e}.gate.weight", "{at*}.experts.{e}.up.weight"),
            "{at*}.experts.gate_up",
            (Stack(0), Concat(1)),
        ),
        KeyRule("{at*}.experts.{e}.down.weight", "{at*}.experts.down", (Stack(0), Transpose(1, 2))),
    ],
    keep_others=True,
)


def make_state(experts: int = 12) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (10, 6), "blocks.0.norm.weight": (6,)}
    for name, rows in (("q", 8), ("k", 4), ("v", 4)):
        shapes[f"blocks.0.attn.{name}.weight"] = (rows, 6)
    for expert in range(experts):
        shapes[f"blocks.0.experts.{expert}.gate.weight"] = (3, 6)
        shapes[f"blocks.0.experts.{expert}.up.weight"] = (3, 6)
        shapes[f"blocks.0.experts.{expert}.down.weight"] = (6, 3)
    return {key: torch.randn(shape, generator=generator) for key, shape in shapes.items()}


def lazy(state: dict[str, torch.Tensor]) -> dict[str, LazyTensor]:
    class Memory:
        def get_tensor(self, key: str) -> torch.Tensor:
            return state[key]

    return {key: Stored(key, tensor.shape, tensor.dtype, Memory) for key, tensor in state.items()}


def convert(key_map: KeyMap, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    steps = key_map.steps(lazy(state))
    made = {key: tensor for step in steps for key, tensor in step.targets.items()}
    check_used_once(steps, state, made)
    return {key: tensor.read().clone() for key, tensor in made.items()}


def test_each_operation_gives_what_its_name_says() -> None:
    state = make_state()
    made = convert(MAP, state)
    qkv = torch.cat([state[f"blocks.0.attn.{name}.weight"] for name in "qkv"])
    gate_up = [torch.cat([state[f"blocks.0.experts.{e}.{half}.weight"] for half in ("gate", "up")]) for e in range(12)]
    assert set(made) == {
        "embed.weight",
        "layers.0.input_layernorm.weight",
        "blocks.0.attn.qkv.weight",
        "blocks.0.experts.gate_up",
        "blocks.0.experts.down",
    }
    assert torch.equal(made["blocks.0.attn.qkv.weight"], qkv.flip(0))
    assert torch.equal(made["blocks.0.experts.gate_up"], torch.stack(gate_up))  # expert 2 before expert 10
    assert torch.equal(made["blocks.0.experts.down"][10], state["blocks.0.experts.10.down.weight"].T)


def test_there_and_back_is_bitwise() -> None:
    state = make_state()
    back = convert(MAP.inverse, convert(MAP, state))
    assert back.keys() == state.keys()
    assert all(torch.equal(back[key], state[key]) for key in state)


def test_a_part_that_is_absent_is_named() -> None:
    state = make_state()
    del state["blocks.0.attn.k.weight"]
    with pytest.raises(ModelFolderError, match=r"nothing for '\{at\*\}\.k\.weight'"):
        convert(MAP, state)


def test_a_hole_in_the_numbering_is_named() -> None:
    state = make_state()
    del state["blocks.0.experts.3.down.weight"]
    with pytest.raises(ModelFolderError, match="not numbered from 0 without holes"):
        convert(MAP, state)


def test_shapes_that_do_not_fit_are_named() -> None:
    state = make_state()
    state["blocks.0.experts.3.down.weight"] = torch.zeros(6, 4)
    with pytest.raises(ModelFolderError, match=r"cannot stack.*blocks|blocks.*cannot stack"):
        convert(MAP, state)


def test_a_tensor_of_too_few_dims_is_told_with_its_shape() -> None:
    names = KeyMap([KeyRule("stacked", "l.{n}", (Unstack(0),))])
    with pytest.raises(ModelFolderError, match=r"stacked +a tensor of shape \[\] does not have the dims"):
        names.steps(lazy({"stacked": torch.zeros(())}))


@pytest.mark.parametrize("turned", [False, True])
def test_parts_that_are_not_as_many_as_the_targets_are_told(turned: bool) -> None:
    names = KeyMap([KeyRule("qkv", ("q", "k", "v"), (Split(0),))])
    if turned:
        names = KeyMap([KeyRule(("q", "k", "v"), "qkv", (Concat(0),))]).inverse
    with pytest.raises(ModelFolderError, match=r"qkv +its operations make 2, and the rule has 3 targets.*`ratio`"):
        names.steps(lazy({"qkv": torch.zeros(12, 2)}))


def test_two_rules_with_one_target_are_refused() -> None:
    names = KeyMap([KeyRule("a", "x")], keep_others=True)
    with pytest.raises(ModelFolderError, match=r"x +is made of a and of x"):
        names.steps(lazy({"a": torch.zeros(1), "x": torch.zeros(1)}))


@pytest.mark.parametrize("make", [lambda: Stack(-1), lambda: Concat(dim=-1), lambda: Transpose(0, -1)])
def test_a_dim_that_is_counted_from_the_last_is_refused(make: Callable[[], Op]) -> None:
    with pytest.raises(ConfigError, match="counts a dim from the last"):
        make()


def test_groups_that_do_not_divide_a_fused_tensor_are_refused_on_the_way_back() -> None:
    """Runs of whole rows would leave the last ones out."""
    fused = KeyMap([KeyRule(("q", "k", "v"), "qkv", (Interleave(0, 3, (8, 4, 4)),))])
    with pytest.raises(ModelFolderError, match=r"cannot take 16 apart into \(8, 4, 4\) of 3 groups"):
        fused.inverse.steps(lazy({"qkv": torch.zeros(16, 2)}))


PATCHES = KeyMap([KeyRule("{at*}.patch.weight", "{at*}.conv.weight", (Reshape((4, -1), (4, 3, 2, 2)),))])


def test_a_convolution_over_patches_is_a_matrix_and_comes_back() -> None:
    state = {"vision.patch.weight": torch.randn(4, 3, 2, 2)}
    made = convert(PATCHES, state)
    assert torch.equal(made["vision.conv.weight"], state["vision.patch.weight"].flatten(1))
    back = convert(PATCHES.inverse, made)
    assert torch.equal(back["vision.patch.weight"], state["vision.patch.weight"])
    with pytest.raises(ModelFolderError, match=r"shape \(4, 9\) does not have the shape \(4, 3, 2, 2\)"):
        PATCHES.inverse.steps(lazy({"vision.conv.weight": torch.zeros(4, 9)}))


@pytest.mark.parametrize("shape", [(4, 12), (4, 3), (4, 3, 1, 4), (4, 3, 2, 2, 1)])
def test_a_reshape_takes_only_what_has_the_shape_before(shape: tuple[int, ...]) -> None:
    """With its two shapes the wrong way round it would leave every tensor as it is, there and back."""
    with pytest.raises(ModelFolderError, match=r"is not \(4, 3, 2, 2\), of which \(4, -1\) is made"):
        PATCHES.steps(lazy({"vision.patch.weight": torch.zeros(shape)}))


def test_neighbours_of_a_head_become_halves_as_the_guide_has_it() -> None:
    """Llama's published weights rotate neighbours, transformers' the halves of a head."""
    heads, width = 2, 6
    order = [head * width + half * width // 2 + pair for head in range(heads) for pair in range(3) for half in (0, 1)]
    rows = torch.arange(heads * width * 2.0).view(-1, 2)
    published = rows.view(heads, 3, 2, 2).transpose(1, 2).reshape(-1, 2)  # as transformers' script converts it
    key_map = KeyMap([KeyRule("{at*}.q_proj.weight", "{at*}.wq.weight", (Reorder(0, tuple(order)),))])
    assert torch.equal(convert(key_map.inverse, {"l.0.wq.weight": rows})["l.0.q_proj.weight"], published)


def of_ranks(key: str, ranks: int) -> tuple[str, ...]:
    return tuple(f"rank{rank}.{key}" for rank in range(ranks))


@pytest.mark.parametrize("ranks", [2, 4])
def test_pieces_and_copies_of_ranks_are_joined_and_come_back(ranks: int) -> None:
    rules = [
        KeyRule("{at*}.up", of_ranks("{at*}.up", ranks), (Split(0, parts=ranks),)),
        KeyRule("{at*}.norm", of_ranks("{at*}.norm", ranks), (Duplicate(ranks),)),
    ]
    cuts = KeyMap(rules)
    state = {"l.0.up": torch.arange(24.0).reshape(8, 3), "l.0.norm": torch.arange(3.0)}
    pieces = convert(cuts, state)
    for rank, piece in enumerate(state["l.0.up"].chunk(ranks)):
        assert torch.equal(pieces[f"rank{rank}.l.0.up"], piece)
        assert torch.equal(pieces[f"rank{rank}.l.0.norm"], state["l.0.norm"])
    back = convert(cuts.inverse, pieces)
    assert back.keys() == state.keys() and all(torch.equal(back[key], state[key]) for key in state)
    last = f"rank{ranks - 1}.l.0.norm"
    with pytest.raises(CheckpointError, match=rf"^{last}  differs from rank0\.l\.0\.norm; they should be copies"):
        convert(cuts.inverse, pieces | {last: pieces[last] + 1})
    with pytest.raises(ModelFolderError, match=f"there is nothing for 'rank{ranks - 1}."):
        convert(cuts.inverse, {key: tensor for key, tensor in pieces.items() if key != last})


@pytest.mark.parametrize("copies", [2, 4])
def test_another_number_of_copies_than_the_rule_has_is_refused(copies: int) -> None:
    rule = KeyRule("norm", of_ranks("norm", 3), (Duplicate(copies),))
    with pytest.raises(ModelFolderError, match=rf"3 copies of one tensor, and {copies} are expected"):
        convert(KeyMap([rule.inverse]), {key: torch.ones(2) for key in of_ranks("norm", 3)})


def test_ledger_finds_each_kind_of_mistake() -> None:
    a, b = lazy({"a": torch.zeros(1), "b": torch.zeros(1)}).values()
    good = [RuleMatch(("a",), {"x": a}), RuleMatch(("b",), {"y": b})]
    check_used_once(good, ["a", "b"], ["x", "y"])
    mistakes = {
        "is not used": (good[:1], ["a", "b"], ["x"]),
        "is used more than once": ([*good, RuleMatch(("a",), {"z": a})], ["a", "b"], ["x", "y", "z"]),
        "is not made": (good, ["a", "b"], ["x", "y", "z"]),
        "is made more than once": ([good[0], RuleMatch(("b",), {"x": b})], ["a", "b"], ["x"]),
        "is made but not wanted": (good, ["a", "b"], ["x"]),
    }
    for message, (steps, sources, targets) in mistakes.items():
        with pytest.raises(ModelFolderError, match=message):
            check_used_once(steps, sources, targets)


def test_ledger_lists_five_and_counts_the_rest() -> None:
    with pytest.raises(ModelFolderError, match="and 7 more"):
        check_used_once([], [str(i) for i in range(12)], [])


def test_natural_order() -> None:
    assert sorted(["l.10.w", "l.2.w", "l.2.b", "l.norm"], key=natural_order) == ["l.norm", "l.2.b", "l.2.w", "l.10.w"]


@pytest.mark.parametrize("turned", [False, True])
def test_a_rule_with_a_placeholder_leaves_narrower_rules_their_keys_both_ways(turned: bool) -> None:
    rules = [KeyRule("layers.{n}.out.{p}", "vit.{n}.{p}"), KeyRule("end_norm.{p}", "vit.post.{p}")]
    key_map = KeyMap(rules[::-1] if turned else rules)
    state = {"layers.0.out.weight": torch.randn(2), "end_norm.weight": torch.randn(2)}
    there = convert(key_map, state)
    back = convert(key_map.inverse, there)
    assert there.keys() == {"vit.0.weight", "vit.post.weight"}
    assert back.keys() == state.keys()
    assert all(torch.equal(back[key], state[key]) for key in state)
    assert key_map.inverse.inverse is key_map


@pytest.mark.parametrize(
    ("first", "second", "key"),
    [("{rest*}", "m.{rest*}", "m.a.b"), ("m.{a}.{b}", "m.{a}.{a}", "m.0.0"), ("m.{rest*}", "m.{a}.{b}", "m.a.b")],
)
def test_the_narrowest_pattern_has_a_key(first: str, second: str, key: str) -> None:
    rules = [KeyRule(first, f"wide.{first}"), KeyRule(second, f"narrow.{second}")]
    assert convert(KeyMap(rules), {key: torch.zeros(1)}).keys() == {f"narrow.{key}"}


@pytest.mark.parametrize(
    ("first", "second", "key"),
    [("m.{a}.b", "m.b.{a}", "m.b.b"), ("m.{rest*}", "m.{all*}", "m.a.b"), ("m.{a}.{b}", "{any*}.b", "m.a.b")],
)
def test_of_patterns_of_which_none_is_narrower_the_first_has_a_key(first: str, second: str, key: str) -> None:
    rules = [KeyRule(first, f"one.{first}"), KeyRule(second, f"other.{second}")]
    assert convert(KeyMap(rules), {key: torch.zeros(1)}).keys() == {f"one.{key}"}


def test_what_the_way_there_would_not_have_made_is_refused_on_the_way_back() -> None:
    key_map = KeyMap([KeyRule("a.special", "c"), KeyRule("a.{p}", "b.{p}")])
    with pytest.raises(
        ModelFolderError, match=r"makes a\.special of it, but on the way there rule a\.special -> c takes"
    ):
        convert(key_map.inverse, {"b.special": torch.zeros(1)})
