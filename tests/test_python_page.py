"""docs/python.md runs as it stands, all of it in one process, as a notebook would."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from tests.helpers.tiny_models import make_tiny_qwen3_vl
from tests.helpers.tiny_run import make_rows, tiny_config

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.edge("U2")

AFTERWARDS = """
import torch.distributed, sys, gc, signal
assert not torch.distributed.is_initialized(), "a process group is left"
assert sys.excepthook is sys.__excepthook__, "tracebacks are marked with a rank"
assert gc.isenabled() and gc.get_freeze_count() == 0
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
print("it ran")
"""


def test_the_page_runs_in_one_process(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    make_tiny_qwen3_vl(tmp_path / "models" / "tiny")
    make_rows(tmp_path)
    (tmp_path / "a.png").write_bytes((tmp_path / "images" / "0_0.png").read_bytes())
    rows = (tmp_path / "rows.jsonl").read_text().splitlines()
    (tmp_path / "test.jsonl").write_text("".join(line + "\n" for line in rows[:3]))
    config = tiny_config(tmp_path)
    config["model"]["model_name_or_path"] = "models/tiny"
    basic = config["data"]["dataset_param"]["basic_parameters"]
    basic |= {"dataset": "rows.jsonl", "dataset_dir": ".", "val_rate": 0.2}
    config["training"] |= {"save": "runs/first", "save_interval": 4, "val_interval": 4, "train_iters": 8}
    with (tmp_path / "run.yaml").open("w") as file:
        YAML(typ="safe").dump(json.loads(json.dumps(config)), file)
    page = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    script = tmp_path / "page.py"
    light = "import mindspeed_mm, sys\nassert not {'torch', 'numpy', 'transformers'} & set(sys.modules)\n"
    script.write_text(light + "\n".join(blocks) + AFTERWARDS, encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MPLBACKEND": "agg"}
    command = [sys.executable, str(script)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert done.stdout.endswith("training.lr 2\nit ran\n") or "it ran" in done.stdout
    assert "unknown key" not in done.stderr
