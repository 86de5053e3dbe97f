"""`mm init` writes a YAML that passes the check and trains; what fits is chosen by the forecast of memory."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from mindspeed_mm.core.errors import ConfigError, UsageError
from mindspeed_mm.tasks.init import init
from mindspeed_mm.tasks.init.init import Way
from mindspeed_mm.tasks.init.row_settings import BASIC
from mindspeed_mm.tasks.requests.init import InitRequest
from tests.helpers.runs import mm
from tests.helpers.tiny_generators import make_tiny_flux
from tests.helpers.tiny_models import make_tiny_gemma2, make_tiny_qwen3_vl, without_template
from tests.helpers.tiny_run import make_rows

GIB = 2**30


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_qwen3_vl(tmp_path_factory.mktemp("models") / "mine")


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    make_rows(tmp_path / "data", count=20, images=(1,))
    return tmp_path


def forecasts(monkeypatch: pytest.MonkeyPatch, peak: Callable[[Way], float]) -> list[dict[str, Any]]:
    """Forecasts that a test gives, in GiB; the configurations that were asked about."""
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(init._Setup, "count_rows", lambda _: 1000)

    def forecast(sections: dict[str, Any], _devices: int, _overrides: Sequence[str]) -> int:
        asked.append(sections)
        lora = sections["training"].get("lora", {})
        method: Any = "full" if not lora else "qlora" if "quantize" in lora else "lora"
        way = Way(method, "features" in sections, sections["training"]["micro_batch_size"])
        return int(peak(way) * GIB)

    monkeypatch.setattr(init, "_peak", forecast)
    return asked


def every_way_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the settings of rows and folders are what is tested: `mm check` is asked about what is written."""
    monkeypatch.setattr(init, "_peak", lambda *_: GIB)


def test_what_is_written_passes_the_check_and_trains(model: Path, work: Path) -> None:
    said = mm("init", "--model", str(model), "--data", "data/rows.jsonl", "--gpu", "24", "--json")
    assert said.code == 0, said.err
    told = json.loads(said.out)
    assert (told["way"]["method"], told["way"]["rows"], told["rows"], told["devices"]) == ("full", 8, 20, 1)
    assert 0 < told["peak_bytes"] < told["device_bytes"] == 24 * GIB
    assert mm("check", "run.yaml").code == 0
    assert mm("train", "run.yaml", "training.train_iters=2", "parallel.fsdp_plan.param_dtype=null").code == 0
    assert (work / "runs" / "run" / "metrics.jsonl").is_file()
    script = (work / "run.sh").read_text()
    assert "mm train run.yaml --nproc 1" in script
    assert subprocess.run(["bash", "-n", "run.sh"], check=False).returncode == 0


@pytest.mark.parametrize(
    ("peak", "expected"),
    [
        (lambda way: 10.0, Way("full", False, 8)),
        (lambda way: 10.0 if way.recompute else 40.0, Way("full", True, 8)),
        (lambda way: way.rows * (2.0 if way.recompute else 9.0), Way("full", True, 8)),
        (lambda way: way.rows * 10.0, Way("full", False, 2)),
        (lambda way: 40.0 if way.method == "full" else 10.0, Way("lora", False, 8)),
        (lambda way: 10.0 if way.method == "qlora" else 40.0, Way("qlora", False, 8)),
        (lambda way: 21.0 if way == Way("qlora", True, 1) else 22.0, Way("qlora", True, 1)),  # room is left
    ],
)
def test_the_best_way_that_fits_is_chosen(
    model: Path, work: Path, monkeypatch: pytest.MonkeyPatch, peak: Callable[[Way], float], expected: Way
) -> None:
    forecasts(monkeypatch, peak)
    made = init.run(InitRequest(model=model, data=Path("data/rows.jsonl"), gpu=24.0, devices=4))
    assert made.way == expected and made.devices == 4
    written = yaml.safe_load((work / "run.yaml").read_text())
    training = written["training"]
    assert training["micro_batch_size"] == expected.rows
    assert training["gradient_accumulation_steps"] == max(1, 16 // (expected.rows * 4))
    assert ("lora" in training, written.get("features")) == (
        expected.method != "full", {"recompute": True} if expected.recompute else None
    )  # fmt: skip
    assert training.get("lora", {}).get("quantize") == ("nf4" if expected.method == "qlora" else None)
    assert mm("check", "run.yaml", "--config-only").code == 0


def test_the_text_says_what_was_tried(model: Path, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The YAML is the configuration that was checked, key by key, beside validation and intervals."""
    asked = forecasts(monkeypatch, lambda way: 10.0 if way.recompute else 40.0)
    init.run(InitRequest(model=model, data=Path("data/rows.jsonl"), gpu=24.0))
    written = yaml.safe_load((work / "run.yaml").read_text())
    chosen = [each for each in asked if each["training"]["micro_batch_size"] == 8 and "features" in each][-1]
    training, basic = written["training"], written["data"]["dataset_param"]["basic_parameters"]
    assert (training.pop("save_interval"), training.pop("val_interval"), basic.pop("val_rate")) == (6, 6, 0.02)
    assert written == chosen


def test_few_rows_make_small_steps(model: Path, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forecasts(monkeypatch, lambda way: 10.0)
    monkeypatch.setattr(init._Setup, "count_rows", lambda _: 5)
    made = init.run(InitRequest(model=model, data=Path("data/rows.jsonl"), gpu=24.0, devices=2))
    training = yaml.safe_load((work / "run.yaml").read_text())["training"]
    assert (made.way.rows, training["gradient_accumulation_steps"], training["save_interval"]) == (2, 1, 1)


@pytest.mark.parametrize("name", ["my $HOME rows", "2024", "true", "it's", 'a "b"', "1e5", "a: b # c", "new\nline"])
def test_paths_are_read_back_as_they_are(model: Path, work: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    forecasts(monkeypatch, lambda way: 10.0)
    (work / name).mkdir()
    (work / "data").rename(work / name / "data")
    out = Path(name) / "run.yaml"
    monkeypatch.chdir(work / name)
    init.run(InitRequest(model=model, data=Path("data") / "rows.jsonl", gpu=24.0))
    monkeypatch.chdir(work)
    init.run(InitRequest(model=model, data=Path(name), gpu=24.0, out=out, overwrite=True))
    basic = yaml.safe_load(out.read_text())["data"]["dataset_param"]["basic_parameters"]
    assert (basic["dataset"], basic["dataset_dir"]) == (name, name)
    words = subprocess.run(
        ["bash", "-c", 'mm() { printf "%s\\0" "$@"; }; source "$0"', str(out.with_suffix(".sh"))],
        capture_output=True, text=True, check=True,
    ).stdout.split("\0")  # fmt: skip
    assert words[1] == str(out)


def test_commands_that_are_told_can_be_copied(model: Path, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Words are split as a shell does it, and the files are there."""
    every_way_fits(monkeypatch)
    said = mm("init", "--model", str(model), "--data", "data/rows.jsonl", "--gpu", "24", "--out", "my first run.yaml")
    assert said.code == 0, said.err
    preview, start = said.out.partition("next: ")[2].strip().split(", then ")
    assert shlex.split(preview) == ["mm", "data", "preview", "my first run.yaml"]
    assert shlex.split(start) == ["bash", "my first run.sh"] and (work / "my first run.sh").is_file()


def test_a_given_number_of_steps_takes_the_place_of_epochs(
    model: Path, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    every_way_fits(monkeypatch)
    request = InitRequest(("training.train_iters=50",), model=model, data=Path("data/rows.jsonl"), gpu=24.0)
    init.run(request)
    training = yaml.safe_load((work / "run.yaml").read_text())["training"]
    assert training["train_iters"] == 50 and "train_epochs" not in training and training["save_interval"] == 5
    assert "of about 50 steps" in (work / "run.yaml").read_text()


def test_nothing_fits(model: Path, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forecasts(monkeypatch, lambda way: 40.0)
    with pytest.raises(ConfigError, match=r"full and lora and qlora need more than 24\.00 GiB a device"):
        init.run(InitRequest(model=model, data=Path("data/rows.jsonl"), gpu=24.0))
    assert not (work / "run.yaml").exists() and not (work / "run.sh").exists()


def test_files_that_are_there_stay(model: Path, work: Path) -> None:
    (work / "run.sh").write_text("mine")
    with pytest.raises(UsageError, match=r"run\.sh.*is there already"):
        init.run(InitRequest(model=model, data=Path("data/rows.jsonl"), gpu=24.0))
    assert (work / "run.sh").read_text() == "mine" and not (work / "run.yaml").exists()


def test_problems_are_those_of_the_options(model: Path, work: Path) -> None:
    said = mm("init", "--model", "nowhere", "--data", "data/none.jsonl", "--gpu", "24")
    assert said.code != 0 and "--model" in said.err and "Traceback" not in said.err
    said = mm("init", "--model", str(model), "--data", "data/none.jsonl", "--gpu", "24")
    assert said.code != 0 and "none.jsonl" in said.err and not (work / "run.yaml").exists()


def test_generators_get_their_size_and_adapters(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flux = make_tiny_flux(work / "flux")
    (work / "pictures").mkdir()
    for number in range(3):
        (work / "pictures" / f"{number}.png").write_bytes((work / "data" / "images" / f"{number}_0.png").read_bytes())
        (work / "pictures" / f"{number}.txt").write_text("a cat")
    forecasts(monkeypatch, lambda way: 10.0)
    made = init.run(InitRequest(model=flux, data=Path("pictures"), gpu=24.0))
    written = yaml.safe_load((work / "run.yaml").read_text())
    assert made.way == Way("lora", False, 1) and made.rows == 1000
    param = written["data"]["dataset_param"]
    assert param["dataset_type"] == "generation" and param["preprocess_parameters"] == {"max_pixels": 2**20}
    assert mm("check", "run.yaml", "--config-only").code == 0


@pytest.mark.parametrize("method", ["full", "lora"])
def test_rows_with_a_better_and_a_worse_answer_are_trained_by_dpo(
    model: Path, work: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    asked = forecasts(monkeypatch, lambda way: 10.0)
    turns = {"messages": [{"role": "user", "content": "one?"}, {"role": "assistant", "content": "two"}]}
    (work / "pairs.jsonl").write_text(json.dumps(turns | {"rejected_response": "three"}) + "\n")
    init.run(InitRequest(model=model, data=Path("pairs.jsonl"), gpu=24.0, method=method))
    written = yaml.safe_load((work / "run.yaml").read_text())
    assert written["posttrain"] == {"method": "dpo"} == asked[-1]["posttrain"]
    assert written["data"]["dataset_param"]["basic_parameters"]["stage"] == "rm"
    assert written["training"]["lr"] == (1e-6 if method == "full" else 5e-6)
    assert mm("check", "run.yaml", "--config-only").code == 0


# --- folders without a chat template ----------------------------------------------------------------------------------


def basics_of(yaml_file: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(yaml_file.read_text())["data"]["dataset_param"]["basic_parameters"]
    return found


def test_a_folder_without_a_chat_template_gets_one_with_its_tokens(
    model: Path, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    every_way_fits(monkeypatch)
    base = without_template(work / "base", model)
    said = mm("init", "--model", "base", "--data", "data/rows.jsonl", "--gpu", "24")
    assert said.code == 0, said.err
    assert basics_of(work / "run.yaml")["template"] == "qwen3_vl"
    assert "template: qwen3_vl   # the folder has no chat template" in (work / "run.yaml").read_text()
    assert "template: qwen3_vl (the folder has no chat template" in said.out
    assert mm("check", "run.yaml").code == 0
    assert mm("init", "--model", str(model), "--data", "data/rows.jsonl", "--gpu", "24", "--overwrite").code == 0
    assert "template" not in basics_of(work / "run.yaml")
    assert base.is_dir()


@pytest.mark.parametrize("has_template", [True, False])
def test_documents_are_pre_trained_on(
    model: Path, work: Path, monkeypatch: pytest.MonkeyPatch, has_template: bool
) -> None:
    """Also where the folder has a chat template: such rows have no turns."""
    every_way_fits(monkeypatch)
    folder = model if has_template else without_template(work / "base", model)
    long = " ".join(map(str, range(3000)))
    rows = [{"text": f"{n} is a number."} for n in range(20)] + [{"text": long}]
    (work / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = mm("init", "--model", str(folder), "--data", "text.jsonl", "--gpu", "24")
    assert said.code == 0, said.err
    assert basics_of(work / "run.yaml")["stage"] == "pretrain"
    assert "stage: pretrain   # documents, which have no turns" in (work / "run.yaml").read_text()
    assert "truncation: split" in (work / "run.yaml").read_text() and "truncation: split" in said.out
    assert mm("check", "run.yaml").code == 0
    assert mm("train", "run.yaml", "training.train_iters=1", "training.save=null").code == 0
    (work / "long.jsonl").write_text((json.dumps({"text": long}) + "\n") * 20)
    words = (f"{BASIC}.truncation=error", f"{BASIC}.dataset=long.jsonl", "training.save=null")
    refused, checked = mm("train", "run.yaml", *words), mm("data", "check", "run.yaml", *words)
    assert refused.code == 4 and "truncation: split, which cuts documents" in refused.err, refused.err
    assert checked.code == 4 and "truncation=split cuts documents into pieces" in checked.out


def test_documents_and_conversations_together_are_no_documents(
    model: Path, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    every_way_fits(monkeypatch)
    write_text_turns(work / "mixed.jsonl")
    rows = json.dumps({"text": "seven is a number."}) + "\n" + (work / "mixed.jsonl").read_text()
    (work / "mixed.jsonl").write_text(rows)
    assert mm("init", "--model", str(model), "--data", "mixed.jsonl", "--gpu", "24").code == 0
    assert "stage" not in basics_of(work / "run.yaml")
    assert mm("check", "run.yaml").code == 0


def write_text_turns(path: Path) -> None:
    turns = [{"role": "user", "content": "one?"}, {"role": "assistant", "content": "two"}]
    path.write_text((json.dumps({"messages": turns}) + "\n") * 20)


def test_a_tokenizer_without_marks_of_turns_gets_the_plain_format(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = without_template(work / "base", make_tiny_gemma2(work / "gemma2"))
    content = (base / "tokenizer.json").read_text().replace("<|im_start|>", "<|turn|>")
    (base / "tokenizer.json").write_text(content)
    settings = (base / "tokenizer_config.json").read_text().replace("<|im_start|>", "<|turn|>")
    (base / "tokenizer_config.json").write_text(settings)
    write_text_turns(work / "turns.jsonl")
    forecasts(monkeypatch, lambda way: 10.0)
    init.run(InitRequest(model=base, data=Path("turns.jsonl"), gpu=24.0))
    assert basics_of(work / "run.yaml")["template"] == "default"


def test_pictures_that_no_format_writes_are_refused_with_what_can_be_given(
    model: Path, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = without_template(work / "base", model)
    with monkeypatch.context() as patch:
        patch.setattr("mindspeed_mm.tasks.init.row_settings.FORMATS", {"default": "text"})
        said = mm("init", "--model", str(base), "--data", "data/rows.jsonl", "--gpu", "24")
    assert said.code == 2 and "no built-in format writes its placeholders of media" in said.err
    assert "--model" in said.err and f"{BASIC}.chat_template=FILE" in said.err
    (jinja,) = model.glob("chat_template*.jinja")
    words = ["--model", str(base), "--data", "data/rows.jsonl", "--gpu", "24", f"{BASIC}.chat_template={jinja}"]
    every_way_fits(monkeypatch)
    assert mm("init", *words).code == 0 and "template" not in basics_of(work / "run.yaml")
    assert basics_of(work / "run.yaml")["chat_template"] == str(jinja)
    assert mm("check", "run.yaml").code == 0


# --- keys beside the options ------------------------------------------------------------------------------------------


def test_keys_that_are_given_are_checked_and_written(model: Path, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = (f"{BASIC}.cutoff_len=2048", "training.lr=3e-5", "training={weight_decay: 0.1, seed: 7}")
    request = InitRequest(words, model=model, data=Path("data/rows.jsonl"), gpu=24.0)
    seen: list[Any] = []

    def forecast(_sections: dict[str, Any], _devices: int, overrides: Sequence[str]) -> int:
        seen.append(overrides)
        return GIB

    monkeypatch.setattr(init, "_peak", forecast)
    init.run(request)
    written = yaml.safe_load((work / "run.yaml").read_text())
    training = written["training"]
    assert (float(training["lr"]), training["weight_decay"], training["seed"]) == (3e-5, 0.1, 7)
    assert training["micro_batch_size"] == 8 and basics_of(work / "run.yaml")["cutoff_len"] == 2048
    assert set(seen) == {words}
    assert "# 20 rows" in (work / "run.yaml").read_text()  # comments stay
    assert mm("check", "run.yaml", "--config-only").code == 0


@pytest.mark.parametrize(
    ("word", "way_out"),
    [
        ("model.model_name_or_path=x", "Give it as --model"),
        ("training={lora: {rank: 4}}", "--method"),
        ("training.micro_batch_size=4", "in the YAML afterwards"),
    ],
)
def test_keys_that_are_chosen_here_are_refused_with_the_option(
    model: Path, work: Path, word: str, way_out: str
) -> None:
    said = mm("init", "--model", str(model), "--data", "data/rows.jsonl", "--gpu", "24", word)
    assert said.code == 2 and "is set by mm init" in said.err and way_out in said.err
    assert not (work / "run.yaml").exists()


def test_a_key_that_a_problem_names_can_be_given(model: Path, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here a column that no format knows."""
    turns = [{"role": "user", "content": "one?"}, {"role": "assistant", "content": "two"}]
    (work / "named.jsonl").write_text((json.dumps({"talk": turns}) + "\n") * 20)
    words = ["init", "--model", str(model), "--data", "named.jsonl", "--gpu", "24"]
    said = mm(*words)
    key = "data.dataset_param.attr.messages"
    assert said.code != 0 and key in said.err
    every_way_fits(monkeypatch)
    assert mm(*words, f"{key}=talk").code == 0
    assert mm("check", "run.yaml").code == 0
