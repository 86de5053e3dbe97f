"""A generator's run that learns from rewards, small enough for tests: a model folder, prompts and one YAML."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from tests.helpers.tiny_generators import make_tiny_flux, make_tiny_wan
from tests.helpers.tiny_run import STEADY

PROMPTS = ("a red box", "two blue lines", "a seven moving left", "grain, large and round")


def make_tiny_rollout_run(folder: Path, family: str = "flux", *, method: str = "grpo", **sections: Any) -> Path:
    """Write model, prompts and `run.yaml`; returns the YAML: two prompts a step, four samples of each.

    Args:
        folder: Where to write; a model that is there stays.
        family: `flux` or `t2v`.
        method: `grpo` or `nft`.
        sections: Merged into the YAML, one level deep.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "model").exists():
        make_tiny_flux(folder / "model") if family == "flux" else make_tiny_wan(folder / "model")
    (folder / "prompts.txt").write_text("".join(f"{prompt}\n" for prompt in PROMPTS), encoding="utf-8")
    sizes = {"height": 16, "width": 16, **({} if family == "flux" else {"num_frames": 5})}
    config: dict[str, Any] = {
        "model": {"model_name_or_path": str(folder / "model")},
        "data": {
            "dataset_param": {
                "dataset_type": "generation_prompts",
                "basic_parameters": {"dataset": str(folder / "prompts.txt")},
                "preprocess_parameters": sizes,
            },
            "dataloader_param": {"num_workers": 0},
        },
        "training": {
            "lr": 1e-3, "micro_batch_size": 4, "gradient_accumulation_steps": 2, "train_iters": 3, "log_interval": 1,
            "seed": 7, **STEADY,
        },
        "posttrain": {
            "method": method,
            "grpo": {"num_generations": 4},
            "nft": {"kl": 0, "old_decay": 0},
            "flow": {"num_inference_steps": 4, "window": {"size": 2, "iterations": 2}},
            "rewards": [{"name": "jpeg_size"}],
        },
    }  # fmt: skip
    for name, content in sections.items():
        config.setdefault(name, {}).update(content)
    path = folder / "run.yaml"
    with path.open("w", encoding="utf-8") as file:
        YAML().dump(config, file)
    return path
