"""Weights from scratch: the model's own distribution, the same under every plan, nothing left unset."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from mindspeed_mm.core.errors import ModelFolderError
from mindspeed_mm.fsdp.models.base_model import BaseModel, WeightInitMixin
from mindspeed_mm.fsdp.models.loading.initialization import initialize
from mindspeed_mm.fsdp.models.loading.meta_device import materialize, parameters_on_meta
from mindspeed_mm.fsdp.models.modelhub import ModelHub
from mindspeed_mm.fsdp.models.structure.spec import resolve_spec
from mindspeed_mm.fsdp.params.model_args import ModelArguments
from tests.helpers.distributed import run_ranks

CPU = torch.device("cpu")


def from_scratch(folder: Path | str, *, seed: int = 1, mesh: Any = None, dtype: torch.dtype | None = None) -> nn.Module:
    args = ModelArguments.model_validate({"model_name_or_path": str(folder), "train_from_scratch": True})
    model = ModelHub.build(args, param_dtype=dtype)
    if mesh is not None:
        spec = resolve_spec(model)
        for group in spec.tie_groups:
            fully_shard([model.get_submodule(name) for name in group], mesh=mesh)
        for name in spec.shard_modules:
            fully_shard(model.get_submodule(name), mesh=mesh)
        fully_shard(model, mesh=mesh)
    ModelHub.load_weights(model, args, seed=seed, device=CPU)
    return model


def full_state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.full_tensor() if isinstance(p, DTensor) else p.detach() for name, p in model.named_parameters()}


def sharded_state(folder: str) -> dict[str, torch.Tensor]:
    return full_state(from_scratch(folder, mesh=init_device_mesh("cpu", (dist.get_world_size(),))))


@pytest.mark.parametrize("kind", ["vision", "text"])
def test_the_same_weights_on_one_process_and_on_two_ranks(kind: str, folders: dict[str, Path]) -> None:
    alone = full_state(from_scratch(folders[kind]))
    for state in run_ranks(2, sharded_state, str(folders[kind])):
        assert state.keys() == alone.keys()
        assert all(torch.equal(state[name], alone[name]) for name in alone)


def test_what_a_parent_sets_of_its_children_is_the_same_on_two_ranks(tmp_path: Path) -> None:
    """CLIP's embeddings draw the table of places that one of their children holds."""
    import transformers

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlavaConfig(
        vision_config={"model_type": "clip_vision_model", "image_size": 16, "patch_size": 8, **sizes},
        text_config={"model_type": "llama", "vocab_size": 64, **sizes},
        architectures=["LlavaForConditionalGeneration"],
    )
    config.save_pretrained(tmp_path)
    alone = full_state(from_scratch(tmp_path))
    for state in run_ranks(2, sharded_state, str(tmp_path)):
        assert [name for name in alone if not torch.equal(state[name], alone[name])] == []


def test_seed_counts_and_nothing_else_does(folders: dict[str, Path]) -> None:
    torch.manual_seed(5)
    first = full_state(from_scratch(folders["vision"]))
    drawn = torch.rand(1)
    torch.manual_seed(6)
    again = full_state(from_scratch(folders["vision"]))
    other = full_state(from_scratch(folders["vision"], seed=2))
    torch.manual_seed(5)
    assert torch.equal(drawn, torch.rand(1))  # the global generator is left as it was
    assert all(torch.equal(first[name], again[name]) for name in first)
    random = [name for name, value in first.items() if value.std() > 0]
    assert len(random) > 20
    assert not any(torch.equal(first[name], other[name]) for name in random)


def test_blocks_of_one_shape_differ(folders: dict[str, Path]) -> None:
    state = full_state(from_scratch(folders["text"]))
    assert not torch.equal(state["model.layers.0.mlp.up_proj.weight"], state["model.layers.1.mlp.up_proj.weight"])


def test_distribution_is_the_models_own(folders: dict[str, Path]) -> None:
    for name, value in full_state(from_scratch(folders["vision"])).items():
        if "norm" in name and name.endswith("weight"):
            assert (value == 1).all(), name
        elif name.endswith("bias"):
            assert (value == 0).all(), name
        else:
            assert value.mean().abs() < 0.003 and 0.017 < value.std() < 0.023, name


def test_dtype_changes_no_weight(folders: dict[str, Path]) -> None:
    single, double = from_scratch(folders["text"]), from_scratch(folders["text"], dtype=torch.float64)
    pairs = zip(single.parameters(), double.parameters(), strict=True)
    assert all(q.dtype == torch.float64 and torch.equal(p.double(), q) for p, q in pairs)


class PerModule(BaseModel):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.scale = nn.Linear(3, 3), nn.LayerNorm(3), nn.Parameter(torch.zeros(3))

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if module is self:
            nn.init.constant_(self.scale, 5)


class InOneGo(WeightInitMixin, nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = nn.Linear(3, 3), nn.Parameter(torch.zeros(3))

    def init_weights(self) -> None:
        nn.init.constant_(self.inner.weight, 2)
        nn.init.constant_(self.scale, 3)


class Forgetful(BaseModel):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.forgotten = nn.Linear(3, 3), nn.Parameter(torch.zeros(3))


def built(model_class: type[nn.Module]) -> nn.Module:
    with parameters_on_meta():
        model = model_class()
    materialize(model, CPU)
    return model


def test_plugin_that_initialises_module_by_module() -> None:
    model = built(PerModule)
    assert len(initialize(model, seed=0, units=[])) == 5
    assert (model.scale == 5).all() and (model.norm.weight == 1).all()
    assert model.inner.weight.abs().max() <= 3**-0.5  # torch's own range for nn.Linear


def test_plugin_that_initialises_in_one_go() -> None:
    model = built(InOneGo)
    initialize(model, seed=0, units=[])
    assert (model.inner.weight == 2).all() and (model.scale == 3).all()
    assert model.inner.bias.isfinite().all()  # left alone by the plugin: torch's own


def test_a_parameter_left_unset_is_an_error() -> None:
    with pytest.raises(ModelFolderError, match="forgotten  the model's code does not initialise"):
        initialize(built(Forgetful), seed=0, units=[])


def test_only_the_named_parameters_change() -> None:
    model = built(PerModule)
    for parameter in model.parameters():
        nn.init.constant_(parameter, 9)
    assert initialize(model, seed=0, units=[], names={"inner.bias"}) == ["inner.bias"]
    assert (model.inner.weight == 9).all() and (model.scale == 9).all()
    assert (model.inner.bias != 9).all()


class Standardised(BaseModel):
    """Holds numbers that a checkpoint has and no optimizer changes, in a module without parameters of its own, as
    Gemma 4's vision tower does; torch gives their memory as it finds it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.register_buffer("scale", torch.full((3,), 7.0))
        self.register_buffer("step", torch.full((3,), 7.0), persistent=False)

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if module is self:
            nn.init.ones_(self.scale)


def test_numbers_of_a_module_without_parameters_are_set() -> None:
    model = built(Standardised)
    assert initialize(model, seed=0, units=[]) == ["inner.weight", "inner.bias"]
    assert (model.scale == 1).all() and (model.step == 7).all()


def test_numbers_that_were_loaded_are_kept() -> None:
    model = built(Standardised)
    initialize(model, seed=0, units=[""], names={"inner.bias"})
    assert (model.scale == 7).all()
    initialize(model, seed=0, units=[""], names={"scale"})
    assert (model.scale == 1).all()
