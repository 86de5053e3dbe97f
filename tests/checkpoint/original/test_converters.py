"""The documents' converters of generators, by their commands, and the scripts of the examples."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mindspeed_mm.cli import main as mm
from mindspeed_mm.cli.mm_convert import CONVERTERS, run
from mindspeed_mm.core.errors import MMError, ModelFolderError, UsageError
from mindspeed_mm.tasks.convert import convert
from tests.helpers.conversion_scripts import run_script
from tests.helpers.generator_weights import same, small_model


def weights(folder: Path, stem: str = "diffusion_pytorch_model") -> dict[str, torch.Tensor]:
    """Read with safetensors alone."""
    return load_file(folder / f"{stem}.safetensors")


@pytest.mark.parametrize(("name", "case"), [("wan2.1", "Wan"), ("vace", "VACE")])
def test_scripts_from_diffusers_and_back(name: str, case: str, tmp_path: Path) -> None:
    small_model(case).save_pretrained(tmp_path / "transformer")
    done = run_script(name, tmp_path / "transformer", tmp_path / "out", scratch=tmp_path / "scratch")
    assert done == ["hf_to_mm", "mm_to_hf", "hf_to_source"]
    same(weights(tmp_path / "out/hf"), weights(tmp_path / "transformer"))
    assert "blocks.0.self_attn.q.weight" in weights(tmp_path / "out/original")
    assert json.loads((tmp_path / "out/original/config.json").read_text())["num_layers"] == 4


def test_the_script_of_wan_2_2_converts_both_transformers_in_stages(tmp_path: Path) -> None:
    for folder in ("transformer", "transformer_2"):
        small_model("Wan").save_pretrained(tmp_path / "pipeline" / folder)
    place = tmp_path / "out"
    done = run_script("wan2.2", tmp_path / "pipeline", place, scratch=tmp_path / "scratch", PP_LAYERS="[1,3]")
    assert done == ["hf_to_mm", "mm_to_hf", "hf_to_source"] * 2
    assert (place / "mm/transformer_2/release/mp_rank_00_001/model_optim_rng.pt").is_file()
    same(weights(place / "hf/transformer_2"), weights(tmp_path / "pipeline/transformer_2"))


@pytest.mark.parametrize(
    ("name", "case", "file", "environment"),
    [
        ("hunyuanvideo", "HunyuanVideo", "mp_rank_00_model_states.pt", {"TP": "2"}),
        *(
            pytest.param(*other, marks=pytest.mark.slow)
            for other in (
                ("cogvideox", "CogVideoX", "", {"TP": "2", "PP_LAYERS": "[3,1]"}),
                ("hunyuanvideo_1.5", "HunyuanVideo 1.5", "", {}),
                ("ltx2", "LTX-2", "ltx-2.safetensors", {}),
                ("flux", "FLUX.1", "flux1.safetensors", {}),
            )
        ),
    ],
)
def test_scripts_from_the_authors_files(
    name: str, case: str, file: str, environment: dict[str, str], tmp_path: Path
) -> None:
    small_model(case).save_pretrained(tmp_path / "hub")
    source, out = tmp_path / "source", tmp_path / "out"
    run(["GeneratorConverter", "hf_to_source", f"--cfg.source_path={tmp_path / 'hub'}", f"--cfg.target_path={source}"])
    run_script(name, source / file, out, scratch=tmp_path / "scratch", **environment)
    same(weights(out / "hf"), weights(tmp_path / "hub"))
    if "TP" in environment:
        assert len(list(out.glob("mm/release/mp_rank_*"))) == (2 if name == "hunyuanvideo" else 4)


def test_an_i2v_with_the_keys_of_t2v_is_what_the_person_says(tmp_path: Path) -> None:
    small_model("HunyuanVideo").save_pretrained(tmp_path / "hub")
    flags = "--cfg.source_path", str(tmp_path / "source"), "--cfg.target_path"
    run(["GeneratorConverter", "hf_to_source", f"--cfg.source_path={tmp_path / 'hub'}", *flags[2:], flags[1]])
    run(["HunyuanVideoConverter", "--version", "i2v", "source_to_hf", *flags, str(tmp_path / "i2v")])
    run(["HunyuanVideoConverter", "source_to_hf", *flags, str(tmp_path / "t2v")])
    told = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("i2v", "t2v")]
    assert [config["image_condition_type"] for config in told] == ["token_replace", None]


def test_the_script_of_lumina(tmp_path: Path) -> None:
    hub = tmp_path / "hub"
    hub.mkdir()
    save_file(
        {"model.embed_tokens.weight": torch.randn(4, 3), "lm_head.weight": torch.randn(4, 3)}, hub / "model.safetensors"
    )
    (hub / "config.json").write_text('{"model_type": "chameleon"}')
    run_script("lumina", hub, tmp_path / "out", scratch=tmp_path / "scratch")
    content = torch.load(tmp_path / "out/mm/release/mp_rank_00/model_optim_rng.pt", weights_only=True)
    same(content["model"], weights(hub, "model"))
    same(weights(tmp_path / "out/hf", "model"), weights(hub, "model"))
    assert (tmp_path / "out/hf/config.json").is_file()


def test_a_lora_is_merged_by_command(tmp_path: Path) -> None:
    small_model("Wan").save_pretrained(tmp_path / "hub")
    base = "--cfg.source_path", str(tmp_path / "mm"), "--cfg.target_path", str(tmp_path / "merged")
    run(["WanConverter", "hf2mg", f"--cfg.source_path={tmp_path / 'hub'}", f"--cfg.target_path={tmp_path / 'mm'}"])
    lora = tmp_path / "lora.safetensors"
    down, up = torch.randn(2, 16), torch.randn(16, 2)
    name = "blocks.2.self_attn.proj_k"  # MindSpeed-MM's own name
    save_file({f"{name}.lora_A.default.weight": down, f"{name}.lora_B.default.weight": up}, lora)
    words = ["WanConverter", "merge_lora_to_base", *base, "--cfg.lora_path", str(lora), "--lora_alpha", "16"]
    run([*words, "--lora_rank", "2"])
    before = weights(tmp_path / "hub")["blocks.2.attn1.to_k.weight"].double()
    held = torch.load(tmp_path / "merged/release/mp_rank_00/model_optim_rng.pt", weights_only=True)["model"]
    by_hand = before + 8 * up.double() @ down.double()
    torch.testing.assert_close(held[f"{name}.weight"].double(), by_hand, rtol=1e-6, atol=1e-5)
    with pytest.raises(UsageError, match=r"is 8, and the adapter.s blocks\.2\.self_attn\.proj_k has rank 2"):
        run([*words[:-2], "--lora_alpha", "16", "--lora_rank", "8"])


def test_a_wrong_converter_subcommand_or_version_names_the_right_one(tmp_path: Path) -> None:
    small_model("CogVideoX").save_pretrained(tmp_path / "hub")
    flags = [f"--cfg.source_path={tmp_path / 'hub'}", f"--cfg.target_path={tmp_path / 'out'}"]
    for words, message in (
        (["WanConverter", "hf_to_mm"], "holds CogVideoX, and WanConverter takes Wan"),
        (["CogVideoConverter", "source_to_mm"], "Use hf_to_mm or hf_to_source"),
        (["CogVideoConverter", "--version", "i2v", "hf_to_mm"], "is i2v, and the weights are CogVideoX 1.0 T2V"),
        (["CogVideoConverter", "--version", "x2v", "hf_to_mm"], "--version"),
        (["WanConverter", "--version", "t2v", "hf_to_mm"], "unknown flag '--version'"),
        (["CogVideoConverter", "mm_to_hf", "--cfg.target_parallel_config.ep_size=2"], "has no experts"),
        (["OpenSoraPlanConverter", "--version", "v1.2", "hf_to_mm"], "Open-Sora Plan v1.2 is not built"),
        (
            ["OpenSoraPlanConverter", "--version", "v1.3", "hf_to_mm"],
            "holds CogVideoX, and OpenSoraPlanConverter takes",
        ),
        (["StepVideoConverter", "hf_to_mm"], "holds CogVideoX, and StepVideoConverter takes Step-Video"),
        (["OpenSoraConverter", "hf_to_mm"], "is planned"),
    ):
        with pytest.raises(MMError, match=message):
            run([*words, *flags])
    assert not (tmp_path / "out").exists()


def test_a_truncated_rank_is_refused(tmp_path: Path) -> None:
    small_model("Wan").save_pretrained(tmp_path / "hub")
    run(["WanConverter", "hf_to_mm", f"--cfg.source_path={tmp_path / 'hub'}", f"--cfg.target_path={tmp_path / 'mm'}"])
    file = tmp_path / "mm/release/mp_rank_00/model_optim_rng.pt"
    file.write_bytes(file.read_bytes()[:-2000])
    with pytest.raises(MMError, match="broken"):
        run(["WanConverter", "mm_to_hf", f"--cfg.source_path={tmp_path / 'mm'}", f"--cfg.target_path={tmp_path / 'x'}"])


def test_every_converter_of_the_documents_is_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    run(["--help"])
    told = capsys.readouterr().out
    planned = ("OpenSoraConverter",)
    built = (
        "OpenSoraPlanConverter",
        "WanConverter",
        "VACEConverter",
        "CogVideoConverter",
        "HunyuanVideoConverter",
        "LuminaConverter",
        "BagelConverter",
        "MingConverter",
        "StepVideoConverter",
    )
    assert all(name in CONVERTERS for name in built)
    assert all(name in told for name in (*built, *planned))


def test_the_weights_of_no_family_are_refused(tmp_path: Path) -> None:
    save_file({"a.weight": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelFolderError, match="none of VACE, Wan"):
        run(["GeneratorConverter", "source_to_hf", f"--cfg.source_path={tmp_path}", f"--cfg.target_path={tmp_path}/x"])


def test_mm_convert_recognises_the_weights_and_the_layout(tmp_path: Path) -> None:
    small_model("LTX-Video").save_pretrained(tmp_path / "hub")
    assert convert.run(tmp_path / "hub", tmp_path / "original", "original")[0] == "generator"
    file = tmp_path / "original/ltx-video.safetensors"
    assert convert.run(file, tmp_path / "back", "diffusers")[0] == "generator"
    same(weights(tmp_path / "back"), weights(tmp_path / "hub"))


def convert_by_command(source: Path, target: Path, *words: str) -> int:
    return mm.run(["convert", str(source), str(target), *words])


def test_mm_convert_takes_wan_to_every_layout_and_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small_model("Wan").save_pretrained(tmp_path / "hub")
    assert convert_by_command(tmp_path / "hub", tmp_path / "original", "--to", "original") == 0
    assert convert_by_command(tmp_path / "original", tmp_path / "from_original", "--to", "diffusers") == 0
    assert convert_by_command(tmp_path / "hub", tmp_path / "mm", "--to", "megatron") == 0
    assert "from a folder of kind 'generator'" in capsys.readouterr().out
    held = torch.load(tmp_path / "mm/release/mp_rank_00/model_optim_rng.pt", weights_only=True)["model"]
    before = weights(tmp_path / "hub")
    assert torch.equal(held["blocks.3.self_attn.proj_q.weight"], before["blocks.3.attn1.to_q.weight"])
    assert convert_by_command(tmp_path / "mm", tmp_path / "again", "--to", "megatron") == 0
    assert convert_by_command(tmp_path / "again", tmp_path / "from_mm") == 0  # hf, which of a generator is diffusers
    assert convert_by_command(tmp_path / "original", tmp_path / "mm_of_original", "--to", "megatron") == 0
    assert convert_by_command(tmp_path / "mm_of_original", tmp_path / "third", "--to", "diffusers") == 0
    for name in ("from_original", "from_mm", "third"):
        same(weights(tmp_path / name), before)
    capsys.readouterr()
    assert convert_by_command(tmp_path / "third", tmp_path / "third", "--to", "original") == 0
    assert f"the original is kept as {tmp_path / 'third.bak'}" in capsys.readouterr().out
    same(weights(tmp_path / "third.bak"), before)


@pytest.mark.parametrize("averaged", [True, False])
def test_mm_convert_reads_the_students_of_self_forcing(averaged: bool, tmp_path: Path) -> None:
    """`generator` beside a critic, under the names of a wrapper and of FSDP; the average where there is one."""
    small_model("Wan").save_pretrained(tmp_path / "hub")
    assert convert_by_command(tmp_path / "hub", tmp_path / "original", "--to", "original") == 0
    stored = load_file(next((tmp_path / "original").glob("*.safetensors")))
    trained, average = {}, {}
    for name, value in stored.items():
        trained[f"model.{name}"] = value
        wrapped = name.replace("blocks.0.", "blocks.0._fsdp_wrapped_module._checkpoint_wrapped_module.")
        average[f"model.{wrapped}"] = value + 1
    content = {"generator": trained, "critic": {f"model.{name}": value - 1 for name, value in stored.items()}}
    torch.save({**content, "generator_ema": average} if averaged else content, tmp_path / "ode_init.pt")
    words = ("--to", "diffusers", "--model", str(tmp_path / "hub"))
    assert convert_by_command(tmp_path / "ode_init.pt", tmp_path / "out", *words) == 0
    same(weights(tmp_path / "out"), {name: value + averaged for name, value in weights(tmp_path / "hub").items()})


def test_mm_convert_takes_the_configuration_of_a_generator_from_the_model_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """MindSpeed-MM's folder of another program: no layout.json, no config.json; of a width that no release has."""
    model = small_model("Wan")
    model.save_pretrained(tmp_path / "hub/transformer")
    assert convert_by_command(tmp_path / "hub/transformer", tmp_path / "mm", "--to", "megatron") == 0
    for name in ("release/layout.json", "config.json"):
        (tmp_path / "mm" / name).unlink()
    assert convert_by_command(tmp_path / "mm", tmp_path / "out", "--to", "diffusers") == 4
    assert "--model" in capsys.readouterr().err
    model_folder = "--model", str(tmp_path / "hub")
    assert convert_by_command(tmp_path / "mm", tmp_path / "out", "--to", "diffusers", *model_folder) == 0
    same(weights(tmp_path / "out"), weights(tmp_path / "hub/transformer"))
    texts = [(tmp_path / name / "config.json").read_text() for name in ("out", "hub/transformer")]
    assert json.loads(texts[0]) == json.loads(texts[1])
    assert convert_by_command(tmp_path / "mm", tmp_path / "again", "--to", "megatron", *model_folder) == 0
    for name, told in (
        ("nowhere", "does not exist. Relative paths start at"),
        ("mm", "has no config.json. Name a diffusers folder"),
    ):
        assert convert_by_command(tmp_path / "mm", tmp_path / "x", "--model", str(tmp_path / name)) == 4
        assert f"{tmp_path / name}  {told}" in capsys.readouterr().err
    (tmp_path / "other").mkdir()
    (tmp_path / "other/config.json").write_text('{"model_type": "qwen3"}')
    assert convert_by_command(tmp_path / "mm", tmp_path / "x", "--model", str(tmp_path / "other")) == 4
    assert "config.json  _class_name  is missing: it is not a configuration of diffusers" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_mm_convert_divides_a_generator_as_its_family_can_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for case in ("Wan", "VACE", "HunyuanVideo"):
        small_model(case).save_pretrained(tmp_path / case)
    place = tmp_path / "mm"
    assert convert_by_command(tmp_path / "Wan", place, "--to", "megatron", "--pp", "3") == 0
    layers = [
        {name.split(".")[1] for name in torch.load(file, weights_only=True)["model"] if name.startswith("blocks.")}
        for file in sorted(place.glob("release/mp_rank_00_00*/model_optim_rng.pt"))
    ]
    assert list(map(len, layers)) == [2, 1, 1]  # of four blocks
    assert convert_by_command(place, tmp_path / "again", "--to", "megatron", "--pp", "2", "--vpp", "2") == 0
    layout = json.loads((tmp_path / "again/release/layout.json").read_text())
    assert layout["llm_pp_layers"] == [[1, 1], [1, 1]]
    assert convert_by_command(tmp_path / "again", tmp_path / "back", "--model", str(tmp_path / "Wan")) == 0
    same(weights(tmp_path / "back"), weights(tmp_path / "Wan"))
    for case, words, told in (
        (
            "Wan",
            ["--tp", "2"],
            "--tp  MindSpeed-MM's Wan is not divided by tensor parallelism, and tp_size is 2. Leave it",
        ),
        ("Wan", ["--pp", "5"], "--pp  5 stages × 1 chunks are more than the model's 4 layers. Take fewer"),
        ("Wan", ["--ep", "2"], "--ep  a generator has no experts. Leave it out."),
        ("VACE", ["--pp", "2"], "--pp  MindSpeed-MM's VACE is not divided into stages, and 2 stages × 1 chunks is"),
        ("HunyuanVideo", ["--pp", "2"], "Leave it out, and divide it by tensor parallelism."),
    ):
        capsys.readouterr()
        assert convert_by_command(tmp_path / case, tmp_path / "x", "--to", "megatron", *words) == 2
        assert told in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_a_pipeline_of_two_transformers_asks_which_is_meant(tmp_path: Path) -> None:
    for folder in ("transformer", "transformer_2"):
        small_model("Wan").save_pretrained(tmp_path / "hub" / folder)
    (tmp_path / "hub/model_index.json").write_text("{}")
    for target in ("original", "megatron"):
        with pytest.raises(UsageError, match="holds two transformers"):
            convert.run(tmp_path / "hub", tmp_path / "out", target)  # type: ignore[arg-type]
