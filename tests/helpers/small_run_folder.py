"""A run folder with two checkpoints of a tiny text model, as `mm train` leaves it, without training."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from mindspeed_mm.core.artifacts import RunFolder
from mindspeed_mm.fsdp.checkpoint.manager import CheckpointManager
from mindspeed_mm.fsdp.models.modelhub import ModelHub
from mindspeed_mm.fsdp.params.loader import dump_resolved, load_config
from tests.helpers.tiny_models import make_tiny_qwen3

YAML = """\
model: {{model_name_or_path: {model}}}
training: {{lr: 3.0e-4, train_iters: 2, save: {save}}}
"""


def make_text_run(root: Path) -> Path:
    """`<root>/model` and `<root>/run` with steps 1 and 2; returns the run folder."""
    source = make_tiny_qwen3(root / "model")
    run = RunFolder(root / "run")
    run.prepare()
    run.config.write_text(YAML.format(model=source, save=run.path))
    config = load_config(run.config)
    run.resolved.write_text(dump_resolved(config))
    run.run_json.write_text(json.dumps({"model_name_or_path": str(source)}))
    run.metrics.write_text('{"step": 1, "loss": 1.0}\n')
    model = ModelHub.build(config.arguments.model)
    ModelHub.load_weights(model, config.arguments.model, seed=0, device=torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters())
    manager = CheckpointManager(run.path, config.arguments.training, context={}, note=print)
    for step in (1, 2):
        with torch.no_grad():
            model.model.norm.weight += step  # type: ignore[union-attr,operator]
        manager.save(step, model, optimizer, {"rng": {"cpu": torch.get_rng_state()}})
    return run.path
