"""docs/data.md as a new user follows it: a folder in somebody's format, the page's YAML, `mm data check`, `mm train`.

Rows and YAML are taken from the page itself; media that rows name are drawn, the model is a tiny one.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from ruamel.yaml import YAML

from tests.helpers.tiny_media import write_video
from tests.helpers.tiny_models import make_tiny_qwen3_vl

PAGE = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
ROWS = 8
FORMATS = (
    "LLaVA", "ShareGPT", "MLLM", "OpenAI", "Tools and reasoning", "Alpaca", "Preference pairs", "Plain text",
    "A LLaMA-Factory folder",
)  # fmt: skip
TRAINED = ("LLaVA", "ShareGPT", "MLLM", "OpenAI", "A LLaMA-Factory folder")
WITH_TOOLS = (
    "{%- if tools %}{{ '<|im_start|>system\\n' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    "{{ '<|im_end|>\\n' }}{% endif %}"
    "{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}"
    "{%- if message.reasoning_content %}{{ '<think>\\n' + message.reasoning_content + '\\n</think>\\n' }}{% endif %}"
    "{%- if message.content is string %}{{ message.content }}"
    "{%- else %}{% for part in message.content %}{{ part.text }}{% endfor %}{% endif %}"
    "{%- for call in message.tool_calls or [] %}{{ '<tool_call>' + (call.function | tojson) + '</tool_call>' }}"
    "{%- endfor %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""A chat template that writes tools; the tiny model's own does not."""


def blocks(heading: str) -> dict[str, str]:
    """Language → text of the blocks of a section of the page; the last of each."""
    section = re.split(r"^#{2,3} ", PAGE.partition(f"\n### {heading}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]
    found = re.findall(r"^```(\w+)\n(.*?)^```", section, flags=re.MULTILINE | re.DOTALL)
    return dict(found)


def base_yaml() -> dict[str, Any]:
    text = PAGE.partition("\n## A. YAML only\n")[2].partition("```yaml\n")[2].partition("```")[0]
    found: dict[str, Any] = YAML(typ="safe").load(text)
    return found


def merged(base: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """`more` over `base`, section by section."""
    return base | {
        name: merged(base[name], value) if isinstance(value, dict) and isinstance(base.get(name), dict) else value
        for name, value in more.items()
    }


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_qwen3_vl(tmp_path_factory.mktemp("model"))


def make_folder(folder: Path, heading: str, model: Path) -> Path:
    """A stranger's folder with rows like the page's, and `run.yaml` as the page writes it."""
    data, found = folder / "my_data", blocks(heading)
    data.mkdir()
    if heading == "A LLaMA-Factory folder":
        write_llama_factory(data, found["json"])
    else:
        row = json.loads(found["json"])
        (data / "train.jsonl").write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for _ in range(ROWS)))
        draw_media(data, found["json"])
    config = merged(base_yaml(), YAML(typ="safe").load(found["yaml"]) if "yaml" in found else {})
    config["model"]["model_name_or_path"] = str(model)
    if heading == "Tools and reasoning":
        (folder / "tools.jinja").write_text(WITH_TOOLS)
        config["data"]["dataset_param"]["basic_parameters"]["chat_template"] = "tools.jinja"
    with (folder / "run.yaml").open("w", encoding="utf-8") as file:
        YAML().dump(config, file)
    return folder / "run.yaml"


def write_llama_factory(data: Path, info: str) -> None:
    (data / "dataset_info.json").write_text(info)
    talk = [{"role": "user", "content": "<image>Who is it?"}, {"role": "assistant", "content": "A bear."}]
    (data / "zoo.json").write_text(json.dumps([{"messages": talk, "pictures": ["zoo/bear.png"]}] * ROWS))
    (data / "words.json").write_text(json.dumps([{"ask": "One?", "reply": "Two."}] * ROWS))
    draw_media(data, "zoo/bear.png")


def draw_media(data: Path, text: str) -> None:
    """Make every file that a text names."""
    for name in set(re.findall(r"[\w/]+\.(?:png|mp4)", text)):
        (data / name).parent.mkdir(exist_ok=True)
        if name.endswith(".png"):
            Image.linear_gradient("L").resize((48, 32)).convert("RGB").save(data / name)
        else:
            write_video(data / name, range(0, 240, 8))


def mm(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mindspeed_mm", *words], cwd=folder, capture_output=True, text=True, timeout=600
    )


@pytest.mark.parametrize("heading", FORMATS)
def test_rows_of_the_page_are_read_as_the_page_says(
    heading: str, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every row is usable, and what is trained is the model's answer."""
    from mindspeed_mm.tasks.data import check, preview
    from mindspeed_mm.tasks.requests.data import DataCheckRequest, DataPreviewRequest

    yaml = make_folder(tmp_path, heading, model)
    monkeypatch.chdir(tmp_path)
    result = check.run(DataCheckRequest(yaml, workers=0))
    expected = {"duplicate rows", "duplicate ids"} | ({"template mismatch"} if "Tools" in heading else set())
    assert {finding.kind for finding in result.findings} <= expected
    assert result.usable == result.rows == (2 * ROWS if "Factory" in heading else ROWS)
    shown = preview.run(DataPreviewRequest(yaml, rows="0")).shown[0]
    trained = "".join(s.text for answer in shown.answers for s in answer.stretches if s.weight)
    assert ANSWERS[heading] in trained
    assert len(shown.media) == len(re.findall(r"\.(?:png|mp4)", blocks(heading)["json"])) + ("Factory" in heading)


ANSWERS = {
    "LLaVA": "A cat.<|im_end|>",
    "ShareGPT": "Goethe.<|im_end|>",
    "MLLM": "The light.<|im_end|>",
    "OpenAI": "Ten past ten.<|im_end|>",
    "Tools and reasoning": "<think>\nThe tool says 4.\n</think>\n4 °C.<|im_end|>",
    "Alpaca": "Hallo<|im_end|>Haus<|im_end|>",
    "Preference pairs": "Seven.<|im_end|>Nine.<|im_end|>",
    "Plain text": "The sea is large.",
    "A LLaMA-Factory folder": "A bear.<|im_end|>",
}


@pytest.mark.slow
@pytest.mark.parametrize("heading", TRAINED)
def test_a_strangers_folder_trains_with_the_pages_yaml(heading: str, tmp_path: Path, model: Path) -> None:
    yaml = make_folder(tmp_path, heading, model)
    assert mm(tmp_path, "data", "check", yaml.name).returncode == 0
    finished = mm(tmp_path, "train", yaml.name, "--steps", "3")
    assert finished.returncode == 0, finished.stderr
    losses = [
        json.loads(line)["loss"] for line in (tmp_path / "runs" / "mine" / "metrics.jsonl").read_text().splitlines()
    ]
    assert losses
    assert all(0 < loss < 20 for loss in losses)


def test_every_format_of_the_page_is_tried() -> None:
    section = PAGE.partition("\n## A. YAML only\n")[2].partition("\n## ")[0]
    assert tuple(re.findall(r"^### (.+)$", section, flags=re.MULTILINE)) == FORMATS
