"""`mm schema`."""

import json

import pytest

from mindspeed_mm.cli.main import run


def test_one_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["schema", "training.lora.rank"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "training.lora.rank: whole number, at least 1 = 8",
        "    Rank of the adapter matrices.",
    ]


@pytest.mark.edge("BU7")
def test_a_list_of_choices_spells_them(capsys: pytest.CaptureFixture[str]) -> None:
    run(["schema", "training.report_to"])
    assert capsys.readouterr().out.startswith(
        "training.report_to: list of tensorboard | wandb | swanlab | mlflow | trackio = "
    )


def test_a_section_lists_its_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["schema", "tools.profile"]) == 0
    text = capsys.readouterr().out
    assert "tools.profile.static_param.level: " in text
    assert "Other names: tools.profiler." in text
    assert "tools.memory_profile" not in text


@pytest.mark.edge("U7")
def test_says_what_this_version_takes(capsys: pytest.CaptureFixture[str]) -> None:
    run(["schema", "model.checkpoint_path"])
    assert "This version takes only null." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("streaming", "takes only false unless dataset_type is huggingface or a plugin's."),
        ("mix", "takes only null unless dataset_type is huggingface or generation or bagel or a plugin's."),
    ],
)
def test_says_which_data_sets_take_more(key: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    run(["schema", f"data.dataset_param.basic_parameters.{key}"])
    assert says in capsys.readouterr().out


@pytest.mark.edge("U7")
def test_two_ways_to_build_on_adapters_name_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    ways = ("pretrained_lora_path", "frozen_adapters")
    for own, other in (ways, ways[::-1]):
        run(["schema", f"training.lora.{own}"])
        assert f"`{other}`" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("trainimg.lr", "Did you mean training.lr"),
        ("lrr", "Did you mean training.lr?"),
        ("tools.profiler", "It is tools.profile."),
        ("model.use_triton_gdn", "It is read: true as model.gdn_implementation: 'triton', false as"),
        ("zzzzzzzz", "Sections: model, data"),
    ],
)
def test_no_such_key(key: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["schema", key]) == 2
    assert message in capsys.readouterr().err


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["schema", "training.lr", "--json"]) == 0
    (entry,) = json.loads(capsys.readouterr().out)
    assert (entry["key"], entry["default"]) == ("training.lr", "5e-05")
    assert run(["schema", "--json"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert set(schema["properties"]) >= {"model", "data", "parallel", "training", "features", "tools"}
