"""Forwards are replaced through one door, which keeps their order."""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from mindspeed_mm.fsdp.features.apply_features import FeaturesApplier
from mindspeed_mm.fsdp.features.memory.recompute import recompute_modules
from mindspeed_mm.fsdp.features.speed.compiled_blocks import compile_modules
from mindspeed_mm.fsdp.models.behaviour.kernels import choose_kernels
from mindspeed_mm.fsdp.models.behaviour.packed_rows import apply_packed_rows
from mindspeed_mm.fsdp.models.modelhub import ModelHub
from mindspeed_mm.fsdp.ops.forward_stack import (
    ForwardKind,
    describe_forwards,
    forwards_of,
    forwards_replaced,
    rebind_globals,
    replace_forward,
    undo_forwards,
)
from mindspeed_mm.fsdp.params.feature_args import CompilePlan, FeatureArguments
from mindspeed_mm.fsdp.params.model_args import ModelArguments
from mindspeed_mm.fsdp.train.configuration import load_with_plugins
from mindspeed_mm.fsdp.train.run.train_options import TrainOptions
from mindspeed_mm.tasks.verify.precision import keeping_double
from tests.helpers import packed_families
from tests.helpers.distributed import run_ranks
from tests.helpers.plan_matrix import FAMILIES, TP
from tests.helpers.planned_steps import Quiet

PACKAGE = Path(__file__).parents[3] / "mindspeed_mm"
EVERYTHING = [
    TP,
    "features.enable_chunk_loss=true",
    "features.compile=true",
    "features.compile_plan.backend=eager",
    "features.recompute=true",
    "features.enable_activation_offload=true",
    "features.enable_chunk_mbs=true",
    "features.chunkmbs_plan.chunk_mbs=1",
    "features.chunkmbs_plan.chunk_kwarg_names=[attention_mask, position_ids, position_embeddings]",
    "training.micro_batch_size=4",
]


class Doubled:
    """A forward around another one."""

    def __init__(self, module: nn.Module) -> None:
        self.inner = module.forward

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * self.inner(x)


def kinds(module: nn.Module) -> list[str]:
    return [str(replacement.kind) for replacement in forwards_of(module)]


# --- the order of a run -----------------------------------------------------------------------------------------------


def stacks_of_a_run(yaml: str) -> dict[str, list[str]]:
    with keeping_double():
        engine = Quiet(load_with_plugins(Path(yaml), EVERYTHING), TrainOptions()).train()
    assert engine is not None
    names = ("model.layers.0", "model.layers.0.mlp.up_proj", "lm_head", "model.norm")
    described = describe_forwards(engine.model)
    return {name: kinds(engine.model.get_submodule(name)) for name in names} | {"described": [described]}


@pytest.mark.slow
def test_a_run_with_everything_on_stacks_each_module_in_the_order_of_assembly(tmp_path: Path) -> None:
    found = run_ranks(2, stacks_of_a_run, str(FAMILIES["text"].make(tmp_path)))[0]
    assert found["model.layers.0"] == ["compile", "recompute", "offload", "slices"]
    assert found["lm_head"] == ["head loss", "tensor"]
    assert found["model.layers.0.mlp.up_proj"] == ["tensor"]
    assert found["model.norm"] == []
    assert "4 Qwen3DecoderLayer (compile, recompute, offload, slices)" in found["described"][0]


def test_delta_nets_of_packed_rows_keep_results_around_documents_around_their_kernel() -> None:
    model = packed_families.FAMILIES["qwen3_next"].build(attention="sdpa")
    keys = ModelArguments(gdn_implementation="eager", skip_gdn_recompute=True)
    choose_kernels(model, keys)
    apply_packed_rows(model)
    features = FeatureArguments.model_validate({"recompute": True, "recompute_plan": {"mode": "selective"}})
    FeaturesApplier(features, ["model.layers.0"], model_args=keys)(model)
    assert kinds(model.model.layers[0].linear_attn) == ["kernel", "packing", "kept results"]


# --- the door ---------------------------------------------------------------------------------------------------------


def test_the_caller_gets_the_forward_that_was_in_use() -> None:
    layer = nn.Linear(2, 2)
    assert replace_forward(layer, ForwardKind.TENSOR, Doubled(layer)) == nn.Linear(2, 2).forward.__func__.__get__(layer)
    first = layer.forward
    assert replace_forward(layer, ForwardKind.RECOMPUTE, Doubled(layer)) is first


def test_a_wrong_order_is_refused_and_leaves_the_module_as_it_is() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)))
    recompute_modules(model, ["0"])
    before = model[0].forward
    with pytest.raises(RuntimeError, match=r"'compile' any more: .* 'recompute', which belongs around 'compile'"):
        compile_modules(model, CompilePlan(backend="eager"), ["0"])
    assert model[0].forward is before and kinds(model[0]) == ["recompute"]


def test_a_deep_copy_takes_its_own_replacements_along() -> None:
    layer = nn.Linear(2, 2)
    replace_forward(layer, ForwardKind.RECOMPUTE, Doubled(layer))
    copied = copy.deepcopy(layer)
    undo_forwards(copied, ForwardKind.RECOMPUTE)
    assert kinds(layer) == ["recompute"] and kinds(copied) == []
    x = torch.randn(1, 2)
    torch.testing.assert_close(layer(x), 2 * copied(x), rtol=0, atol=0)


def test_features_of_an_earlier_training_come_off_and_what_is_inside_of_them_stays() -> None:
    layer, x = nn.Linear(2, 2), torch.randn(1, 2)
    plain = layer(x)
    for kind in (ForwardKind.KERNEL, ForwardKind.COMPILE, ForwardKind.RECOMPUTE, ForwardKind.RECOMPUTE):
        replace_forward(layer, kind, Doubled(layer))
    undo_forwards(layer, ForwardKind.COMPILE)
    torch.testing.assert_close(layer(x), 2 * plain, rtol=0, atol=0)
    assert kinds(layer) == ["kernel"]
    undo_forwards(layer, ForwardKind.KERNEL)
    assert "forward" not in vars(layer)


def test_a_model_that_is_trained_again_begins_without_the_loss_and_features_of_the_first_time() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    for kind in (ForwardKind.KERNEL, ForwardKind.HEAD_LOSS, ForwardKind.OFFLOAD):
        replace_forward(model[0], kind, Doubled(model[0]))
    ModelHub.adopt(model, ModelArguments())
    assert kinds(model[0]) == ["kernel"]


def test_forwards_for_the_length_of_a_call_are_put_back() -> None:
    plain, replaced = nn.Linear(2, 2), nn.Linear(2, 2)
    replace_forward(replaced, ForwardKind.KERNEL, Doubled(replaced))
    before = replaced.forward
    with forwards_replaced(dict.fromkeys((plain, replaced), lambda x: "asked")):
        assert plain(None) == replaced(None) == "asked"
    assert "forward" not in vars(plain) and replaced.forward is before


# --- nobody goes around it --------------------------------------------------------------------------------------------


def replaced_forwards(source: str) -> Iterator[int]:
    """Lines that set a `forward` on something."""
    if not re.search(r"""\.\s*forward\b|["']forward["']""", source):  # parsing takes longer
        return
    for node in ast.walk(ast.parse(source)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if hasattr(node, "target") else []
        for target in targets:
            names = [each.attr for each in ast.walk(target) if isinstance(each, ast.Attribute)]
            if "forward" in names:
                yield target.lineno
        words = node.args if isinstance(node, ast.Call) else []
        if not any(isinstance(word, ast.Constant) and word.value == "forward" for word in words):
            continue
        if ast.unparse(node.func) in ("setattr", "object.__setattr__"):
            yield node.lineno


def test_no_source_replaces_a_forward_beside_the_door() -> None:
    door = PACKAGE / "fsdp/ops/forward_stack.py"
    assert list(replaced_forwards(door.read_text()))
    for path in set(PACKAGE.rglob("*.py")) - {door}:
        assert not list(replaced_forwards(path.read_text())), path


@pytest.mark.parametrize(
    "source",
    ["module.forward = other", "first, module.forward = pair", "module.forward: F = other", "setattr(m, 'forward', f)"],
)
def test_a_forward_that_is_replaced_beside_the_door_is_found(source: str) -> None:
    assert list(replaced_forwards(source)) == [1]


def first_helper() -> int:
    """What a forward of this file calls; a test changes it."""
    return 1


def second_helper() -> int:
    """What is rebound."""
    return 10


class CallsHelpers(nn.Module):
    """Calls functions of its file."""

    def forward(self) -> int:
        return first_helper() + second_helper()


def test_what_a_file_got_since_is_called_beside_what_is_rebound(monkeypatch: pytest.MonkeyPatch) -> None:
    others = {"second_helper": lambda: 20}
    before, again, after = CallsHelpers(), CallsHelpers(), CallsHelpers()
    rebind_globals(before, others)
    rebind_globals(again, others)
    assert before.forward.__func__ is again.forward.__func__  # compiled graphs are shared
    monkeypatch.setitem(globals(), "first_helper", lambda: 2)
    rebind_globals(after, others)
    assert (before(), after()) == (21, 22)
