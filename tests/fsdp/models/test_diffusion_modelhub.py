"""The model hub on folders of generators: what it builds, loads, initialises and refuses."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from mindspeed_mm.core.errors import ConfigError, MMError, ModelFolderError
from mindspeed_mm.core.patterns import resolve_patterns
from mindspeed_mm.fsdp.models.behaviour.attention import attention_name
from mindspeed_mm.fsdp.models.diffusion.find import find_adapter
from mindspeed_mm.fsdp.models.diffusion.transformer import ExpertPair
from mindspeed_mm.fsdp.models.facts import facts_of
from mindspeed_mm.fsdp.models.modelhub import ModelHub
from mindspeed_mm.fsdp.models.structure.spec import resolve_spec
from mindspeed_mm.fsdp.params.model_args import ModelArguments
from mindspeed_mm.fsdp.utils.register import model_register
from tests.helpers.tiny_generator_families import FAMILIES

CPU = torch.device("cpu")
KINDS = ["flux", "t2v", "i2v"]
SCRATCH = ("flux", "wan_i2v", "lumina2")
"""Families whose weights from scratch are looked at by default: norms of torch, tables, norms of diffusers."""


def arguments(folder: Path, **changes: Any) -> ModelArguments:
    return ModelArguments(model_name_or_path=str(folder), **changes)


def loaded(folder: Path, source: Path | None = None, **changes: Any) -> nn.Module:
    given = arguments(folder, **changes)
    model = ModelHub.build(given)
    ModelHub.load_weights(model, given, seed=3, device=CPU, folder=source)
    return model


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "transformer/diffusion_pytorch_model.safetensors")


def assert_equal_weights(model: nn.Module, weights: dict[str, torch.Tensor]) -> None:
    parameters = dict(model.named_parameters())
    assert parameters.keys() == weights.keys()
    assert all(torch.equal(parameters[name], weights[name]) for name in weights)


@pytest.mark.parametrize("kind", KINDS)
def test_builds_on_meta_in_one_dtype(generators: dict[str, Path], kind: str) -> None:
    model = ModelHub.build(arguments(generators[kind]), param_dtype=torch.bfloat16)
    assert all(parameter.is_meta and parameter.dtype == torch.float32 for parameter in model.parameters())
    assert not any(buffer.is_meta for buffer in model.buffers())
    assert facts_of(model).adapter.folder == generators[kind]


@pytest.mark.parametrize(
    ("kind", "blocks"),
    [("flux", ["transformer_blocks.0", "single_transformer_blocks.0"]), ("t2v", ["blocks.0", "blocks.1"])],
)
def test_blocks_are_the_adapters(generators: dict[str, Path], kind: str, blocks: list[str]) -> None:
    spec = resolve_spec(ModelHub.build(arguments(generators[kind])))
    assert spec.blocks == spec.shard_modules == blocks
    assert (spec.head, spec.towers, spec.tie_groups) == ("", [], [])


@pytest.mark.parametrize(("kind", "count"), [("flux", 15), ("i2v", 16)])
def test_lora_targets_are_linear_layers(generators: dict[str, Path], kind: str, count: int) -> None:
    model = ModelHub.build(arguments(generators[kind]))
    modules = dict(model.named_modules())
    found = resolve_patterns(facts_of(model).adapter.lora_targets, modules, key="")
    assert len(found) == count
    assert all(isinstance(modules[name], nn.Linear) for name in found)


def test_a_frozen_part_is_kept_in_the_computing_dtype(generators: dict[str, Path]) -> None:
    given = arguments(generators["t2v"], freeze=["condition_embedder"])
    model = ModelHub.build(given, param_dtype=torch.bfloat16)
    for name, parameter in model.named_parameters():
        is_frozen = name.startswith("condition_embedder")
        assert parameter.requires_grad is not is_frozen
        assert parameter.dtype == (torch.bfloat16 if is_frozen else torch.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_loads_what_the_folder_holds(generators: dict[str, Path], kind: str) -> None:
    model = loaded(generators[kind])
    assert_equal_weights(model, stored(generators[kind]))
    assert not any(buffer.is_meta or buffer.isnan().any() for buffer in model.buffers())


@pytest.mark.parametrize("inside", ["", "transformer"])
def test_loads_another_folders_transformer(generators: dict[str, Path], tmp_path: Path, inside: str) -> None:
    other = Path(shutil.copytree(generators["flux"], tmp_path / "other"))
    weights = {name: tensor + 1 for name, tensor in stored(other).items()}
    save_file(weights, other / "transformer/diffusion_pytorch_model.safetensors")
    assert_equal_weights(loaded(generators["flux"], other / inside), weights)


def test_loads_shards_beside_a_variant(copied_generator: Callable[[str], Path]) -> None:
    folder = copied_generator("flux")
    weights, inner = stored(folder), folder / "transformer"
    whole, names = inner / "diffusion_pytorch_model.safetensors", sorted(weights)
    shutil.copy(whole, inner / "diffusion_pytorch_model.fp16.safetensors")
    assert_equal_weights(loaded(folder), weights)
    whole.unlink()
    parts = {f"diffusion_pytorch_model-{i + 1:05}-of-00002.safetensors": names[i::2] for i in range(2)}
    for file, keys in parts.items():
        save_file({key: weights[key] for key in keys}, inner / file)
    index = {"metadata": {}, "weight_map": {key: file for file, keys in parts.items() for key in keys}}
    (inner / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index))
    assert_equal_weights(loaded(folder), weights)


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in SCRATCH else pytest.mark.slow) for n in FAMILIES])
def test_from_scratch_is_as_the_constructor_does_it(name: str, tmp_path: Path) -> None:
    FAMILIES[name].make(tmp_path)
    model = loaded(tmp_path, train_from_scratch=True)
    parts = dict(model.named_children()) if isinstance(model, ExpertPair) else {"": model}
    for part in parts.values():
        torch.manual_seed(0)
        reference = dict(type(part).from_config(part.config).named_parameters())
        for key, parameter in part.named_parameters():
            theirs, share = reference[key], 0.5 if parameter.numel() > 32 else 0.9  # of few numbers little can be said
            assert parameter.std().item() == pytest.approx(theirs.std().item(), rel=share, abs=1e-6, nan_ok=True), key
            assert parameter.mean().item() == pytest.approx(theirs.mean().item(), abs=0.2), key
    again = dict(loaded(tmp_path, train_from_scratch=True).named_parameters())
    assert all(torch.equal(parameter, again[key]) for key, parameter in model.named_parameters())


def test_settings_of_the_transformer_can_be_changed(generators: dict[str, Path]) -> None:
    given = arguments(generators["t2v"], transformer={"num_layers": 3}, train_from_scratch=True)
    model = ModelHub.build(given, overrides={"ffn_dim": 48})
    assert len(model.blocks) == 3
    assert model.blocks[0].ffn.net[0].proj.out_features == 48


@pytest.mark.parametrize(
    ("asked", "backend"), [(None, "native"), ("sdpa", "native"), ("eager", "_native_math"), ("flex", "flex")]
)
def test_attention_is_set_on_this_model_alone(generators: dict[str, Path], asked: str | None, backend: str) -> None:
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry

    before = _AttentionBackendRegistry.get_active_backend()[0]
    model = ModelHub.build(arguments(generators["flux"], attn_implementation=asked))
    assert {block.attn.processor._attention_backend.value for block in model.transformer_blocks} == {backend}
    expected = {None: "sdpa", "flex": "flex_attention (as configured)"}.get(asked, f"{asked} (as configured)")
    assert attention_name(model) == expected
    assert _AttentionBackendRegistry.get_active_backend()[0] == before


def _write_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"


def _bad_json(folder: Path) -> None:
    (folder / "transformer/config.json").write_text("{")


def _no_transformer(folder: Path) -> None:
    shutil.rmtree(folder / "transformer")


def _pointer(folder: Path) -> None:
    (folder / WEIGHTS).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n")


def _cut(folder: Path) -> None:
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[:-100])


def _other_shape(folder: Path) -> None:
    save_file(load_file(folder / WEIGHTS) | {"proj_out.bias": torch.zeros(3)}, folder / WEIGHTS)


def _missing_key(folder: Path) -> None:
    weights = load_file(folder / WEIGHTS)
    weights.pop("x_embedder.weight")
    save_file(weights, folder / WEIGHTS)


def _only_pickled(folder: Path) -> None:
    torch.save(load_file(folder / WEIGHTS), folder / "transformer/diffusion_pytorch_model.bin")
    (folder / WEIGHTS).unlink()


def _other_class(folder: Path) -> None:
    _write_json(folder / "transformer/config.json", _class_name="WanTransformer3DModel")


def _unknown_setting(folder: Path) -> None:
    _write_json(folder / "transformer/config.json", window_size=[3, 3])


def _quantised(folder: Path) -> None:
    _write_json(folder / "transformer/config.json", quantization_config={"quant_method": "bitsandbytes"})


def _impossible(folder: Path) -> None:
    _write_json(folder / "transformer/config.json", num_attention_heads="many")


def _unknown_pipeline(folder: Path) -> None:
    _write_json(folder / "model_index.json", _class_name="FluxControlPipeline")


def _unknown_family(folder: Path) -> None:
    _write_json(folder / "model_index.json", transformer=["diffusers", "FluxTransformer3DModel"])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_bad_json, r"transformer/config\.json.*is not valid JSON"),
        (_no_transformer, r"transformer' is not a folder"),
        (_pointer, r"Git LFS pointer"),
        (_cut, r"safetensors"),
        (_other_shape, r"proj_out\.bias .*shape \(3,\)"),
        (_missing_key, r"x_embedder\.weight  missing"),
        (_only_pickled, r"only pickled weights.*from diffusers import"),
        (_other_class, r"describes a WanTransformer3DModel"),
        (_unknown_setting, r"window_size.*knows no such setting"),
        (_quantised, r"quantised \(bitsandbytes\)"),
        (_impossible, r"cannot build the transformer"),
        (_unknown_pipeline, r"FluxControlPipeline is not a pipeline of FluxTransformer2DModel"),
        (_unknown_family, r"Did you mean 'FluxTransformer2DModel'"),
    ],
)
def test_a_bad_folder_is_one_clear_error(
    copied_generator: Callable[[str], Path], damage: Callable[[Path], None], message: str
) -> None:
    folder = copied_generator("flux")
    damage(folder)
    with pytest.raises(ModelFolderError, match=message):
        loaded(folder)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"transformer": {"num_layer": 2}}, ConfigError, r"model\.transformer\.num_layer .*Did you mean 'num_layers'"),
        (
            {"attn_implementation": "native-sparse"},
            ConfigError,
            r"model\.attn_implementation .*not an attention kernel",
        ),
        ({"model_id": "qwen3_vl"}, ConfigError, r"'qwen3_vl' is not a generator, but the folder is one"),
        ({"model_id": "wan2_1"}, ModelFolderError, r"FluxPipeline is not a pipeline of WanTransformer3DModel"),
        ({"freeze": ["text_blocks.{*}"]}, ConfigError, r"text_blocks"),
    ],
)
def test_a_wrong_setting_is_one_clear_error(
    generators: dict[str, Path], changes: dict[str, Any], error: type[MMError], message: str
) -> None:
    with pytest.raises(error, match=message):
        ModelHub.build(arguments(generators["flux"], **changes))


def test_attention_that_a_cpu_lacks_gives_way(generators: dict[str, Path]) -> None:
    model = ModelHub.build(arguments(generators["flux"], attn_implementation="flash_attention_2"))
    assert attention_name(model) == "sdpa ('flash_attention_2' does not run on a CPU)"


def test_a_generators_id_asks_for_a_generators_folder(folders: dict[str, Path]) -> None:
    with pytest.raises(ModelFolderError, match="does not exist"):
        find_adapter(folders["text"] / "nowhere")
    with pytest.raises(ModelFolderError, match=r"holds no model_index\.json"):
        ModelHub.build(arguments(folders["text"], model_id="flux"))


def test_a_plugin_goes_before_the_family_that_is_built_in(
    copied_generator: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = type("OwnFlux", (model_register.get("flux"),), {})
    folder = copied_generator("flux")
    assert type(find_adapter(folder)) is not own
    monkeypatch.setitem(model_register._entries, "own_flux", own)
    assert type(find_adapter(folder)) is own
