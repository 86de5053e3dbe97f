"""Makes what the example starts from: the generator of `examples/digits_flux` after 110 steps instead of 450, and
prompts that name each digit equally often.

Run `python examples/digits_flux_grpo/make_start.py [FOLDER]` (default `runs/digits_flux_grpo`); half a minute.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
GENERATOR = HERE.parent / "digits_flux"
CONFIG = GENERATOR / "digits_flux_config.yaml"
STEPS = 110
REPEATS = 24
"""Lines of prompts.txt that name the same digit."""


def overrides(folder: Path) -> list[str]:
    """Of the generator's configuration: this folder, fewer steps, no samples on the way."""
    data, basic = folder / "data", "data.dataset_param.basic_parameters"
    return [
        f"model.model_name_or_path={folder / 'model'}",
        f"{basic}.dataset={data / 'train.jsonl'}",
        f"{basic}.val_dataset={data / 'validation.jsonl'}",
        f"{basic}.dataset_dir={data}",
        f"{basic}.features_dir={folder / 'features'}",
        f"{basic}.val_features_dir={folder / 'features_validation'}",
        f"training.train_iters={STEPS}",
        "training.sampling.interval=0",
        f"training.save={folder / 'start_run'}",
    ]


def run(*words: str) -> None:
    """A command; its failure ends this program."""
    code = subprocess.run([sys.executable, *words], check=False).returncode
    if code:
        raise SystemExit(code)


def main() -> None:
    """Everything, into one folder."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/digits_flux_grpo")
    run(str(GENERATOR / "make_digits_flux.py"), str(folder))
    for command in ("extract", "train"):
        run("-m", "mindspeed_mm", command, str(CONFIG), *overrides(folder))
    run("-m", "mindspeed_mm", "export", str(folder / "start_run"), str(folder / "start"), "--overwrite")
    lines = (folder / "data" / "prompts.txt").read_text(encoding="utf-8").splitlines()
    (folder / "prompts.txt").write_text("".join(f"{line}\n" for line in lines * REPEATS), encoding="utf-8")


if __name__ == "__main__":
    main()
