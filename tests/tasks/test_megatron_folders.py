"""A folder in Megatron's layout answers, is measured and is exported as the model folder that it was made of."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers.runs import mm, train
from tests.helpers.tiny_run import make_tiny_run


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and beside it `divided` among two tensor ranks and two stages."""
    from mindspeed_mm.cli.mm_convert import run

    folder = tmp_path_factory.mktemp("megatron")
    make_tiny_run(folder)
    words = ["Qwen3VLMegatronConverter", "hf_to_mm", "--cfg.mm_dir", folder / "divided"]
    words += ["--cfg.hf_config.hf_dir", folder / "model", "--cfg.parallel_config.tp_size", 2]
    words += ["--cfg.parallel_config.llm_pp_layers", "[1,1]", "--cfg.parallel_config.vit_pp_layers", "[2,0]"]
    assert run([str(word) for word in words]) == 0
    return folder


@pytest.mark.edge("BN15")
def test_it_is_exported_to_the_bit(made: Path, tmp_path: Path) -> None:
    said = mm("export", made / "divided", tmp_path / "out")
    assert said.code == 0, said.err
    before, after = (load_file(folder / "model.safetensors") for folder in (made / "model", tmp_path / "out"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert not {"latest_checkpointed_iteration.txt", "layout.json"} & {
        path.name for path in (tmp_path / "out").iterdir()
    }
    assert mm("check", made / "run.yaml", f"training.load={tmp_path / 'out'}").code == 0


@pytest.mark.edge("BN15")
def test_it_answers_as_the_model_folder(made: Path) -> None:
    words = ("--prompt", "What is it like?", "--image", made / "images" / "0_0.png", "--max-new-tokens", 8)
    answers = [mm("infer", made / name, *words) for name in ("model", "divided")]
    assert [said.code for said in answers] == [0, 0], answers[1].err
    assert answers[0].out.replace(str(made / "model"), "") == answers[1].out.replace(str(made / "divided"), "")


@pytest.mark.edge("BN15")
def test_its_loss_is_that_of_the_model_folder(made: Path, tmp_path: Path) -> None:
    from mindspeed_mm.core.json_file import read_json_object

    results = []
    for name in ("model", "divided"):
        said = mm(
            "evaluate",
            made / name,
            "--data",
            made / "rows.jsonl",
            "--loss",
            "--config",
            made / "run.yaml",
            "--out",
            tmp_path / name,
        )
        assert said.code == 0, said.err
        results.append(read_json_object(tmp_path / name / "loss.json", ValueError))
        results[-1].pop("seconds")
        results[-1].pop("model")
    assert results[0] == results[1]


@pytest.mark.edge("BN15")
def test_adapters_trained_on_it_merge_answer_and_export(made: Path, tmp_path: Path) -> None:
    """As the same adapters on the model folder do, to the bit."""
    lora = [f"training.lora.{each}" for each in ("enable=true", "rank=2", "alpha=4")]
    folders = {}
    for name in ("model", "divided"):
        run, folders[name] = tmp_path / name, tmp_path / f"{name}-merged"
        train(made / "run.yaml", run, f"training.load={made / name}", "training.train_iters=2", *lora)
        assert mm("merge", run, "--out", folders[name]).code == 0
    merged = [load_file(folder / "model.safetensors") for folder in folders.values()]
    assert merged[0].keys() == merged[1].keys()
    assert all(torch.equal(merged[0][key], merged[1][key]) for key in merged[0])
    before = load_file(made / "model" / "model.safetensors")
    assert any(not torch.equal(before[key], merged[1][key]) for key in before)
    words = ("--prompt", "What is it like?", "--max-new-tokens", 8)
    assert mm("infer", tmp_path / "divided", *words).out == mm("infer", folders["model"], *words).out != ""
    said = mm("export", tmp_path / "divided", tmp_path / "adapters")
    assert said.code == 0 and f"mm convert {made / 'divided'} OUT --to hf" in said.err
    assert mm("merge", made / "divided", tmp_path / "adapters", "--out", tmp_path / "again").code == 0
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert all(torch.equal(again[key], merged[1][key]) for key in again)


@pytest.mark.parametrize(
    ("command", "way_out"),
    [
        (("infer", "--prompt", "x"), "mm export {dcp} OUT --model MODEL"),
        (("export", "{out}"), "--model FOLDER"),
        (("convert", "{out}", "--to", "hf"), "--model FOLDER"),
    ],
)
def test_a_converted_checkpoint_needs_its_model_named(
    command: tuple[str, ...], way_out: str, made: Path, tmp_path: Path
) -> None:
    """In the same words everywhere, with a way out that the command has."""
    dcp = made / "dcp"
    if not dcp.exists():
        assert mm("convert", made / "model", dcp, "--to", "dcp").code == 0
    verb, *words = (word.format(out=tmp_path / "out") for word in command)
    said = mm(verb, dcp, *words)
    assert said.code == 2
    assert "does not say which model it holds" in said.err and way_out.format(dcp=dcp) in said.err


def test_without_a_configuration_the_way_is_named(made: Path) -> None:
    said = mm("infer", made / "divided" / "release", "--prompt", "x")
    assert said.code != 0
    assert "mm convert" in said.err


def test_a_folder_is_compared_with_the_checksums_of_its_conversion(made: Path, tmp_path: Path) -> None:
    said = mm("convert", "--verify-only", made / "divided")
    assert said.code == 0
    assert re.search(r"divided: \d+ tensors, .* MiB, are what was written", said.out)
    assert mm("convert", made / "divided", "--verify-only", "--json").out.startswith('{"tensors": ')
    folder = tmp_path / "hf"
    assert mm("convert", made / "divided", folder, "--to", "hf", "--model", made / "model").code == 0
    tensors = load_file(folder / "model.safetensors")
    key = next(iter(tensors))
    save_file({**tensors, key: tensors[key] + 1}, folder / "model.safetensors")
    said = mm("convert", "--verify-only", folder)
    assert said.code == 4
    assert re.search(rf"model\.safetensors  {re.escape(key)}  is not what was written", said.err)
    (folder / "model.safetensors").unlink()
    assert "model.safetensors  is missing" in mm("convert", "--verify-only", folder).err
    said = mm("convert", "--verify-only", made / "model")
    assert said.code == 4 and "no conversion wrote it" in said.err
    assert mm("convert", "--verify-only", folder, tmp_path / "out").code == 2
    assert mm("convert", folder).code == 2


@pytest.mark.parametrize("to", ["megatron", "dcp"])
def test_a_flipped_bit_is_named_when_the_folder_is_converted_again(to: str, made: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    if to == "megatron":
        shutil.copytree(made / "divided", folder)
    else:
        assert mm("convert", made / "model", folder, "--to", "dcp").code == 0
    (file,) = sorted(folder.glob("release/mp_rank_00_001/*.pt")) or sorted(folder.glob("release/*.distcp"))
    held = bytearray(file.read_bytes())
    held[len(held) // 2] ^= 1
    file.write_bytes(held)
    said = mm("convert", folder, tmp_path / "out", "--to", "hf", "--model", made / "model")
    assert said.code == 4
    assert "conversion_manifest.json" in said.out + said.err
    assert mm("convert", "--verify-only", folder).err == said.err
    assert not (tmp_path / "out").exists()
    assert mm("convert", folder, tmp_path / "out", "--to", "hf", "--model", made / "model", "--no-verify").code == 0


@pytest.mark.edge("BN9")
@pytest.mark.parametrize("to", ["megatron", "dcp"])
def test_a_stored_tensor_without_a_place_is_refused_or_named(to: str, made: Path, tmp_path: Path) -> None:
    """And the way back of a checkpoint that has one is the same."""
    folder, out, back = tmp_path / "hf", tmp_path / "out", tmp_path / "back"
    shutil.copytree(made / "model", folder)
    weights = load_file(folder / "model.safetensors")
    save_file({**weights, "extra.head.weight": torch.ones(3)}, folder / "model.safetensors", {"format": "pt"})
    said = mm("convert", folder, out, "--to", to)
    assert said.code == 4 and not out.exists()
    assert "extra.head.weight  the model has no place for it" in said.err and "--allow-unused" in said.err
    said = mm("convert", folder, out, "--to", to, "--allow-unused")
    assert said.code == 0, said.err
    assert "not written: extra.head.weight (the model has no place for it)" in said.out
    assert mm("convert", out, back, "--to", "hf", "--model", made / "model").code == 0
    written = load_file(back / "model.safetensors")
    assert written.keys() == weights.keys() and all(torch.equal(written[key], weights[key]) for key in weights)
