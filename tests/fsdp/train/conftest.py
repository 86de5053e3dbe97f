"""The tiny run that the tests of training share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.tiny_models import make_tiny_qwen3_vl
from tests.helpers.tiny_run import make_tiny_run


@pytest.fixture(scope="session")
def yaml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 rows, six steps an epoch, nine steps; dropout, so that a run depends on its random numbers."""
    folder = tmp_path_factory.mktemp("run")
    make_tiny_qwen3_vl(folder / "model", attention_dropout=0.2)
    training = {"train_iters": 9, "micro_batch_size": 4, "save_interval": 100, "lr_decay_style": "cosine"}
    return make_tiny_run(folder, training=training)
