"""Every FSDP2 YAML file of a checkout of MindSpeed-MM loads in a fresh process, and trains two steps with only paths
and sizes changed.

`MINDSPEED_MM_CHECKOUT=/path/to/MindSpeed-MM pytest -m slow tests/upstream -s`.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.families.test_ltx2_precomputed import write_files as write_ltx2
from tests.helpers.mindspeed_files import paths_and_sizes
from tests.helpers.runs import losses, mm
from tests.upstream.checkout import OF_CHECKOUT, checkout

EXAMPLES = (checkout() or Path()) / "examples"
FILES = [
    path.relative_to(EXAMPLES).as_posix()
    for path in sorted(EXAMPLES.rglob("*.yaml") if checkout() else ())
    if re.search(r"(?m)^training:", path.read_text(encoding="utf-8"))
]
pytestmark = OF_CHECKOUT
FOLDERS = {
    "qwen3_omni_moe": "qwen3_omni", "qwen3_tts": "qwen3tts", "cosyvoice3_lm": "cosyvoice3",
}  # fmt: skip
"""Id → the family's name in `mindspeed_files`, where it is another."""
LOADS = """
import json, sys
from pathlib import Path
from mindspeed_mm.core.errors import MMError
from mindspeed_mm.fsdp.train.configuration import load_with_plugins
for name in sys.argv[2:]:
    said = {"file": name, "says": None}
    try:
        load_with_plugins(Path(sys.argv[1]) / name)
    except MMError as error:
        said["says"] = str(error)
    print(json.dumps(said))
"""


def test_every_file_loads(capsys: pytest.CaptureFixture[str]) -> None:
    made = subprocess.run(
        [sys.executable, "-c", LOADS, str(EXAMPLES), *FILES], capture_output=True, text=True, timeout=300
    )
    assert made.returncode == 0, made.stderr
    found = [json.loads(line) for line in made.stdout.splitlines()]
    assert [each["file"] for each in found] == FILES
    refused = [each for each in found if each["says"] is not None]
    with capsys.disabled():
        print(f"\nloaded {len(found) - len(refused)}, refused {len(refused)}")
        for each in refused:
            print(f"{each['file']}: {each['says']}")
    assert refused == []


@pytest.mark.parametrize("name", FILES)
def test_a_file_trains_two_steps(name: str, tmp_path: Path) -> None:
    path = EXAMPLES / name
    text = path.read_text(encoding="utf-8")
    (model_id,) = re.findall(r"(?m)^  model_id: (\w+)", text)
    if model_id == "ltx2":
        changes = ltx2_changes(tmp_path)
    else:
        changes = paths_and_sizes(FOLDERS.get(model_id, model_id), tmp_path, path)
    if "quantization_plan" in text:  # a CPU has no 8-bit products
        changes.append("training.quantization_plan.extra_args.emulate=true")
    said = mm("train", path, *changes, "parallel.expert_parallel_size=1")
    assert said.code == 0, said.err
    first, second = (losses(tmp_path / "save")[step] for step in (1, 2))
    assert first != second


def ltx2_changes(folder: Path) -> list[str]:
    """Paths and sizes of a file of LTX-2, which names one file of weights and a text encoder apart from it."""
    write_ltx2(folder, is_2_3=False)
    sizes = json.loads((folder / "model" / "transformer" / "config.json").read_text(encoding="utf-8"))
    in_file = (
        "num_attention_heads", "attention_head_dim", "in_channels", "out_channels", "num_layers", "cross_attention_dim",
        "caption_channels",
    )  # fmt: skip
    changes = {
        "model.model_name_or_path": folder / "model",
        "model.checkpoint_path": folder / "model",
        "model.text_encoder_path": folder / "model",
        "data.dataset_param.basic_parameters.dataset_dir": folder / "data" / ".precomputed",
        "data.dataloader_param.num_workers": 0,
        "training.train_iters": 2,
        "training.lr_warmup_ratio": 0,
        "training.save": folder / "save",
        **{f"model.transformer.{name}": sizes[name] for name in in_file},
    }
    return [f"{key}={value}" for key, value in changes.items()]
