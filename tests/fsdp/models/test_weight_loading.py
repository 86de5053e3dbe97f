"""Streaming into shards gives the stored values under every plan, and every key is accounted for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from mindspeed_mm.core.errors import ModelFolderError
from mindspeed_mm.fsdp.models.loading import stream
from mindspeed_mm.fsdp.models.loading.local_shard import local_pieces, local_tensor
from mindspeed_mm.fsdp.models.loading.meta_device import materialize
from mindspeed_mm.fsdp.models.loading.stream import check_weights
from mindspeed_mm.fsdp.models.modelhub import ModelHub
from mindspeed_mm.fsdp.models.structure.spec import resolve_spec
from mindspeed_mm.fsdp.params.model_args import ModelArguments
from tests.helpers.distributed import run_ranks

CPU = torch.device("cpu")
NORM = "model.norm.weight"


def arguments(folder: Path | str, **settings: Any) -> ModelArguments:
    return ModelArguments.model_validate({"model_name_or_path": str(folder), **settings})


def load(folder: Path, **options: Any) -> Any:
    args = arguments(folder)
    model = ModelHub.build(args)
    return model, ModelHub.load_weights(model, args, seed=0, device=CPU, **options)


def edit_state(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    state = load_file(folder / "model.safetensors")
    change(state)
    save_file(state, folder / "model.safetensors")


def shard(model: nn.Module, mesh: Any) -> nn.Module:
    spec = resolve_spec(model)
    for group in spec.tie_groups:
        fully_shard([model.get_submodule(name) for name in group], mesh=mesh)
    for name in spec.shard_modules:
        fully_shard(model.get_submodule(name), mesh=mesh)
    return fully_shard(model, mesh=mesh)


def full_state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.full_tensor() if isinstance(p, DTensor) else p.detach() for name, p in model.named_parameters()}


def loaded_on_ranks(folders: list[str]) -> list[dict[str, Any]]:
    """Every folder, sharded over all ranks, and over a (replicate, shard) mesh when there are four."""
    size = dist.get_world_size()
    meshes = [init_device_mesh("cpu", (size,))]
    if size == 4:
        meshes.append(init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    found = []
    for folder in folders:
        for mesh in meshes:
            args = arguments(folder)
            model = shard(ModelHub.build(args), mesh)
            ModelHub.load_weights(model, args, seed=0, device=CPU)
            local = sum(local_tensor(p).numel() for p in model.parameters())
            tokens = torch.arange(12).view(1, 12) + 8
            logits = model(input_ids=tokens).logits.detach()
            found.append({"state": full_state(model), "local": local, "logits": logits})
    return found


@pytest.mark.parametrize("world_size", [2, 4])
def test_shards_hold_what_the_folder_holds(world_size: int, folders: dict[str, Path]) -> None:
    names = ["tied", "text", "vision"]
    results = run_ranks(world_size, loaded_on_ranks, [str(folders[name]) for name in names])
    per_folder = len(results[0]) // len(names)
    for rank in results:
        for position, result in enumerate(rank):
            model, _ = load(folders[names[position // per_folder]])
            total = sum(p.numel() for p in model.parameters())
            assert result["state"].keys() == dict(model.named_parameters()).keys()
            assert all(torch.equal(result["state"][name], p) for name, p in model.named_parameters())
            shards = world_size if position % per_folder == 0 else 2
            assert total / shards * 0.9 < result["local"] < total / shards * 1.1
            tokens = torch.arange(12).view(1, 12) + 8
            assert torch.allclose(result["logits"], model(input_ids=tokens).logits, atol=1e-6)


def placed_pieces() -> list[str]:
    """Compare regions with what DTensor itself puts on this rank, for sizes that do not divide."""
    flat = init_device_mesh("cpu", (4,))
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    wrong = []
    for shape in [(7, 5), (2, 9), (1, 3), (8, 4), (13, 2)]:
        original = torch.arange(shape[0] * shape[1], dtype=torch.float32).view(shape)
        full = original.clone()
        placed = [distribute_tensor(full, flat, [Shard(0)]), distribute_tensor(full, flat, [Shard(1)])]
        for first in (Shard(0), Shard(1), Replicate()):
            for second in (Shard(0), Shard(1), Replicate()):
                placed.append(distribute_tensor(full, grid, [first, second]))
        placed.append(strided(full, grid))
        for tensor in placed:
            expected = local_tensor(tensor).clone()
            local_tensor(tensor).fill_(-1)
            for piece, region in local_pieces(tensor):
                piece.copy_(original[tuple(slice(start, start + length) for start, length in region)])
            if not torch.equal(local_tensor(tensor), expected):
                wrong.append(f"{shape} {tensor.placements}")
    return wrong


def strided(full: torch.Tensor, grid: Any) -> DTensor:
    """What sharding a tensor-parallel weight once more gives: FSDP's axis stands first but cuts last."""
    linear = nn.Linear(full.shape[1], full.shape[0], bias=False)
    linear.weight = nn.Parameter(distribute_tensor(full, grid["tp"], [Shard(0)]))
    fully_shard(linear, mesh=grid["dp"])
    assert type(linear.weight.placements[0]).__name__ == "_StridedShard", linear.weight.placements
    return linear.weight.detach()


def test_regions_are_those_of_dtensor() -> None:
    assert run_ranks(4, placed_pieces) == [[]] * 4


def test_allowed_missing_is_initialised_and_said(copied: Callable[[str], Path]) -> None:
    folder = copied("text")
    edit_state(folder, lambda state: [state.pop(NORM), state.pop("lm_head.weight")])
    with pytest.raises(ModelFolderError, match="2 missing"):
        load(folder)
    model, report = load(folder, allow_missing=["model.norm.*", "lm_head.weight"])
    assert set(report.initialized) == {NORM, "lm_head.weight"}
    assert torch.equal(model.model.norm.weight, torch.ones(32))
    assert 0.01 < model.lm_head.weight.std() < 0.03
    assert "not stored; initialised" in report.warnings[0]


def test_allowed_unexpected_is_said(copied: Callable[[str], Path]) -> None:
    folder = copied("text")
    edit_state(folder, lambda state: state.update({"mtp.weight": torch.zeros(2)}))
    _, report = load(folder, allow_unexpected=["mtp.*"])
    assert report.ignored == ("mtp.weight",)
    with pytest.raises(ModelFolderError, match=r"mtp\.weight"):
        load(folder, allow_unexpected=["mtp"])


def test_tied_weight_stored_twice_must_be_the_same(copied: Callable[[str], Path]) -> None:
    folder = copied("tied")
    embedding = "model.embed_tokens.weight"
    edit_state(folder, lambda state: state.update({"lm_head.weight": state[embedding].clone()}))
    load(folder)
    edit_state(folder, lambda state: state["lm_head.weight"][5, 5].add_(1))
    with pytest.raises(
        ModelFolderError, match=r"embed_tokens\.weight  is stored.*than 'lm_head\.weight'.*tie_word_embeddings"
    ):
        load(folder)


def test_a_check_compares_tied_weights_too(copied: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "_COMPARED_BYTES", 1000)  # some rows at a time
    folder = copied("tied")
    model = ModelHub.build(arguments(folder))
    head = load_file(folder / "model.safetensors")["model.embed_tokens.weight"].clone()
    edit_state(folder, lambda state: state.update({"lm_head.weight": head}))
    check_weights(model, folder)
    head[-1, -1] += 1
    edit_state(folder, lambda state: state.update({"lm_head.weight": head}))
    with pytest.raises(ModelFolderError, match="is stored with other values than"):
        check_weights(model, folder)


def test_tied_weight_stored_under_its_second_name(copied: Callable[[str], Path]) -> None:
    folder = copied("tied")
    edit_state(folder, lambda state: state.update({"lm_head.weight": state.pop("model.embed_tokens.weight")}))
    model, report = load(folder)
    assert torch.equal(model.model.embed_tokens.weight, load_file(folder / "model.safetensors")["lm_head.weight"])
    assert report.warnings == ()


def test_a_class_that_does_not_tie_its_head_is_told_how(
    copied: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a plugin whose author forgot it; the head in `allow_missing` would be random."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder = copied("tied")
    monkeypatch.setattr(Qwen3ForCausalLM, "_tied_weights_keys", {})
    model = ModelHub.build(arguments(folder))
    told = r"lm_head\.weight  missing.*_tied_weights_keys = {'lm_head\.weight': 'model\.embed_tokens\.weight'}"
    with pytest.raises(ModelFolderError, match=told):
        check_weights(model, folder)
    model.config.tie_word_embeddings = False
    with pytest.raises(ModelFolderError) as untied:
        check_weights(model, folder)
    assert "_tied_weights_keys" not in str(untied.value)
    model.config.text_config = Qwen3Config(tie_word_embeddings=True)
    with pytest.raises(ModelFolderError, match=told):
        check_weights(model, folder)


def test_other_folder_wins_over_training_from_scratch(folders: dict[str, Path]) -> None:
    args = arguments(folders["text"], train_from_scratch=True)
    model = ModelHub.build(args)
    report = ModelHub.load_weights(model, args, seed=0, device=CPU, folder=folders["text"])
    assert report.tensors == 25 and not report.initialized


def test_stored_bf16_becomes_fp32_masters(tmp_path: Path) -> None:
    from tests.helpers.tiny_models import make_tiny_qwen3

    folder = make_tiny_qwen3(tmp_path, dtype=torch.bfloat16)
    model, report = load(folder)
    stored = load_file(folder / "model.safetensors")
    assert report.size_bytes == sum(tensor.numel() * 2 for tensor in stored.values())
    assert all(p.dtype == torch.float32 and torch.equal(p, stored[n].float()) for n, p in model.named_parameters())


def test_materialize_keeps_buffers_and_ties(folders: dict[str, Path]) -> None:
    model = ModelHub.build(arguments(folders["tied"]))
    frequencies = model.model.rotary_emb.inv_freq.clone()
    materialize(model, CPU)
    assert not any(p.is_meta for p in model.parameters())
    assert torch.equal(model.model.rotary_emb.inv_freq, frequencies)
    assert model.lm_head.weight is model.model.embed_tokens.weight
