"""`mm config --from`: setups of other trainers become YAMLs that the check passes and that train."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from ruamel.yaml import YAML

from mindspeed_mm.fsdp.params.loader import load_config
from tests.helpers.runs import mm
from tests.helpers.tiny_generators import make_tiny_flux, make_tiny_wan
from tests.helpers.tiny_models import make_tiny_qwen3, make_tiny_qwen3_vl
from tests.helpers.tiny_pairs import make_pairs
from tests.helpers.tiny_run import make_rows

GOLDEN = Path(__file__).parent / "golden"
CASES = sorted(
    path.name
    for path in GOLDEN.iterdir()
    if ".expected" not in path.name and not path.stem.endswith(("-data", "-clips"))
)
TOOLS = ("ai-toolkit", "axolotl", "diffusers", "kohya", "llamafactory", "ms-swift", "musubi", "trl")
CHEAP = ("llamafactory-dpo.json", "kohya-lora.toml")
"""Setups that the default run checks; the slow run checks all."""
TRAINED = (
    "llamafactory-lora.yaml", "ms-swift-dpo.sh", "axolotl-pretrain.yaml", "trl-dpo.sh", "diffusers-lora.sh",
    "kohya-lora.toml", "musubi-video.sh", "ai-toolkit-full.yaml",
)  # fmt: skip
SMALL = ["parallel.fsdp_plan.param_dtype=null", "data.dataloader_param.num_workers=0", "training.train_epochs=null"]
SMALL += ["training.train_iters=2", "training.report_to=[]"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything that the setups name."""
    root = tmp_path_factory.mktemp("setups")
    make_tiny_qwen3(root / "models" / "text")
    make_tiny_qwen3_vl(root / "models" / "vl")
    make_tiny_flux(root / "models" / "flux")
    make_tiny_wan(root / "models" / "wan")
    (root / "data").mkdir()
    make_rows(root / "data", count=20, images=(0,))
    shutil.copytree(root / "data", root / "pairs")
    make_pairs(root / "pairs", count=8, images=(0,))
    shutil.copy(root / "pairs" / "rows.jsonl", root / "data" / "pairs.jsonl")
    documents = [json.dumps({"text": "red green blue large small round flat " * 2}) for _ in range(12)]
    (root / "data" / "documents.jsonl").write_text("\n".join(documents) + "\n")
    (root / "named").mkdir()
    shutil.copy(root / "data" / "rows.jsonl", root / "named" / "mine.jsonl")
    tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
    info = {
        "rows": {"file_name": "mine.jsonl", "formatting": "sharegpt", "columns": {"messages": "messages"}, "tags": tags}
    }
    (root / "named" / "dataset_info.json").write_text(json.dumps(info))
    for name in ("pictures", "others"):
        (root / name).mkdir()
        for number in range(4):
            pixels = np.random.default_rng(number).integers(0, 256, (32, 32, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / name / f"{number}.png")
            (root / name / f"{number}.txt").write_text("dog, grass, sun")
    make_clips(root / "clips")
    for path in GOLDEN.iterdir():
        shutil.copy(path, root / path.name)
    return root


def make_clips(folder: Path) -> None:
    """Two clips of nine frames with a caption each."""
    import av

    folder.mkdir()
    for number in range(2):
        with av.open(str(folder / f"{number}.mp4"), "w") as container:
            stream = container.add_stream("mpeg4", rate=16)
            stream.width = stream.height = 32
            for frame in range(9):
                pixels = np.full((32, 32, 3), 20 * frame + number, dtype=np.uint8)
                for packet in stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")):
                    container.mux(packet)
            for packet in stream.encode():
                container.mux(packet)
        (folder / f"{number}.txt").write_text("a grey square")


@pytest.fixture
def work(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(folder)
    return folder


def imported(*words: str) -> str:
    said = mm("config", "--from", *words)
    assert said.code == 0, said.err
    assert "warning" not in said.err, said.err
    return said.out


def test_every_tool_has_three_setups() -> None:
    assert [sum(case.startswith(f"{tool}-") for case in CASES) for tool in TOOLS] == [3] * len(TOOLS)
    assert {case.rpartition("-")[0] for case in TRAINED} == set(TOOLS)


@pytest.mark.parametrize("case", CASES)
def test_a_setup_becomes_the_expected_yaml(case: str, work: Path) -> None:
    expected = (GOLDEN / f"{Path(case).stem}.expected.yaml").read_text()
    assert imported(case) == expected
    assert "not-a-real" not in expected


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case in CHEAP else pytest.mark.slow) for case in CASES]
)
def test_what_is_written_passes_the_check(case: str, work: Path) -> None:
    run = work / f"{Path(case).stem}.run.yaml"
    run.write_text(imported(case))
    said = mm("check", run)
    assert said.code == 0, said.out + said.err


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case == TRAINED[3] else pytest.mark.slow) for case in TRAINED]
)
def test_what_is_written_trains(case: str, work: Path, tmp_path: Path) -> None:
    run = tmp_path / "run.yaml"
    run.write_text(imported(case))
    said = mm("train", run, *SMALL, f"training.save={tmp_path / 'out'}")
    assert said.code == 0, said.err
    lines = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    assert max(json.loads(line).get("step", 0) for line in lines) == 2


def sections(text: str) -> dict[str, Any]:
    read: dict[str, Any] = YAML(typ="safe").load(text)
    return read


def test_defaults_of_the_tool_that_change_training_are_written_out(work: Path) -> None:
    (work / "bare.yaml").write_text("model_name_or_path: models/text\nfinetuning_type: full\ndataset: rows.jsonl\n")
    training = sections(imported("bare.yaml"))["training"]
    assert training == {
        "lr_decay_style": "linear", "lr_warmup_ratio": 0.0, "micro_batch_size": 8, "train_epochs": 3,
    }  # fmt: skip


def test_json_lists_every_setting(work: Path) -> None:
    said = mm("config", "--from", "llamafactory-lora.yaml", "--json")
    told = json.loads(said.out)
    assert told["tool"] == "LLaMA-Factory" and sum(told["counts"].values()) == len(told["settings"])
    kinds = {each["setting"]: each["kind"] for each in told["settings"]}
    assert (kinds["lora_rank"], kinds["do_train"], kinds["neftune_noise_alpha"]) == (
        "translated",
        "idle",
        "unsupported",
    )
    assert load_config(told["config"]).arguments.training.lora.quantize == "nf4"


def test_a_command_is_read_as_it_is_typed(work: Path) -> None:
    words = "swift sft --model models/text --dataset data/rows.jsonl#5 --learning_rate 1e-4 --max_length 128"
    several = sections(imported(*words.split()))
    assert several == sections(imported(words))
    basic = several["data"]["dataset_param"]["basic_parameters"]
    assert basic["dataset"] == [{"path": "data/rows.jsonl", "max_samples": 5}]


def test_steps_of_warm_up_are_a_share_of_the_run(work: Path) -> None:
    text = "model_name_or_path: models/text\nfinetuning_type: full\ndataset: rows.jsonl\nwarmup_steps: 5\n"
    text += "per_device_train_batch_size: 1\nnum_train_epochs: 2\n"
    (work / "warm.yaml").write_text(text)
    assert sections(imported("warm.yaml"))["training"]["lr_warmup_ratio"] == 5 / 40  # 20 rows, two epochs


def test_names_on_a_hub_become_downloads(work: Path) -> None:
    (work / "hub.yaml").write_text(
        "base_model: org/model-7b\ndatasets: [{path: org/rows, type: alpaca}]\nlearning_rate: 1e-5\n"
    )
    text = imported("hub.yaml")
    assert "hf download org/model-7b --local-dir models/model-7b" in text
    assert sections(text)["model"]["model_name_or_path"] == "models/model-7b"


def test_unknown_settings_are_named_with_their_line(work: Path) -> None:
    (work / "odd.yaml").write_text("base_model: models/text\nsequence_len: 9\nlerning_rate: 1\n")
    text = imported("odd.yaml")
    assert "lerning_rate (odd.yaml:3:1)" in text and "learning_rate" in text


@pytest.mark.parametrize(
    ("text", "name", "told"),
    [
        ("model_name_or_path: m\nstage: kto\nfinetuning_type: lora\n", "a.yaml", "a.yaml:2:1  stage  KTO is not built"),
        ("model_name_or_path: m\nfinetuning_type: oft\ncutoff_len: 3\n", "a.yaml", "oft is not built"),
        ("base_model: m\nrl: gdpo\nsequence_len: 3\n", "a.yaml", "GDPO is not built"),
        ("compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\n", "a.yaml", "launch file of accelerate"),
        ("colour: red\nshape: round\n", "a.yaml", "no setup of a trainer that is known"),
        ("", "a.yaml", "the file is empty"),
        ("- 1\n- 2\n", "a.yaml", "holds no settings"),
        ("a: &x [1]\nb: *y\n", "a.yaml", "names no anchor"),
        ("a: !!python/object:os.system x\n", "a.yaml", "tag"),
        ("a: !include other.yaml\n", "a.yaml", "tag '!include' is refused"),
        ("a: 1\na: 2\n", "a.yaml", "given twice"),
        ("[" * 200, "a.toml", "nested deeper"),
        ("a = [1,\n", "a.toml", "not valid TOML"),
        ("x" * 1_100_000, "a.yaml", "a configuration has at most"),
        ("a\0b", "a.yaml", "NUL byte"),
        ("echo hello\n", "a.sh", "starts no training that is known"),
        ("swift infer --model m --stream true\n", "a.sh", "'swift infer' does not train"),
    ],
)
def test_bad_input_is_one_line(
    text: str, name: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(text)
    said = mm("config", "--from", name)
    assert said.code == 2 and told in said.err and said.out == "", said.err
    assert len([line for line in said.err.splitlines() if line.strip()]) <= 2, said.err


def test_binary_and_missing_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("weights.yaml").write_bytes(bytes(range(256)))
    for name, told in (("weights.yaml", "is not UTF-8"), ("gone.yaml", "no such file")):
        said = mm("config", "--from", name)
        assert said.code == 2 and told in said.err, said.err
    assert mm("config", "--from").code == 2


def test_what_only_a_shell_knows_and_paths_of_windows_are_named(work: Path) -> None:
    (work / "shell.sh").write_text("swift sft --model 'C:\\models\\text' --dataset $ROWS --max_length $(cat length)\n")
    text = imported("shell.sh")
    assert "a path of Windows" in text and "only a shell knows the value of ROWS" in text
    assert sections(text)["model"]["model_name_or_path"] == "C:\\models\\text"


def test_an_option_without_its_value_is_named(work: Path) -> None:
    text = imported("swift", "sft", "--model", "--dataset", "data/rows.jsonl", "--output_dir")
    assert "no value is given; set training.save" in text
    assert sections(text)["model"]["model_name_or_path"] == "models/model"


def test_secrets_are_not_copied(work: Path) -> None:
    token = "hf_" + "a" * 30
    text = f"base_model: models/text\nsequence_len: 9\nhf_token: {token}\nwandb_project: {token}\n"
    text += f"output_dir: out/{token}\n"
    (work / "secret.yaml").write_text(text)
    said = mm("config", "--from", "secret.yaml")
    assert said.code == 0 and token not in said.out + said.err
    assert token not in mm("config", "--from", "secret.yaml", "--json").out
