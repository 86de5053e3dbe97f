"""A step for which memory does not suffice: what the error says (reliability.md F18)."""

from __future__ import annotations

import re
from pathlib import Path
from unittest import mock

import pytest
import torch

from mindspeed_mm.core.errors import MachineError
from mindspeed_mm.fsdp.train.configuration import load_with_plugins
from mindspeed_mm.fsdp.train.memory import advice as memory_advice
from mindspeed_mm.fsdp.train.train_engine import Hook, TrainEngine
from mindspeed_mm.fsdp.train.trainer import Trainer
from tests.helpers.measured_memory import make_long_rows
from tests.helpers.tiny_models import make_tiny_qwen3
from tests.helpers.tiny_run import make_tiny_run


class NoMemory(Hook):
    """Raises in the forward pass of the first step, inside a hook of a layer."""

    def on_train_begin(self, engine: TrainEngine) -> None:
        def refuse(*_: object) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

        engine.model.get_submodule("model.layers.2").register_forward_hook(refuse)


@pytest.fixture(scope="module")
def yaml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    make_tiny_qwen3(folder / "model", hidden_size=64, vocab_size=4096, num_hidden_layers=3, layer_types=None)
    make_long_rows(folder, tokens=30)
    return make_tiny_run(folder)


def message_of(yaml: Path) -> str:
    with pytest.raises(MachineError) as raised:
        Trainer(load_with_plugins(yaml, []), hooks=[NoMemory()]).train()
    return str(raised.value)


def test_the_error_says_what_used_the_memory_and_three_changes(yaml: Path) -> None:
    message = message_of(yaml)
    assert "out of memory on rank 0 in step 1" in message
    assert re.search(r"predicted peak [\d.]+ MiB", message) and "activations" in message and "optimizer" in message
    assert re.search(r"in work: rows.jsonl:\d \(\d+ tokens\), rows.jsonl:\d \(\d+ tokens\)", message)
    changes = re.findall(r"^    (\S.*): predicted ([\d.]+) MiB → ([\d.]+) MiB$", message, flags=re.MULTILINE)
    assert len(changes) == 3
    assert all(float(after) < float(before) for _, before, after in changes)
    assert any(change.startswith("training.micro_batch_size=1 ") for change, _, _ in changes)


def test_an_autopsy_that_fails_leaves_the_plain_error(yaml: Path) -> None:
    with mock.patch.object(memory_advice, "forecast", side_effect=RuntimeError("no model")):
        message = message_of(yaml)
    assert "out of memory on rank 0 in step 1, on batches" in message and "Lower training.micro_batch_size" in message
