"""Hugging Face folders out of live, sharded models and out of distributed checkpoints: what went in comes out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import fully_shard

from mindspeed_mm.checkpoint.hf_folder import DtypeRule, config_dtype, copy_assets, plan_shards
from mindspeed_mm.core.errors import ModelFolderError, UsageError
from mindspeed_mm.fsdp.checkpoint.committed import open_checkpoint
from mindspeed_mm.fsdp.checkpoint.hf import hub_tensors, save_hf
from mindspeed_mm.fsdp.checkpoint.loading import DcpTensors
from mindspeed_mm.fsdp.utils.ranks import Ranks
from mindspeed_mm.fsdp.utils.torchvision_guard import prepare_for_transformers
from tests.fsdp.checkpoint import small_run
from tests.helpers.distributed import run_ranks
from tests.helpers.tiny_models import make_tiny_qwen3, make_tiny_qwen3_vl

prepare_for_transformers()

from transformers import AutoProcessor, Qwen3VLForConditionalGeneration  # noqa: E402  (the guard comes first)

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / f"tied-{request.param}"
    return make_tiny_qwen3_vl(folder, tie=request.param, dtype=torch.bfloat16)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {key: tensor for file in folder.glob("*.safetensors") for key, tensor in load_file(file).items()}


def differing(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> list[str]:
    return [
        key
        for key in sorted({*left, *right})
        if key not in left
        or key not in right
        or left[key].dtype != right[key].dtype
        or not torch.equal(left[key], right[key])
    ]


def shard_and_save(source: str, target: str) -> None:
    """Hold the model in fp32, sharded, as training does, and write it in many small files."""
    model = Qwen3VLForConditionalGeneration.from_pretrained(source, dtype=torch.float32)
    model._weight_conversions = None  # as of a model that was made from scratch
    for layer in model.model.language_model.layers:
        fully_shard(layer)
    fully_shard(model)
    save_hf(model, Path(target), Path(source), max_shard_bytes=30_000)
    with pytest.raises(UsageError, match="the target exists"):  # on all ranks: none waits for rank 0
        save_hf(model, Path(target), Path(source))


def test_sharded_model_goes_back_into_the_folder_that_it_came_from(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    run_ranks(2, shard_and_save, str(source), str(target))
    assert differing(weights(source), weights(target)) == []
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]

    index = json.loads((target / INDEX).read_text())
    files = sorted(target.glob("*.safetensors"))
    assert len(files) > 3
    assert {key: name for name in (f.name for f in files) for key in load_file(target / name)} == index["weight_map"]
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in weights(source).values())
    shards = [load_file(file).values() for file in files]
    assert all(len(shard) == 1 or sum(t.nbytes for t in shard) <= 30_000 for shard in shards)

    model, info = Qwen3VLForConditionalGeneration.from_pretrained(target, output_loading_info=True)
    assert model.dtype == torch.bfloat16
    assert not any(info.values())
    processor = AutoProcessor.from_pretrained(target)
    assert processor.chat_template == AutoProcessor.from_pretrained(source).chat_template


def test_same_keys_as_transformers_writes(source: Path, tmp_path: Path) -> None:
    model = Qwen3VLForConditionalGeneration.from_pretrained(source)
    model.save_pretrained(tmp_path / "theirs", max_shard_size=30_000)
    save_hf(model, tmp_path / "ours", source, max_shard_bytes=30_000)
    assert differing(weights(tmp_path / "theirs"), weights(tmp_path / "ours")) == []
    theirs, ours = (json.loads((tmp_path / name / INDEX).read_text()) for name in ("theirs", "ours"))
    assert theirs["metadata"] == ours["metadata"]


def test_checkpoint_streams_into_the_same_tensors(source: Path, tmp_path: Path) -> None:
    model = Qwen3VLForConditionalGeneration.from_pretrained(source, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters())
    small_run.manager(tmp_path).save(1, model, optimizer, {})
    checkpoint = open_checkpoint(tmp_path, Ranks(), "hash")
    tensors = DcpTensors(checkpoint).lazy()
    with torch.device("meta"):
        outline = Qwen3VLForConditionalGeneration(model.config)
    rule = DtypeRule.of_source(source)
    made = {key: t.read().to(rule(key, t.dtype)) for key, t in hub_tensors(outline, tensors).items()}
    assert differing(weights(source), made) == []


def test_tensor_that_the_map_would_lose_is_an_error() -> None:
    class Renamed(nn.Module):
        from mindspeed_mm.checkpoint.keymap import KeyMap, KeyRule

        key_map = KeyMap([KeyRule("stored.{n*}", "{n*}.weight")])

    model = Renamed()
    tensor = _lazy("a.weight")
    assert list(hub_tensors(model, {"a.weight": tensor})) == ["stored.a"]
    with pytest.raises(ModelFolderError, match=r"b\.bias +is not used"):
        hub_tensors(model, {"a.weight": tensor, "b.bias": _lazy("b.bias")})


def _lazy(key: str):  # type: ignore[no-untyped-def]
    from mindspeed_mm.checkpoint.lazy_tensor import Stored

    return Stored(key, (2,), torch.float32, lambda: None)  # type: ignore[arg-type, return-value]


def test_dtype_comes_from_the_source(tmp_path: Path) -> None:
    source = make_tiny_qwen3(tmp_path / "bf16", dtype=torch.bfloat16)
    assert config_dtype(source) == torch.bfloat16
    rule = DtypeRule.of_source(source)
    assert rule("model.norm.weight", torch.float32) == torch.bfloat16
    assert rule("unknown", torch.float32) == torch.bfloat16
    assert rule("model.norm.weight", torch.int64) == torch.int64
    assert DtypeRule.of_source(source, torch.float16)("model.norm.weight", torch.float32) == torch.float16
    assert DtypeRule({}, None)("x", torch.float64) == torch.float64
    assert DtypeRule({"router": torch.float32}, torch.bfloat16)("router", torch.float64) == torch.float32


def test_assets_are_copied_and_weights_are_not(tmp_path: Path) -> None:
    source = make_tiny_qwen3_vl(tmp_path / "source", dtype=torch.bfloat16)
    for name in ("model.safetensors.index.json", "README.md", "optimizer.pt", "LICENSE"):
        (source / name).write_text("x")
    (tmp_path / "out").mkdir()
    copied = copy_assets(source, tmp_path / "out", torch.float16)
    assert set(copied) >= {"config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja", "LICENSE"}
    assert not set(copied) & {"model.safetensors", "model.safetensors.index.json", "README.md", "optimizer.pt"}
    assert config_dtype(tmp_path / "out") == torch.float16
    assert (tmp_path / "out" / "config.json").read_text().count("float16") == (
        (source / "config.json").read_text().count("bfloat16")
    )
    with pytest.raises(ModelFolderError, match=r"has no config\.json"):
        copy_assets(tmp_path, tmp_path / "out")


def test_shards() -> None:
    assert plan_shards({"a": 3, "b": 3, "c": 9, "d": 1}, 6) == {
        "model-00001-of-00003.safetensors": ["a", "b"],
        "model-00002-of-00003.safetensors": ["c"],
        "model-00003-of-00003.safetensors": ["d"],
    }
    assert plan_shards({"a": 3, "b": 3}, 6) == {"model.safetensors": ["a", "b"]}


def test_failed_save_leaves_nothing_and_an_existing_folder_stays(source: Path, tmp_path: Path) -> None:
    model = Qwen3VLForConditionalGeneration.from_pretrained(source)
    with pytest.raises(ModelFolderError, match=r"has no config\.json"):
        save_hf(model, tmp_path / "out", tmp_path)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("")
    with pytest.raises(UsageError, match="no mm command wrote"):
        save_hf(model, tmp_path / "out", source, overwrite=True)
