"""Step-Video's converter: the documents' command lines against a division written by hand, and the released folder."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mindspeed_mm.cli.mm_convert import run
from mindspeed_mm.core.errors import ModelFolderError, UsageError
from mindspeed_mm.fsdp.models.diffusion.find import find_adapter
from tests.helpers.tiny_generators import seeded
from tests.helpers.tiny_stepvideo import TRANSFORMER, make_tiny_stepvideo

WEIGHTS = "diffusion_pytorch_model.safetensors"
HEAD, HEADS, LAYERS = 128, 2, 2


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    """Heads are as wide as the released ones; there are two of them."""
    from mindspeed_mm.fsdp.models.stepvideo.transformer import StepVideoModel

    sizes = {**TRANSFORMER, "attention_head_dim": HEAD, "use_additional_conditions": True}
    seeded(lambda: StepVideoModel(**sizes), 4).save_pretrained(tmp_path / "hub")
    return tmp_path / "hub"


def convert(command: str, source: Path, target: Path, *words: str) -> None:
    assert (
        run(["StepVideoConverter", command, "--cfg.source_path", str(source), "--cfg.target_path", str(target), *words])
        == 0
    )


def by_hand(hub: Path, tp: int, stages: list[int]) -> dict[str, dict[str, torch.Tensor]]:
    """Folder of a rank → its tensors, by the documents: queries, keys and values of all heads stand apart."""
    weights = load_file(hub / WEIGHTS)
    ranks: dict[str, dict[str, torch.Tensor]] = {}
    for t in range(tp):
        for p, _ in enumerate(stages):
            ranks["mp_rank_" + (f"{t:02}" if len(stages) == 1 else f"{t:02}_{p:03}")] = {}
    for name, tensor in weights.items():
        parts = name.split(".")
        stage = 0
        if parts[0] == "transformer_blocks":
            layer, stage = int(parts[1]), 0
            while layer >= stages[stage]:
                layer, stage = layer - stages[stage], stage + 1
            parts[1] = str(layer)
        elif parts[0] in ("proj_out", "scale_shift_table"):
            stage = len(stages) - 1
        renamed, dim = ".".join(parts), None
        for theirs, ours in (("wqkv", "proj_qkv"), ("wkv", "proj_kv"), ("wq", "proj_q"), ("wo", "proj_out")):
            renamed = renamed.replace(f".{theirs}.", f".{ours}.")
        heads = 0
        if ".wqkv." in name or ".wkv." in name:
            heads = 3 if ".wqkv." in name else 2
            tensor = tensor.view(HEADS, heads, HEAD, -1).transpose(0, 1)  # parts, heads, width
        elif name.startswith("adaln_single.linear.") or ".wq." in name or ".ff.net.0." in name:
            dim = 0
        elif ".wo." in name or ".ff.net.2." in name:
            dim = 1
        for t in range(tp):
            if heads:
                piece = tensor.chunk(tp, dim=1)[t].flatten(0, 2)
            else:
                piece = tensor if dim is None else tensor.chunk(tp, dim=dim)[t]
            key = f"mp_rank_{t:02}" if len(stages) == 1 else f"mp_rank_{t:02}_{stage:03}"
            ranks[key][renamed] = piece
    return ranks


@pytest.mark.parametrize(("tp", "stages"), [(1, [2]), (2, [2]), (2, [1, 1])])
def test_the_division_is_that_of_the_documents_and_comes_back(
    tp: int, stages: list[int], hub: Path, tmp_path: Path
) -> None:
    division = ["--cfg.target_parallel_config.tp_size", str(tp), "--cfg.target_parallel_config.pp_layers", str(stages)]
    convert("hf_to_mm", hub, tmp_path / "mm", *division)
    expected = by_hand(hub, tp, stages)
    found = {path.parent.name: torch.load(path, weights_only=True)["model"] for path in (tmp_path / "mm").rglob("*.pt")}
    assert found.keys() == expected.keys()
    for rank, tensors in expected.items():
        assert found[rank].keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert torch.equal(found[rank][name], tensor), (rank, name)
    convert("resplit", tmp_path / "mm", tmp_path / "one")
    convert("mm_to_hf", tmp_path / "one", tmp_path / "back")
    before, after = load_file(hub / WEIGHTS), load_file(tmp_path / "back" / WEIGHTS)
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def test_heads_of_another_width_and_other_layers_are_refused(hub: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"\[3\] are 3 layers, and the model has 2|3 layers"):
        convert("hf_to_mm", hub, tmp_path / "mm", "--cfg.target_parallel_config.pp_layers", "[3]")


def test_a_released_folder_becomes_one_that_trains(tmp_path: Path) -> None:
    make_tiny_stepvideo(tmp_path / "made")
    made, release = tmp_path / "made", tmp_path / "release"
    shutil.copytree(made / "transformer", release / "transformer")
    shutil.copytree(made / "text_encoder", release / "step_llm")
    (release / "step_llm/step1_chat_tokenizer.model").write_bytes(b"words")
    shutil.copytree(made / "tokenizer_2", release / "hunyuan_clip/tokenizer")
    shutil.copytree(made / "text_encoder_2", release / "hunyuan_clip/clip_text_encoder")
    clip = release / "hunyuan_clip/clip_text_encoder/model.safetensors"
    torch.save(load_file(clip), clip.with_name("pytorch_model.bin"))
    clip.unlink()
    vae = load_file(made / "vae" / WEIGHTS)
    (release / "vae").mkdir()
    released = {name.replace("decoder.conv_out.conv.", "decoder.conv_out."): tensor for name, tensor in vae.items()}
    save_file(released, release / "vae/vae_v2.safetensors")
    convert("source_to_hf", release, tmp_path / "ready")
    after = load_file(tmp_path / "ready/vae" / WEIGHTS)
    assert after.keys() == vae.keys() and all(torch.equal(vae[name], after[name]) for name in vae)
    words = load_file(tmp_path / "ready/text_encoder_2/model.safetensors")
    assert all(
        torch.equal(words[name], each) for name, each in load_file(made / "text_encoder_2/model.safetensors").items()
    )
    (tmp_path / "ready/vae/config.json").unlink()  # the tiny VAE is none of the released size
    shutil.copy(made / "vae/config.json", tmp_path / "ready/vae/config.json")
    adapter = find_adapter(tmp_path / "ready")
    assert adapter.task == "t2v" and adapter.released_shift(1) == 13.0
    assert (tmp_path / "ready/tokenizer/step1_chat_tokenizer.model").read_bytes() == b"words"
    (release / "vae/vae_v2.safetensors").unlink()
    with pytest.raises(ModelFolderError, match=r"is missing, and a released folder of Step-Video has it"):
        convert("source_to_hf", release, tmp_path / "again")
