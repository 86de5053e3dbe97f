"""The page for those who come from other trainers: its settings are read, they mean what it says, its commands run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from ruamel.yaml import YAML

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.loss.denoising import draw_level, shift_sigma
from mindspeed_mm.fsdp.params.diffusion_args import DiffusionArguments
from mindspeed_mm.fsdp.params.loader import load_config
from tests.helpers.runs import mm
from tests.helpers.tiny_generators import make_tiny_flux

PAGE = (Path(__file__).parents[2] / "docs" / "coming-from.md").read_text()


def block(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    assert found
    return found[1]


def sections() -> dict[str, str]:
    """Title → text, of the tools that people come from."""
    parts = re.split(r"^## (.*)$", PAGE[: PAGE.index("## Noise levels")], flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def keys_of(text: str) -> list[str]:
    """What the right column of a table sets, as the command line takes it."""
    cells = [row.split("|")[2] for row in text.splitlines() if row.startswith("| ") and row.count("|") == 3]
    found = re.findall(r"`([a-z_]+(?:\.[a-z_]+)+): ([^`]+)`", " ".join(cells))
    prefixes = {"basic_parameters": "data.dataset_param.", "preprocess_parameters": "data.dataset_param."}
    return [f"{prefixes.get(key.partition('.')[0], '')}{key}={value}" for key, value in found]


@pytest.mark.parametrize("tool", sections())
def test_every_key_of_a_tool_is_read(tool: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(block("yaml"))
    keys = keys_of(sections()[tool])
    assert len(keys) >= 15
    for key in keys:  # one by one: some stand for one another
        switch = ["training.ema.enable=true"] if key.startswith("training.ema.") else []
        warnings = load_config(tmp_path / "run.yaml", [*switch, key]).warnings
        assert warnings == () or key.startswith("training.train_epochs="), key  # stands in for train_iters
    with pytest.raises(ConfigError):
        load_config(tmp_path / "run.yaml", [keys[0].replace("=", "x=")])


def test_the_tools_are_those_of_the_title() -> None:
    assert [tool.split("'")[0].split("-")[0] for tool in sections()] == [
        "diffusers", "ai", "SimpleTuner", "kohya", "musubi",
    ]  # fmt: skip


def settings() -> list[dict[str, Any]]:
    """Of every row of the table of noise levels."""
    section = PAGE[PAGE.index("## Noise levels") :]
    rows = re.findall(r"^\|.*\| `(\{.*?\})`", section, re.MULTILINE)
    return [YAML(typ="safe").load(row.replace("-m", "-0.5").replace(": s,", ": 0.8,")) for row in rows]


def test_every_setting_is_one() -> None:
    assert len(settings()) >= 9
    for each in settings():
        read = DiffusionArguments.model_validate(each).model_dump()
        assert read | each == read


def test_shifted_sigmoids_are_those_of_kohyas_scripts() -> None:
    """t = sigmoid(s · n), then t · shift / (1 + (shift − 1) t), n normal: get_noisy_model_input_and_timesteps."""
    random = np.random.default_rng(0)
    normal = np.random.default_rng(1).standard_normal(20_000)
    there = 1 / (1 + np.exp(-normal))
    there = there * 3 / (1 + 2 * there)
    arguments = DiffusionArguments.model_validate({"timestep_density": "logit_normal", "shift": 3.0})
    here = [shift_sigma(draw_level("logit_normal", arguments, random), 3.0) for _ in range(20_000)]
    quantiles = np.linspace(0.02, 0.98, 25)
    np.testing.assert_allclose(np.quantile(here, quantiles), np.quantile(there, quantiles), atol=0.02)


def test_the_configuration_is_read(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(block("yaml"))
    config = load_config(tmp_path / "run.yaml")
    assert (config.warnings, config.arguments.training.lora.rank) == ((), 16)


@pytest.mark.slow
def test_the_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_tiny_flux(Path("models/FLUX.1-dev"))
    folder = Path("pictures/10_my dog")
    folder.mkdir(parents=True)
    for number in range(3):
        pixels = np.random.default_rng(number).integers(0, 256, (32, 32, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text("dog, grass, sun")
    yaml = block("yaml").replace("262144", "1024").replace("1600", "2").replace("bf16", "fp32")
    Path("run.yaml").write_text(yaml)
    commands = [line for text in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) for line in text.splitlines()]
    assert len(commands) == 10
    for number, line in enumerate(commands):
        _, verb, *words = shlex.split(line)
        if verb == "train":  # the page goes on from one run to the next; here each is a run of its own
            run = "runs/dog" if number < 4 else f"runs/{number}"
            words += ["training.train_iters=2", "training.train_epochs=null", f"training.save={run}"]
        said = mm(verb, *words)
        assert said.code == 0, (line, said.err)
    assert Path("exported/dog/pytorch_lora_weights.safetensors").is_file()
    assert list(Path("exported/kohya").glob("*.safetensors")) and list(Path("drawn").glob("*.png"))
