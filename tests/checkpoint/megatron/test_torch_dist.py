"""A folder as Megatron-Core writes it with `--ckpt-format torch_dist`, filled here by hand from the hub's tensors and
written by torch alone: it becomes the hub's folder again, to the bit, and trains."""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from mindspeed_mm.checkpoint.dcp_folder import reading
from mindspeed_mm.checkpoint.dcp_folder.reading import DcpReader
from mindspeed_mm.checkpoint.lazy_tensor import Selected
from mindspeed_mm.checkpoint.recognise import recognise
from tests.helpers.megatron_models import GROUPS, LAYERS, WORDS, save_tiny
from tests.helpers.parity import compare_steps
from tests.helpers.plan_matrix import FP64
from tests.helpers.planned_steps import overrides, train_steps
from tests.helpers.runs import mm
from tests.helpers.tiny_models import make_tiny_qwen3_vl
from tests.helpers.tiny_run import make_tiny_run
from tests.helpers.torch_dist import Chunked, write_torch_dist

Hub = dict[str, torch.Tensor]


def qkv(hub: Hub, at: str, groups: int, part: str = "weight") -> torch.Tensor:
    """Of each group its queries, its key, its value."""
    held = [hub[f"{at}{which}_proj.{part}"] for which in "qkv"]
    return torch.cat([tensor.view(groups, -1, *tensor.shape[1:]) for tensor in held], 1).flatten(0, 1)


def gate_up(hub: Hub, at: str) -> torch.Tensor:
    return torch.cat([hub[f"{at}gate_proj.weight"], hub[f"{at}up_proj.weight"]])


def dense_layer(hub: Hub, at: str, groups: int = GROUPS) -> Hub:
    """With Transformer Engine's names: norms belong to the linear layers behind them."""
    return {
        "self_attention.linear_qkv.layer_norm_weight": hub[f"{at}input_layernorm.weight"],
        "self_attention.linear_qkv.weight": qkv(hub, f"{at}self_attn.", groups),
        "self_attention.q_layernorm.weight": hub[f"{at}self_attn.q_norm.weight"],
        "self_attention.k_layernorm.weight": hub[f"{at}self_attn.k_norm.weight"],
        "self_attention.linear_proj.weight": hub[f"{at}self_attn.o_proj.weight"],
        "mlp.linear_fc1.layer_norm_weight": hub[f"{at}post_attention_layernorm.weight"],
        "mlp.linear_fc1.weight": gate_up(hub, f"{at}mlp."),
        "mlp.linear_fc2.weight": hub[f"{at}mlp.down_proj.weight"],
    }


def stacked(layers: list[Hub], start: str) -> Hub:
    return {start + name: torch.stack([layer[name] for layer in layers]) for name in layers[0]}


def by_rank(tensor: torch.Tensor) -> Chunked:
    """A chunk for each layer and each of two ranks, which do not divide every length."""
    return Chunked(tensor, (1, -(-tensor.shape[1] // 2), *tensor.shape[2:]))


def ends(hub: Hub, start: str = "", hub_start: str = "model.") -> Hub:
    """The vocabulary is filled up to a multiple of 128; a head that is the embedding is not stored."""
    words = torch.nn.functional.pad(hub[f"{hub_start}embed_tokens.weight"], (0, 0, 0, 256 - WORDS), value=7.0)
    found = {f"{start}embedding.word_embeddings.weight": words}
    found[f"{start}decoder.final_layernorm.weight"] = hub[f"{hub_start}norm.weight"]
    if "lm_head.weight" in hub:
        found[f"{start}output_layer.weight"] = torch.nn.functional.pad(hub["lm_head.weight"], (0, 0, 0, 256 - WORDS))
    return found


def qwen3(hub: Hub) -> dict[str, torch.Tensor | Chunked]:
    layers = stacked([dense_layer(hub, f"model.layers.{n}.") for n in range(LAYERS)], "decoder.layers.")
    return {**ends(hub), **{name: by_rank(tensor) for name, tensor in layers.items()}}


def qwen3_moe(hub: Hub, *, apart: bool) -> dict[str, torch.Tensor | Chunked]:
    """Not all layers are alike, so each has its number; `apart`: and so have gates, ups and experts."""
    found: dict[str, torch.Tensor | Chunked] = {**ends(hub)}
    for n in range(LAYERS):
        at, own = f"model.layers.{n}.", f"decoder.layers.{n}."
        if n == 1:
            found |= {own + name: tensor for name, tensor in dense_layer(hub, at).items()}
            continue
        attention = dense_layer(
            {**hub, **dict.fromkeys([f"{at}mlp.{p}_proj.weight" for p in ("gate", "up", "down")], torch.ones(1))}, at
        )
        found |= {own + name: tensor for name, tensor in attention.items() if name.startswith("self")}
        found[f"{own}pre_mlp_layernorm.weight"] = hub[f"{at}post_attention_layernorm.weight"]
        found[f"{own}mlp.router.weight"] = hub[f"{at}mlp.gate.weight"]
        experts = [f"{at}mlp.experts.{e}." for e in range(4)]
        if apart:
            for e, expert in enumerate(experts):
                name = f"{own}mlp.experts.experts.{e}."
                found[f"{name}linear_fc1.weight_w"] = hub[f"{expert}gate_proj.weight"]
                found[f"{name}linear_fc1.weight_v"] = hub[f"{expert}up_proj.weight"]
                found[f"{name}linear_fc2.weight"] = hub[f"{expert}down_proj.weight"]
            continue
        fc1 = torch.stack([gate_up(hub, expert) for expert in experts])
        found[f"{own}mlp.experts.experts.linear_fc1.weight"] = Chunked(fc1, (1, 6, fc1.shape[2]))
        fc2 = torch.stack([hub[f"{expert}down_proj.weight"] for expert in experts])
        found[f"{own}mlp.experts.experts.linear_fc2.weight"] = Chunked(fc2, (2, fc2.shape[1], 5))
    return found


def deepseek_v3(hub: Hub) -> dict[str, torch.Tensor | Chunked]:
    found: dict[str, torch.Tensor | Chunked] = {**ends(hub)}
    for n in range(LAYERS):
        at, own = f"model.layers.{n}.self_attn.", f"decoder.layers.{n}.self_attention."
        found |= {
            f"{own}linear_q_down_proj.weight": hub[f"{at}q_a_proj.weight"],
            f"{own}linear_q_up_proj.layer_norm_weight": hub[f"{at}q_a_layernorm.weight"],
            f"{own}linear_q_up_proj.weight": hub[f"{at}q_b_proj.weight"],
            f"{own}linear_kv_down_proj.weight": hub[f"{at}kv_a_proj_with_mqa.weight"],
            f"{own}linear_kv_up_proj.layer_norm_weight": hub[f"{at}kv_a_layernorm.weight"],
            f"{own}linear_kv_up_proj.weight": hub[f"{at}kv_b_proj.weight"],
            f"{own}linear_proj.weight": hub[f"{at}o_proj.weight"],
        }
        at, own = f"model.layers.{n}.", f"decoder.layers.{n}."
        found[f"{own}input_layernorm.weight"] = hub[f"{at}input_layernorm.weight"]
        norm = "mlp.linear_fc1.layer_norm_weight" if n == 0 else "pre_mlp_layernorm.weight"
        found[own + norm] = hub[f"{at}post_attention_layernorm.weight"]
        at, own = f"{at}mlp.", f"{own}mlp."
        if n == 0:
            found |= {
                f"{own}linear_fc1.weight": gate_up(hub, at),
                f"{own}linear_fc2.weight": hub[f"{at}down_proj.weight"],
            }
            continue
        found |= {
            f"{own}router.weight": hub[f"{at}gate.weight"],
            f"{own}router.expert_bias": hub[f"{at}gate.e_score_correction_bias"],
            f"{own}shared_experts.linear_fc1.weight": gate_up(hub, f"{at}shared_experts."),
            f"{own}shared_experts.linear_fc2.weight": hub[f"{at}shared_experts.down_proj.weight"],
            f"{own}experts.experts.linear_fc1.weight": torch.stack(
                [gate_up(hub, f"{at}experts.{e}.") for e in range(4)]
            ),
            f"{own}experts.experts.linear_fc2.weight": torch.stack(
                [hub[f"{at}experts.{e}.down_proj.weight"] for e in range(4)]
            ),
        }
    return found


MODELS = {
    "qwen3": qwen3,
    "qwen3_moe": partial(qwen3_moe, apart=False),
    "qwen3_moe apart": partial(qwen3_moe, apart=True),
    "deepseek_v3": deepseek_v3,
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return cache(lambda name: save_tiny(name, tmp_path_factory.mktemp(name)))


def assert_same(found: Path, wanted: Path) -> None:
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (found, wanted))
    assert ours.keys() == theirs.keys()
    for key, tensor in ours.items():
        assert tensor.dtype == theirs[key].dtype and torch.equal(tensor, theirs[key]), key


@pytest.mark.parametrize("name", MODELS)
def test_it_becomes_the_hub_s_folder_to_the_bit(name: str, saved: Callable[[str], Path], tmp_path: Path) -> None:
    hf = saved(name.partition(" ")[0])
    step = write_torch_dist(tmp_path / "run", MODELS[name](load_file(hf / "model.safetensors")))
    assert recognise(tmp_path / "run") == recognise(step) == "megatron"
    said = mm("convert", tmp_path / "run", tmp_path / "hf", "--to", "hf", "--model", hf)
    assert said.code == 0, said.err
    assert "logits of 16 tokens are those of the source" in said.out
    assert_same(tmp_path / "hf", hf)
    left_out = json.loads((tmp_path / "hf/conversion_manifest.json").read_text())["left_out"]
    assert left_out == {
        "optimizer": "is not part of the model",
        "chained_1": "is not part of the model",
        "rng_state": "is not part of the model",
        "decoder.layers.self_attention.linear_qkv._extra_state": "is what Megatron's kernels keep for themselves",
    }


def test_it_is_divided_among_ranks(saved: Callable[[str], Path], tmp_path: Path) -> None:
    hf = saved("qwen3")
    write_torch_dist(tmp_path / "run", qwen3(load_file(hf / "model.safetensors")))
    words = ("--to", "megatron", "--tp", 2, "--pp", 2)
    for source, target, model in ((hf, "of hf", ()), (tmp_path / "run", "of run", ("--model", hf))):
        said = mm("convert", source, tmp_path / target, *words, *model)
        assert said.code == 0, said.err
    files = sorted(path.relative_to(tmp_path / "of hf") for path in (tmp_path / "of hf").glob("release/*/*.pt"))
    assert len(files) == 4
    for file in files:
        ours, theirs = (torch.load(tmp_path / name / file, weights_only=True)["model"] for name in ("of run", "of hf"))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_it_becomes_a_distributed_checkpoint_as_the_hub_s_folder_does(
    saved: Callable[[str], Path], tmp_path: Path
) -> None:
    hf = saved("qwen3_moe")
    write_torch_dist(tmp_path / "run", qwen3_moe(load_file(hf / "model.safetensors"), apart=False))
    assert mm("convert", hf, tmp_path / "of hf", "--to", "dcp").code == 0
    said = mm("convert", tmp_path / "run", tmp_path / "of run", "--to", "dcp", "--model", hf)
    assert said.code == 0, said.err
    assert "logits of 16 tokens are those of the source" in said.out
    ours, theirs = (DcpReader(tmp_path / name / "release").model_tensors() for name in ("of run", "of hf"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key].read(), theirs[key].read()) for key in ours)


def test_an_index_with_what_megatron_keeps_in_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """How it was planned; before 0.16 under a class of its own."""
    step = write_torch_dist(tmp_path / "run", {"a": torch.arange(3.0)})
    index = pickle.loads((step / ".metadata").read_bytes())
    name = "megatron.core.dist_checkpointing.strategies.torch"
    module, own = ModuleType(name), type("MCoreMetadata", (Metadata,), {"__module__": name})
    module.MCoreMetadata = own  # type: ignore[attr-defined]
    older = own(**vars(index))
    item = WriteItem(MetadataIndex("a", torch.Size([0])), WriteItemType.TENSOR)
    older.mcore_data, older.all_local_plans = {"a": {}}, [SavePlan([item])]  # type: ignore[attr-defined]
    parents = [name.rsplit(".", n)[0] for n in range(1, 5)]
    with monkeypatch.context() as patched:
        for parent in parents:
            patched.setitem(sys.modules, parent, ModuleType(parent))
        patched.setitem(sys.modules, name, module)
        (step / ".metadata").write_bytes(pickle.dumps(older))
    assert torch.equal(DcpReader(step).lazy("a").read(), torch.arange(3.0))


@pytest.mark.slow
def test_training_starts_from_the_same_weights(tmp_path: Path) -> None:
    yaml = make_tiny_run(tmp_path, **FP64)
    other = make_tiny_qwen3_vl(tmp_path / "other", seed=5)
    hub = load_file(other / "model.safetensors")
    config = json.loads((other / "config.json").read_text())
    text, pictures = config["text_config"], config["vision_config"]
    start, groups = "model.language_model.", text["num_key_value_heads"]
    layers = [dense_layer(hub, f"{start}layers.{n}.", groups) for n in range(text["num_hidden_layers"])]
    tensors = stacked(layers, "text_decoder.decoder.layers.")
    tensors["text_decoder.embedding.word_embeddings.weight"] = hub[f"{start}embed_tokens.weight"]
    tensors["text_decoder.decoder.final_layernorm.weight"] = hub[f"{start}norm.weight"]
    tensors |= picture_tower(hub, pictures)
    write_torch_dist(tmp_path / "run", tensors)
    steps = [
        train_steps(str(yaml), [*overrides(1, 1), f"training.load={tmp_path / name}"]) for name in ("other", "run")
    ]
    compare_steps(*steps, 0.0)
    assert mm("check", yaml, f"training.load={tmp_path / 'run'}").code == 0


def picture_tower(hub: Hub, config: dict) -> Hub:
    start, own, heads = "model.visual.", "image_encoder.encoder.", config["num_heads"]
    found = {
        f"{own}{name}": hub[start + name]
        for name in ("patch_embed.proj.weight", "patch_embed.proj.bias", "pos_embed.weight")
    }
    for n in range(config["depth"]):
        at, layer = f"{start}blocks.{n}.", f"{own}blocks.layers.{n}."
        for part in ("weight", "bias"):
            q, k, v = (t.view(heads, -1, *t.shape[1:]) for t in hub[f"{at}attn.qkv.{part}"].chunk(3))
            found[f"{layer}self_attention.linear_qkv.{part}"] = torch.cat([q, k, v], 1).flatten(0, 1)
            found[f"{layer}self_attention.linear_proj.{part}"] = hub[f"{at}attn.proj.{part}"]
            found[f"{layer}input_layernorm.{part}"] = hub[f"{at}norm1.{part}"]
            found[f"{layer}pre_mlp_layernorm.{part}"] = hub[f"{at}norm2.{part}"]
            for i in (1, 2):
                found[f"{layer}mlp.linear_fc{i}.{part}"] = hub[f"{at}mlp.linear_fc{i}.{part}"]
    places = {"merger.": "image_encoder.projector."}
    for i, n in enumerate(config["deepstack_visual_indexes"]):
        places[f"deepstack_merger_list.{i}."] = f"{own}blocks.layers.{n}.deepstack_layer."
    for name, place in places.items():
        for part in ("weight", "bias"):
            found[f"{place}layernorm.{part}"] = hub[f"{start}{name}norm.{part}"]
            for i in (1, 2):
                found[f"{place}encoder.linear_fc{i}.{part}"] = hub[f"{start}{name}linear_fc{i}.{part}"]
    return found


def test_of_stacked_layers_no_more_than_a_chunk_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = torch.arange(5 * 7 * 3.0).view(5, 7, 3)
    step = write_torch_dist(tmp_path / "run", {"a": Chunked(whole, (1, 4, 3)), "b": torch.tensor(3.0)})
    monkeypatch.setattr(reading, "read_tree", None)
    read: list[tuple[int, ...]] = []

    def counted(storage: object, key: str, chunk: object, dtype: torch.dtype) -> torch.Tensor:
        read.append(tuple(chunk.offsets))  # type: ignore[attr-defined]
        return read_chunk(storage, key, chunk, dtype)

    read_chunk = reading.read_chunk
    monkeypatch.setattr(reading, "read_chunk", counted)
    out = torch.empty(4, 2)
    Selected(DcpReader(step).lazy("a"), 0, 3).copy_to(out, ((2, 4), (1, 2)))
    assert torch.equal(out, whole[3, 2:6, 1:3])
    assert read == [(3, 0, 0), (3, 4, 0)]
    monkeypatch.undo()
    assert DcpReader(step).lazy("b").read() == 3


def refused(source: Path, hf: Path, out: Path) -> str:
    said = mm("convert", source, out, "--to", "hf", "--model", hf)
    assert said.code == 4, said.err
    assert not out.exists()
    return said.err


def test_what_is_damaged_or_no_model_s_is_named(saved: Callable[[str], Path], tmp_path: Path) -> None:
    hf = saved("qwen3")
    tensors = qwen3(load_file(hf / "model.safetensors"))
    short = tensors["decoder.layers.mlp.linear_fc2.weight"]
    assert isinstance(short, Chunked)
    for number, (change, message) in enumerate(
        [
            ({"decoder.layers.mlp.linear_fc2.weight": short.tensor[:4]}, "should begin with the model's 5 layers"),
            ({"decoder.layers.5.mlp.linear_fc2.weight": torch.ones(1)}, "is of layer 5, counted from 0"),
            ({"decoder.layers.4.mlp.linear_fc2.weight": torch.ones(1)}, "is stored twice"),
            ({"decoder.layers.mlp.linear_fc1.weight_w": torch.ones(5, 1)}, "has no other half"),
            ({"mtp.layers.0.weight": torch.ones(1)}, "belongs to no tower of this model"),
            ({"embedding.word_embeddings.weight": torch.ones(249, 32)}, "has shape [249, 32], in the model [250, 32]"),
            ({"embedding.word_embeddings.weight": torch.ones(320, 32)}, "has shape [320, 32], in the model [250, 32]"),
        ]
    ):
        write_torch_dist(tmp_path / f"{number}", {**tensors, **change})
        assert message in refused(tmp_path / f"{number}", hf, tmp_path / "out")


class Harmful:
    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        import os

        return os.system, ("touch harmed",)


def test_files_that_would_run_something_and_other_formats_are_refused(
    saved: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    hf = saved("qwen3")
    step = write_torch_dist(tmp_path / "run", qwen3(load_file(hf / "model.safetensors")))
    common, index, settings = (step / name for name in ("common.pt", ".metadata", "metadata.json"))
    for file, content, message in (
        (common, lambda: torch.save({"args": Harmful()}, common), "asks for posix.system"),
        (common, lambda: torch.save({"model": {"a": torch.ones(1)}}, common), "model.a"),
        (index, lambda: index.write_bytes(pickle.dumps(Harmful())), "asks for posix.system"),
        (settings, lambda: settings.write_text('{"sharded_backend": "zarr"}'), "'zarr'"),
        (common, common.unlink, "does not exist"),
        (index, index.unlink, "has no .metadata"),
    ):
        before = file.read_bytes()
        content()
        assert message in refused(tmp_path / "run", hf, tmp_path / "out")
        file.write_bytes(before)
    assert not (tmp_path / "harmed").exists()
    assert mm("convert", tmp_path / "run", tmp_path / "out", "--to", "hf", "--model", hf).code == 0
