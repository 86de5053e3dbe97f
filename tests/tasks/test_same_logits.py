"""What a conversion writes computes what its source computes, or is not written."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from packaging.version import Version
from safetensors.torch import load_file, save_file

from mindspeed_mm.checkpoint.conversion.run import Conversion
from mindspeed_mm.checkpoint.key_ops import Column, Interleave
from mindspeed_mm.checkpoint.lazy_tensor import Concatenated, Sliced
from mindspeed_mm.checkpoint.recognise import Layout
from mindspeed_mm.cli.mm_convert import run as mm_convert
from mindspeed_mm.core.errors import CheckpointError, MachineError
from mindspeed_mm.fsdp.utils import host_memory
from mindspeed_mm.tasks.convert import convert, same_logits
from tests.helpers.family_templates import QWEN2_5_OMNI
from tests.helpers.megatron_models import save_tiny
from tests.helpers.runs import mm
from tests.helpers.small_run_folder import make_text_run
from tests.helpers.tiny_models import make_tiny_qwen3_vl
from tests.helpers.tiny_omni import make_tiny_omni

TP2 = convert.Division(tp=2, pp=2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a processor."""
    return make_tiny_qwen3_vl(tmp_path_factory.mktemp("logits") / "model")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Without one."""
    return cache(lambda name: save_tiny(name, tmp_path_factory.mktemp(name)))


def test_tokens_and_a_picture_are_compared_on_every_way(model: Path, tmp_path: Path) -> None:
    ways = [
        (model, "divided", ("--to", "megatron", "--tp", 2, "--pp", 2)),
        (tmp_path / "divided", "anew", ("--to", "megatron")),
        (tmp_path / "divided", "joined", ("--to", "hf")),
        (model, "dcp", ("--to", "dcp")),
        (tmp_path / "dcp", "back", ("--to", "hf", "--model", model)),
    ]
    for source, target, words in ways:
        said = mm("convert", source, tmp_path / target, *words)
        assert said.code == 0, said.err
        assert "logits of 16 tokens and of a picture are those of the source, to the bit" in said.out


@pytest.mark.parametrize(
    "name",
    [
        "qwen2_5_omni",
        "internvl_hf",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl_moe", "glm4v", "deepseek_vl")
        ),
    ],
)
def test_every_family_that_transformers_computes_is_compared(
    name: str, saved: Callable[[str], Path], tmp_path: Path
) -> None:
    _, done = convert.run(saved(name), tmp_path / "mm", "megatron", division=TP2)
    assert "logits of 16 tokens are those of the source" in done.logits
    assert "no picture was shown: the folder has no processor" in done.logits


@pytest.mark.parametrize(("tower", "seen"), [("text", "16 tokens"), ("vision", "a picture")])
def test_permuted_groups_are_seen_and_nothing_is_left(
    tower: str, seen: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first group of the fused tensor stands last in what is written; nothing that reads it back knows."""
    whole = Interleave._apply

    def permuted(self: Interleave, columns: list[Column]) -> list[Column]:
        (((tensor,),),) = (whole(self, columns),)
        if (len(set(self.sizes)) == 1) != (tower == "vision"):  # pictures have as many keys as queries
            return [[tensor]]
        rows = tensor.shape[0] // self.groups
        return [[Concatenated([Sliced(tensor, 0, rows, tensor.shape[0] - rows), Sliced(tensor, 0, 0, rows)], 0)]]

    monkeypatch.setattr(Interleave, "_apply", permuted)
    with pytest.raises(CheckpointError, match=f"logits of {seen} differ"):
        convert.run(model, tmp_path / "mm", "megatron")
    assert not list(tmp_path.iterdir())
    _, done = convert.run(model, tmp_path / "mm", "megatron", verify=False)
    assert not done.logits


def test_a_wider_checkpoint_is_compared_as_its_folder_rounds_it(model: Path, tmp_path: Path) -> None:
    narrow = tmp_path / "narrow"
    assert mm("convert", model, tmp_path / "dcp", "--to", "dcp").code == 0
    narrow.mkdir()
    for file in model.glob("*.json"):
        (narrow / file.name).write_bytes(file.read_bytes())
    weights = {key: tensor.bfloat16() for key, tensor in load_file(model / "model.safetensors").items()}
    save_file(weights, narrow / "model.safetensors", {"format": "pt"})
    said = mm("convert", tmp_path / "dcp", tmp_path / "back", "--to", "hf", "--model", narrow)
    assert said.code == 0, said.err
    assert load_file(tmp_path / "back/model.safetensors")["model.language_model.norm.weight"].dtype == torch.bfloat16
    assert "are those of the source, to the bit" in said.out


@pytest.mark.skipif(
    Version(metadata.version("transformers")) < Version("5.23"), reason="the thinker's parts have other names there"
)
def test_every_tower_is_shown_its_medium_and_noise_in_it_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_tiny_omni(tmp_path / "omni")
    (model / "chat_template.jinja").write_text(QWEN2_5_OMNI)
    _, done = convert.run(model, tmp_path / "mm", "megatron")
    assert "logits of 16 tokens and of a picture and of a sound are those of the source" in done.logits
    # transformers' model has this one and never uses it
    assert "not used for them, so not compared: " in done.logits
    assert done.logits.endswith("audio_tower.audio_bos_eos_token (1 tensor)")
    filled = same_logits._fill

    def noisy(built: torch.nn.Module, folder: Path) -> None:
        filled(built, folder)
        with torch.no_grad():
            built.model.audio_tower.layers[0].fc1.weight.normal_()  # type: ignore[union-attr,index,operator]

    monkeypatch.setattr(same_logits, "_fill", noisy)
    with pytest.raises(CheckpointError, match="logits of a sound differ"):
        convert.run(model, tmp_path / "other", "megatron")


def test_towers_that_are_shown_nothing_are_named(saved: Callable[[str], Path], tmp_path: Path) -> None:
    _, done = convert.run(saved("qwen2_5_omni"), tmp_path / "dcp", "dcp")
    assert "no sound was shown: the folder has no processor" in done.logits
    parts = done.logits.partition("not used for them, so not compared: ")[2]
    weights = load_file(saved("qwen2_5_omni") / "model.safetensors")
    for tower in ("audio_tower", "visual"):
        assert f"{tower} ({sum(f'{tower}.' in key for key in weights)} tensors)" in parts


def test_masked_logits_do_not_hide_the_others(tmp_path: Path) -> None:
    """Chameleon sets the logits of pictures' tokens to the lowest number."""
    torch.manual_seed(0)
    pictures = {
        "embed_dim": 8,
        "num_embeddings": 20,
        "double_latent": False,
        "latent_channels": 8,
        "resolution": 16,
        "base_channels": 32,
        "channel_multiplier": [1],
        "num_res_blocks": 1,
    }
    config = transformers.ChameleonConfig(
        vocab_size=200,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        vq_config=pictures,
        vocabulary_map={f"IMGIMG{chr(65 + number)}Z": 100 + number for number in range(20)} | {"<image>": 99},
    )
    transformers.ChameleonForConditionalGeneration(config).save_pretrained(tmp_path / "model")
    _, done = convert.run(tmp_path / "model", tmp_path / "dcp", "dcp")
    assert "2,880 of 3,200, 320 are masked on both sides" in done.logits
    conversion = Conversion([tmp_path / "model"], [], {}, {"kind": "dcp"})
    other = changed(tmp_path / "model", tmp_path / "other", lambda key, t: t.flip(0) if "layers.1.mlp" in key else t)
    convert.run(other, tmp_path / "other-dcp", "dcp", verify=False)
    with pytest.raises(CheckpointError, match="differ by"):
        same_logits.same_logits(conversion, tmp_path / "other-dcp", False)


def test_a_run_of_adapters_is_exported_not_converted(tmp_path: Path) -> None:
    make_text_run(tmp_path)
    step = tmp_path / "run/iter_0000002"
    shutil.rmtree(step)
    name = "model.model.layers.0.self_attn.q_proj.lora_A.default.weight"
    dcp.save({name: torch.ones(2, 3)}, checkpoint_id=step, no_dist=True)
    said = mm("convert", step, tmp_path / "out", "--to", "hf", "--model", tmp_path / "model")
    assert said.code == 2
    assert "holds adapters (1 tensors, as" in said.err and "mm export" in said.err


def changed(source: Path, folder: Path, change: Callable[[str, torch.Tensor], torch.Tensor]) -> Path:
    """A copy of a folder with other weights."""
    shutil.copytree(source, folder)
    weights = {key: change(key, tensor) for key, tensor in load_file(source / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_a_run_is_compared(tmp_path: Path) -> None:
    """Its steps hold random numbers in safetensors, too."""
    run = make_text_run(tmp_path)
    newest = run / "iter_0000002"
    assert any(newest.glob("*.safetensors"))
    for source, words in ((run, ()), (newest, ("--model", tmp_path / "model"))):
        target = tmp_path / f"of-{source.name}"
        said = mm("convert", source, target, "--to", "hf", *words)
        assert said.code == 0, said.err
        assert "logits of 16 tokens are those of the source, to the bit" in said.out
        assert "; both under one config.json)" in said.out
        assert not torch.equal(
            load_file(target / "model.safetensors")["model.norm.weight"],
            load_file(tmp_path / "model/model.safetensors")["model.norm.weight"],
        )


@pytest.mark.parametrize("to", ["dcp", "megatron"])
def test_a_wide_head_beside_narrow_norms_is_rounded_to_neither(
    to: str, saved: Callable[[str], Path], tmp_path: Path
) -> None:
    """The head is beyond what fp16 holds; on the way back, what training holds wider is rounded tensor by tensor."""

    def typed(key: str, tensor: torch.Tensor) -> torch.Tensor:
        if "norm" in key:
            return tensor.half()
        return tensor * 1e6 if "lm_head" in key else tensor.bfloat16() if "mlp" in key else tensor

    source = changed(saved("qwen2_5_vl"), tmp_path / "mixed", typed)
    said = mm("convert", source, tmp_path / "there", "--to", to)
    assert said.code == 0, said.err
    assert "those of the source, to the bit" in said.out
    said = mm("convert", tmp_path / "there", tmp_path / "back", "--to", "hf", "--model", source)
    assert said.code == 0, said.err
    assert "those of the source, to the bit" in said.out
    if to == "dcp":
        wide = changed(source, tmp_path / "wide", lambda _, tensor: tensor.float() * 1.0001)
        assert mm("convert", wide, tmp_path / "trained", "--to", "dcp").code == 0
        said = mm("convert", tmp_path / "trained", tmp_path / "narrowed", "--to", "hf", "--model", source)
        assert said.code == 0, said.err
        assert "those of the source, to the bit" in said.out


def test_a_head_of_zeros_is_said_to_show_nothing(saved: Callable[[str], Path], tmp_path: Path) -> None:
    source = changed(
        saved("qwen2_5_vl"), tmp_path / "zeros", lambda key, tensor: tensor * 0 if "lm_head" in key else tensor
    )
    _, done = convert.run(source, tmp_path / "dcp", "dcp")
    assert "every one of them zero" in done.logits


@pytest.mark.parametrize("to", ["dcp", "megatron"])
def test_what_the_source_does_not_compute_is_said_to_be_its_own(
    to: Layout, saved: Callable[[str], Path], tmp_path: Path
) -> None:
    source = changed(
        saved("qwen2_5_vl"),
        tmp_path / "nan",
        lambda key, tensor: tensor * torch.nan if key.endswith("layers.2.mlp.up_proj.weight") else tensor,
    )
    _, done = convert.run(source, tmp_path / "out", to)
    assert done.logits == "logits not compared: the source itself computes no finite number of them"


def test_large_models_are_compared_when_they_are_asked_for(
    saved: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved("qwen2_5_vl")
    monkeypatch.setattr(same_logits, "MOST_PARAMETERS", 10)
    said = mm("convert", folder, tmp_path / "one", "--to", "megatron")
    assert said.code == 0, said.err
    assert "logits not compared: the model has 0.0 billion parameters" in said.out
    assert "--verify full compares them" in said.out
    said = mm("convert", folder, tmp_path / "two", "--to", "megatron", "--verify", "full")
    assert "logits of 16 tokens are those of the source" in said.out


def test_a_model_that_memory_does_not_hold_is_left_out_or_refused(
    saved: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(same_logits, "available_bytes", lambda: 5)
    _, done = convert.run(saved("qwen2_5_vl"), tmp_path / "mm", "megatron")
    assert "GiB are free" in done.logits
    with pytest.raises(MachineError, match="its logits cannot be compared"):
        convert.run(saved("qwen2_5_vl"), tmp_path / "full", "megatron", verify="full")
    assert not (tmp_path / "full").exists()


@pytest.mark.parametrize(
    ("name", "flags", "why"),
    [
        ("internvl_chat", (), "no file of the tokenizer has the token <IMG_CONTEXT>"),
        ("qwen2_vl", ("--cfg.save_vit_only", "true"), "only the vision tower is written"),
    ],
)
def test_why_nothing_is_compared_is_said(
    name: str,
    flags: tuple[str, ...],
    why: str,
    saved: Callable[[str], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    converter = "InternVLConverter" if name == "internvl_chat" else "Qwen2VLConverter"
    words = [converter, "hf_to_mm", "--cfg.mm_dir", tmp_path / "mm", "--cfg.hf_config.hf_dir", saved(name), *flags]
    assert mm_convert([str(word) for word in [*words, "--verify", "full"]]) == 0
    assert f"logits not compared: {'the model cannot be built: ' if not flags else ''}{why}" in capsys.readouterr().out


def test_names_by_flags_are_none_of_a_model(saved: Callable[[str], Path], tmp_path: Path) -> None:
    words = ["GenericDCPConverter", "hf_to_dcp", "--hf_dir", saved("qwen2_vl"), "--dcp_dir", tmp_path / "dcp"]
    assert mm_convert([str(word) for word in [*words, "--dcp_prefix", "thinker."]]) == 0


def test_free_memory_is_that_of_the_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "_ROOT", tmp_path)
    (tmp_path / "proc").mkdir()
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal:  10 kB\nMemFree:  1 kB\nMemAvailable:     8 kB\n")
    assert host_memory.available_bytes() == 8192
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("5000\n")
    (tmp_path / "sys/fs/cgroup/memory.stat").write_text("anon 1000\nfile 4000\n")
    assert host_memory.available_bytes() == 4000
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("max\n")
    assert host_memory.available_bytes() == 8192
