"""A run that distils a tiny generator into few steps: a model folder, prompts and one YAML."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from tests.helpers.tiny_rollout_run import make_tiny_rollout_run


def make_tiny_distillation(folder: Path, family: str = "flux", **sections: Any) -> Path:
    """Write model, prompts and `run.yaml`; returns the YAML: two steps of the student, two updates of the critic.

    Args:
        folder: Where to write; a model that is there stays.
        family: `flux` or `t2v`, a Wan2.1.
        sections: Merged into the YAML, one level deep.
    """
    path = make_tiny_rollout_run(folder, family)
    config = YAML().load(path.read_text(encoding="utf-8"))
    dmd = {
        "denoising_step_list": [1000, 500],
        "timestep_shift": 3.0,
        "guidance_scale": 3.0,
        "dfake_gen_update_ratio": 2,
    }
    config["posttrain"] = {"method": "dmd", "dmd": dmd, **sections.pop("posttrain", {})}
    config["training"] |= {"micro_batch_size": 1, "gradient_accumulation_steps": 1, "train_iters": 2}
    for name, content in sections.items():
        config.setdefault(name, {}).update(content)
    with path.open("w", encoding="utf-8") as file:
        YAML().dump(config, file)
    return path
