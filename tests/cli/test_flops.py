"""`mm flops`: folders with nothing but a configuration, YAMLs, generators; and figures that others published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from mindspeed_mm.cli.main import run
from tests.helpers.packed_families import FAMILIES
from tests.helpers.released import FLUX_1_DEV, WAN_2_1_T2V_1_3B, write_folder
from tests.helpers.tiny_run import make_tiny_run


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Llama-3.1-8B, without its weights."""
    folder = tmp_path_factory.mktemp("llama")
    transformers.LlamaConfig(
        vocab_size=128_256, hidden_size=4096, intermediate_size=14_336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)  # fmt: skip
    return folder


def family(folder: Path, name: str) -> Path:
    config = FAMILIES[name].config()
    config.architectures = [FAMILIES[name].model]
    config.save_pretrained(folder)
    return folder


def counted(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    capsys.readouterr()
    assert run(["flops", *map(str, words), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_published_speed_is_the_published_share(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """TorchTitan: Llama-3.1-8B at 8,192 tokens, 6,667 tokens/s of an H100; 34.7 % of 989 TFLOP/s, causal half. By all
    pairs it is an eighth more."""
    found = counted(capsys, llama, "--seq", 8192, "--tokens-per-s", 6667, "--device", "H100")
    assert found["speed"]["mfu"] == pytest.approx(0.347, abs=5e-4)
    assert found["speed"]["mfu_full"] / found["speed"]["mfu"] == pytest.approx(1.125, abs=2e-3)
    assert found["speed"]["hfu"] == found["speed"]["mfu"]
    assert sum(row["share"] for row in found["rows"]) == pytest.approx(1)


def test_options_change_what_they_say(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = counted(capsys, llama, "--seq", 1024, "--batch", 2)
    again = counted(capsys, llama, "--seq", 1024, "--batch", 2, "--recompute", "full")
    kept = counted(capsys, llama, "--seq", 1024, "--batch", 2, "--recompute", "selective")
    head = next(row for row in plain["rows"] if row["module"] == "lm_head")
    assert again["causal"]["recompute"] == plain["causal"]["forward"] - head["forward"]
    assert kept["causal"] == plain["causal"]
    adapted = counted(capsys, llama, "--seq", 1024, "--batch", 2, "--lora")
    assert adapted["trained"] < adapted["parameters"] / 100
    assert adapted["causal"]["backward"] < 0.6 * plain["causal"]["backward"]
    few = counted(capsys, llama, "--seq", 1024, "--batch", 2, "--labels", 10)
    assert next(row for row in few["rows"] if row["module"] == "lm_head")["forward"] == head["forward"] * 10 / 1024


def test_a_model_that_sees(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = family(tmp_path, "qwen2_5_vl")
    found = counted(capsys, folder, "--seq", 64, "--images", 2, "--image-size", "16x32")
    assert found["lengths"] == {"text": 64, "labels": 48, "patches": 64, "patch windows": 64, "media tokens": 16}
    video = counted(capsys, folder, "--seq", 64, "--images", 1, "--image-size", "16x32", "--frames", 4)
    assert video["lengths"]["patches"] == 64
    assert run(["flops", str(folder), "--seq", "8", "--images", "2", "--image-size", "16x32"]) == 2
    assert "--seq" in capsys.readouterr().err


def test_a_model_that_hears(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = counted(capsys, family(tmp_path, "omni"), "--seq", 64, "--audio", 0.64)
    assert found["lengths"]["sound"] == 32
    assert found["lengths"]["sound tokens"] == 16


@pytest.mark.parametrize(
    ("content", "size", "frames", "tokens"),
    [(FLUX_1_DEV, "1024x768", 1, 64 * 48), (WAN_2_1_T2V_1_3B, "480x832", 17, 5 * 30 * 52)],
    ids=["FLUX.1-dev", "Wan2.1-T2V-1.3B"],
)
def test_generators(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: Any, size: str, frames: int, tokens: int
) -> None:
    folder = write_folder(tmp_path, content)
    found = counted(capsys, folder, "--image-size", size, "--frames", frames, "--recompute", "full")
    assert found["tokens"] == tokens
    assert found["causal"] == found["full"]
    # Six a weight and token is what blocks cost at least; attention comes on top.
    assert found["full"]["forward"] + found["full"]["backward"] > 5 * found["parameters"] * tokens * 0.5
    assert run(["flops", str(folder), "--image-size", "100x100"]) == 2
    assert run(["flops", str(folder)]) == 2


def test_a_yaml_says_what_is_trained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    yaml = make_tiny_run(tmp_path)
    words = ("--seq", 64, "--images", 1, "--image-size", "32x32")
    plain = counted(capsys, yaml, *words)
    frozen = counted(capsys, yaml, "model.freeze=[model.visual]", "features.recompute=true", *words)
    assert frozen["trained"] < plain["trained"]
    assert frozen["causal"]["forward"] == plain["causal"]["forward"]
    assert frozen["causal"]["backward"] < plain["causal"]["backward"]
    rows = {row["module"]: row for row in frozen["rows"]}
    assert all(row["backward"] == row["recompute"] == 0 for name, row in rows.items() if "visual" in name)
    assert any(row["recompute"] for row in rows.values())


def test_the_table(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["flops", str(llama), "--seq", "8192", "--tokens-per-s", "6667", "--peak-tflops", "989"]) == 0
    text = capsys.readouterr().out
    assert "model.layers.{*}.self_attn  attention" in text
    assert "a token: 51.47 GFLOP" in text
    assert "MFU 34.7% causal, 39.0% full; HFU 34.7% causal" in text


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "--seq"),
        (("--seq", "64", "--tokens-per-s", "1"), "--device"),
        (("--seq", "64", "--tokens-per-s", "1", "--device", "H1OO"), "or give --peak-tflops"),
        (("--seq", "64", "--tokens-per-s", "1", "--device", "A100", "--precision", "fp8"), "fp8 peak"),
        (("--seq", "64", "--images", "1"), "sees no images"),
        (("--seq", "64", "--audio", "1"), "takes no audio"),
        (("training.lr=1", "--seq", "64"), "training.lr=1"),
        (("--seq", "64", "--image-size", "12"), "Give height and width"),
    ],
)
def test_what_is_refused(llama: Path, words: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["flops", str(llama), *words]) == 2
    assert says in capsys.readouterr().err
