"""docs/posttrain_coming_from.md: what its tables name exists on both sides, and its commands run."""

from __future__ import annotations

import dataclasses
import re
import shlex
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from mindspeed_mm.cli.main import run
from mindspeed_mm.core.config_path import value_at
from mindspeed_mm.fsdp.params.argument import Arguments
from mindspeed_mm.provider.entry_flags import entry_flags
from mindspeed_mm.provider.flags import by_spelling
from mindspeed_mm.tasks.config import run_flags
from mindspeed_mm.tasks.dancegrpo.run import configuration, read_flags
from tests.helpers.tiny_pairs import make_tiny_pairs

PAGE = (Path(__file__).parents[1] / "docs" / "posttrain_coming_from.md").read_text(encoding="utf-8")
OF_TRL, _, REST = PAGE.partition("\n## From scripts with flags")
OF_FLAGS, _, _ = REST.partition("\n## Under verl")
OF_OTHERS = {"rpo_alpha", "simpo_gamma", "ref_model", "target_modules", "lora_alpha", "r"}
"""Of older releases, of other trainers, of PEFT, and an argument of the trainer."""


def table(text: str) -> list[tuple[str, str]]:
    """The rows of the table in a part of the page."""
    rows = [line.strip("|").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return [(left.strip(), " | ".join(right).strip()) for left, *right in rows[1:]]


def named(text: str) -> list[str]:
    return re.findall(r"`([^`]*)`", text)


@pytest.mark.parametrize(("theirs", "ours"), table(OF_TRL) + table(OF_FLAGS))
def test_our_keys_exist(theirs: str, ours: str) -> None:
    keys = [name.partition(":")[0] for name in named(ours) if re.fullmatch(r"[a-z]+(\.[a-z_0-9]+)+(: .*)?", name)]
    keys = [key for key in keys if "preprocess_parameters" not in key]  # a data set's own
    missing = object()
    arguments = Arguments()
    assert all(value_at(arguments, key, missing) is not missing for key in keys), keys
    if "the same under" in ours:
        for name in named(theirs):
            assert value_at(arguments, f"{keys[0]}.{name}", missing) is not missing, name


def test_settings_of_trl_exist() -> None:
    from mindspeed_mm.fsdp.utils.torchvision_guard import prepare_for_transformers

    prepare_for_transformers()
    from trl import DPOConfig, GRPOConfig

    known = {field.name for config in (DPOConfig, GRPOConfig) for field in dataclasses.fields(config)}
    told = [name for theirs, _ in table(OF_TRL)[1:] for name in named(theirs) if re.fullmatch(r"[a-z_]+", name)]
    assert len(told) > 40
    assert set(told) - known <= OF_OTHERS | {"reward_funcs"}


def test_flags_of_scripts_exist() -> None:
    known = set(by_spelling()) | set(entry_flags("posttrain_flux_dancegrpo").parser._option_string_actions)
    told = [name for theirs, _ in table(OF_FLAGS) for name in named(theirs) if name.startswith("--")]
    assert len(told) > 15 and set(told) <= known


def test_its_json_files_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    pairs_data, pairs_model, dance_data, dance_model = re.findall(r"```json\n(.*?)```", OF_FLAGS, flags=re.DOTALL)
    Path("data.json").write_text(pairs_data)
    Path("model.json").write_text(pairs_model)
    words = "--lr 1e-5 --train-iters 1 --micro-batch-size 1 --mm-data data.json --mm-model model.json"
    translated = run_flags(["torchrun", "posttrain_sora_dpo.py", *words.split()], {})
    arguments = translated.arguments
    assert arguments.data.dataset_param.preprocess_parameters["height"] == 480
    assert arguments.model.model_name_or_path == "weights/Wan2.1-T2V-1.3B-Diffusers"
    assert (arguments.posttrain.dpo.beta, arguments.posttrain.dpo.timestep_weight) == (2000, "sigma")
    assert not translated.notes
    Path("data.json").write_text(dance_data)
    Path("model.json").write_text(dance_model)
    flags = "--load flux --save out --mm-data data.json --mm-model model.json --train-iters 1 --h 8 --w 8"
    flags += " --sampling_steps 4 --eta 0.3 --use_group --use_hpsv2"
    made = configuration(read_flags(flags.split()).options)
    assert made["data"]["dataset_param"]["basic_parameters"]["dataset"] == "data/videos2caption.json"
    assert made["posttrain"]["rewards"][0]["settings"]["path"] == "weights/hps/HPS_v2.1_compressed.pt"


@pytest.mark.slow
def test_its_yaml_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it stands, with a model and rows that are there."""
    monkeypatch.chdir(tmp_path)
    (text,) = re.findall(r"```yaml\n(.*?)```", OF_TRL, flags=re.DOTALL)
    content = YAML(typ="safe").load(text)
    make_tiny_pairs(tmp_path, images=(0,))
    (tmp_path / "rows.jsonl").rename(tmp_path / "pairs.jsonl")
    content["model"]["model_name_or_path"] = "model"
    content["training"] |= {"train_epochs": None, "train_iters": 1}
    with Path("run.yaml").open("w") as file:
        YAML().dump(content, file)
    opening, commands = re.findall(r"```sh\n(.*?)```", OF_TRL, flags=re.DOTALL)
    assert run(shlex.split(opening.partition(" > ")[0])[1:]) == 0
    for line in commands.splitlines():
        assert run(shlex.split(line, comments=True)[1:]) == 0, line
    assert (tmp_path / "my_model" / "config.json").is_file()
