"""The steps of the agents' workflow guide, followed as they are written in a copy of the tree: a model folder under
`fsdp/models/`, a data set folder under `fsdp/data/datasets/`, both named in `training.plugin`, started by torchrun."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from unittest import mock

import pytest
from torch.distributed.run import main as torchrun

import mindspeed_mm
from tests.helpers.own_package import counted_as_the_package
from tests.helpers.runs import losses, mm
from tests.helpers.tiny_models import make_tiny_qwen3

pytestmark = pytest.mark.edge("R5", "R11", "R12")

MODELING = """
import torch
from transformers import AutoConfig, Qwen3ForCausalLM

from mindspeed_mm.fsdp.models.steps.npu_patch import apply_patches
from mindspeed_mm.fsdp.utils.register import model_register


@model_register.register("steps")
class StepsModel(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.inner = Qwen3ForCausalLM(config)
        apply_patches(self.inner)

    @classmethod
    def _from_config(cls, model_args):
        return cls(AutoConfig.from_pretrained(model_args.model_name_or_path))

    @classmethod
    def from_pretrained(cls, model_args):
        model = cls._from_config(model_args)
        model.inner = Qwen3ForCausalLM.from_pretrained(model_args["model_name_or_path"])
        return model

    def forward(self, input_ids, labels=None, attention_mask=None):
        return self.inner(input_ids=input_ids, labels=labels, attention_mask=attention_mask)
"""

NPU_PATCH = '''
def apply_patches(model):
    """Nothing to do off the NPU."""
'''

DATASET = """
import json

import torch
from torch.utils.data import Dataset, default_collate

from mindspeed_mm.fsdp.utils.register import data_register


@data_register.register("steps_rows")
class StepsDataset(Dataset):
    def __init__(self, basic_param, preprocess_param, dataset_param):
        assert "dataset" in basic_param and "no_such_key" not in basic_param
        assert basic_param.get("no_such_key", 3) == 3
        assert dict(basic_param) and [key for key in basic_param]
        assert type(preprocess_param.to_dict()["split_special_tokens"]) is bool
        with open(basic_param["dataset"]) as file:
            self.rows = [json.loads(line)["ids"] for line in file]
        self.length = basic_param["cutoff_len"]
        self.attr = dataset_param.attr

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        ids = torch.tensor(self.rows[index][: self.length])
        return {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}

    @staticmethod
    def collate_fn(samples):
        assert set(samples[0]) == {"input_ids", "labels", "attention_mask"}
        return default_collate(samples)
"""

CONFIG = """\
model:
  model_id: steps
  model_name_or_path: MODEL
data:
  dataset_param:
    dataset_type: steps_rows
    basic_parameters:
      dataset: ROWS
      cutoff_len: 12
  dataloader_param:
    num_workers: 0
parallel:
  tensor_parallel_size: 1
  fsdp_plan:
    apply_modules:
      - inner.model.layers.{*}
training:
  plugin:
    - mindspeed_mm/fsdp/models/steps
    - mindspeed_mm/fsdp/data/datasets/steps
  train_iters: 2
  micro_batch_size: 2
  lr: 1.0e-3
  save: SAVE
features:
  loss_cfg:
    loss_type: raw
tools:
  profiler:
    enable: false
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree with the two folders, and a configuration."""
    tree = tmp_path_factory.mktemp("tree")
    shutil.copytree(Path(mindspeed_mm.__file__).parent, tree / "mindspeed_mm")
    engine = tree / "mindspeed_mm" / "fsdp"
    for folder, files in {
        engine / "models" / "steps": {"modeling_steps.py": MODELING, "npu_patch.py": NPU_PATCH},
        engine / "data" / "datasets" / "steps": {"steps_dataset.py": DATASET},
    }.items():
        folder.mkdir()
        for name, text in files.items():
            (folder / name).write_text(text)
    make_tiny_qwen3(tree / "model")
    (tree / "rows.jsonl").write_text("".join(f'{{"ids": {[i + n for n in range(14)]}}}\n' for i in range(8)))
    text = CONFIG.replace("MODEL", str(tree / "model")).replace("ROWS", str(tree / "rows.jsonl"))
    (tree / "steps_config.yaml").write_text(text.replace("SAVE", str(tree / "out")))
    return tree


def environment_of(tree: Path) -> dict[str, str]:
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    environment.pop("WORLD_SIZE", None)
    return environment


@pytest.mark.parametrize(
    "entry",
    [
        "train/trainer.py",
        pytest.param("tasks/funasr/trainer.py", marks=pytest.mark.slow),
        pytest.param("tasks/cosyvoice3/train.py", marks=pytest.mark.slow),
    ],
)
def test_the_steps_train_by_torchrun(tree: Path, entry: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command `torchrun` is a call of this function."""
    out = tree / f"out-{entry.replace('/', '-')}"
    monkeypatch.chdir(tree)
    with mock.patch.dict(os.environ, environment_of(tree), clear=True):
        torchrun(["--nproc-per-node", "1", f"mindspeed_mm/fsdp/{entry}", "steps_config.yaml", f"training.save={out}"])
    assert sorted(losses(out)) == [1, 2]


def test_the_steps_pass_the_check_from_scratch_too(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By `_from_config`; the training above takes `from_pretrained`."""
    monkeypatch.chdir(tree)
    with counted_as_the_package(tree, {"steps", "steps_rows"}):
        said = mm("check", "steps_config.yaml", "model.train_from_scratch=true")
    assert said.code == 0 and "steps_config.yaml: ok" in said.out, said
