"""`mm train`: reads the configuration, imports its plugins and runs the trainer in this process or in many."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from mindspeed_mm.core.errors import ExitCode
from mindspeed_mm.fsdp.params.loader import PluginKeys, ResolvedConfig, load_config, read_plugins

SHUTDOWN_TIMEOUT_S = 600


@dataclass(frozen=True)
class TrainOutcome:
    """How a run ended."""

    iteration: int
    exit_code: int
    save: str | None


def run(config_path: Path, overrides: Sequence[str] = (), **options: Any) -> TrainOutcome:
    """Train in this process (one rank of a job when torchrun or Slurm started it).

    Args:
        config_path: The YAML.
        overrides: `section.key=value`.
        options: Fields of `TrainOptions`.

    Raises:
        MMError: Anything that a person can act on; `StoppedAfterSave` after a stop that was asked for.
    """
    config = load_with_plugins(config_path, overrides)
    # Imported here: everything above answers a wrong YAML before torch is loaded.
    from mindspeed_mm.fsdp.train.trainer import Trainer, TrainOptions

    engine = Trainer(config, TrainOptions(**options)).train()
    return TrainOutcome(engine.iteration if engine else 0, int(ExitCode.OK), config.arguments.training.save)


def load_with_plugins(config_path: Path, overrides: Sequence[str] = ()) -> ResolvedConfig:
    """Import the plugins that a YAML names, then validate it with the keys that they declare."""
    plugins, model_id, dataset_type = read_plugins(config_path, overrides)
    if not plugins:
        return load_config(config_path, overrides)
    from mindspeed_mm.fsdp.utils.register import data_register, import_plugin, model_register

    import_plugin(plugins)
    for registry, name in ((model_register, model_id), (data_register, dataset_type)):
        if name is not None:
            registry.get(name)  # a mistyped id is the cause of unknown keys, not the other way round
    keys = PluginKeys(
        model=model_register.config_keys(model_id) if model_id else {},
        dataset=data_register.config_keys(dataset_type) if dataset_type else {},
    )
    return load_config(config_path, overrides, plugin_keys=keys)


def launch(nproc: int, command: Sequence[str], save: str | None) -> int:
    """Start torchrun with `nproc` ranks on this host, pass signals on, and return the ranks' own exit code.

    `NNODES`, `NODE_RANK`, `MASTER_ADDR` and `MASTER_PORT` of the environment describe a job over several hosts; without
    them the ranks meet on a free port of this one.

    Args:
        nproc: Ranks on this host.
        command: What each rank runs, after `python -m mindspeed_mm`.
        save: The run folder, whose `run.json` knows why a run ended: torchrun itself ends with 1 on any failure.
    """
    torchrun = [sys.executable, "-m", "torch.distributed.run", *_rendezvous(), f"--nproc-per-node={nproc}"]
    process = subprocess.Popen([*torchrun, "-m", "mindspeed_mm", *command], env=_rank_environment())
    _pass_signals_on(process)
    code = process.wait()
    return _exit_code_of(save, code)


def _rendezvous() -> list[str]:
    if "MASTER_ADDR" not in os.environ:
        return ["--standalone"]
    return [
        f"--nnodes={os.environ.get('NNODES', '1')}",
        f"--node-rank={os.environ.get('NODE_RANK', '0')}",
        f"--master-addr={os.environ['MASTER_ADDR']}",
        f"--master-port={os.environ.get('MASTER_PORT', '29500')}",
    ]


def _rank_environment() -> dict[str, str]:
    """Threads are shared out, not multiplied: ranks that each take every core slow one another down a hundredfold. A
    rank that is asked to stop may take its time to save."""
    return {"OMP_NUM_THREADS": "1", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(SHUTDOWN_TIMEOUT_S), **os.environ}


def _pass_signals_on(process: subprocess.Popen[bytes]) -> None:
    def forward(_number: int, _frame: FrameType | None) -> None:
        process.terminate()  # torchrun passes SIGTERM on, but not every signal that asks a rank to stop

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, forward)


def _exit_code_of(save: str | None, torchrun_code: int) -> int:
    if torchrun_code == 0 or save is None:
        return torchrun_code
    try:
        record = json.loads((Path(save) / "run.json").read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return torchrun_code
    return int(record["exit_code"] or torchrun_code)
