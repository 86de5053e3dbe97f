"""Launch files for several hosts, as far as they can be tried without a cluster: the shell takes them, the commands in
them parse, and what they and their schedulers put into the environment is understood. Schedulers are played by scripts.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML
from torch.distributed.run import parse_args

from mindspeed_mm.fsdp.distributed.job.launch import LaunchInfo, resolve_launch
from mindspeed_mm.fsdp.train.run.launched import starts_ranks
from mindspeed_mm.tasks.launch.launcher import told_meeting_place

FOLDER = Path(__file__).parents[2] / "examples" / "launch"
TRAIN_JOB = FOLDER / "kubernetes" / "trainjob.yaml"
SCRIPTS = sorted(path for path in FOLDER.iterdir() if path.suffix in (".sh", ".sbatch"))

NOTE = """#!{python}
import json, os, sys
with open(os.environ["NOTES"], "a") as notes:
    print(json.dumps({{"words": [os.path.basename(sys.argv[0]), *sys.argv[1:]], "env": dict(os.environ)}}), file=notes)
sys.exit(int(os.environ.get("ENDS_WITH", "0")))
"""
SRUN = """#!{python}
import os, subprocess, sys
words = sys.argv[1:]
while words[0].startswith("-"):
    del words[0]
per_node = int(os.environ["SLURM_NTASKS_PER_NODE"])
codes = []
for task in range(2 * per_node):
    step = {{
        "SLURM_PROCID": task, "SLURM_LOCALID": task % per_node, "SLURM_NODEID": task // per_node,
        "SLURM_STEP_NUM_TASKS": 2 * per_node, "SLURM_STEP_TASKS_PER_NODE": f"{{per_node}}(x2)",
        "SLURM_STEP_NODELIST": "node[07-08]",
    }}
    env = os.environ | {{name: str(value) for name, value in step.items()}}
    codes.append(subprocess.run(words, env=env).returncode)
sys.exit(max(codes))
"""
SCONTROL = '#!/bin/sh\n[ "$1" = show ] && printf "node07\\nnode08\\n" || echo "$@" >> "$REQUEUED"\n'


def run_script(tmp_path: Path, name: str, *words: str, **environment: str) -> tuple[int, list[dict[str, Any]], str]:
    """Exit code of a script, every start of `mm` or torchrun by it, and what was asked of scontrol."""
    programs = {"mm": NOTE, "torchrun": NOTE, "srun": SRUN}
    for program, text in programs.items():
        (tmp_path / program).write_text(text.format(python=sys.executable))
    (tmp_path / "scontrol").write_text(SCONTROL)
    for program in (*programs, "scontrol"):
        (tmp_path / program).chmod(0o755)
    (tmp_path / "python").symlink_to(sys.executable)
    notes, requeued = tmp_path / "notes", tmp_path / "requeued"
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "NOTES": str(notes), "REQUEUED": str(requeued), **environment}
    env |= {"PYTHONPATH": os.pathsep.join([str(FOLDER.parents[1]), *sys.path])}
    done = subprocess.run(["bash", str(FOLDER / name), *words], env=env, capture_output=True, text=True, timeout=600)
    starts = [json.loads(line) for line in notes.read_text().splitlines()] if notes.exists() else []
    return done.returncode, starts, requeued.read_text() if requeued.exists() else done.stderr


def check_mm(words: list[str]) -> dict[str, Any]:
    """The options of `mm VERB …`, as the command line reads them."""
    program, verb, *rest = words
    assert program == "mm"
    return importlib.import_module(f"mindspeed_mm.cli.{verb}").command.make_context(verb, rest).params


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_the_shell_takes_it(path: Path) -> None:
    subprocess.run(["bash", "-n", str(path)], check=True)
    assert path.stat().st_mode & 0o111
    assert "set -euo pipefail" in path.read_text()
    for line in re.findall(r"^#SBATCH (.*)$", path.read_text(), flags=re.MULTILINE):
        assert re.fullmatch(r"--[a-z-]+(=[A-Za-z0-9@%:.-]+)?", line), line


def test_every_file_is_documented() -> None:
    page = (FOLDER.parents[1] / "docs" / "multi-host.md").read_text()
    for path in filter(Path.is_file, FOLDER.rglob("*")):
        assert f"examples/launch/{path.relative_to(FOLDER)}" in page


def test_two_hosts(tmp_path: Path) -> None:
    code, (start,), _ = run_script(
        tmp_path, "two_hosts.sh", "run.yaml", "training.lr=2e-5", MASTER_ADDR="10.0.0.1", NODE_RANK="1", NPROC="4"
    )
    assert code == 0
    params = check_mm(start["words"])
    assert (params["nproc"], params["overrides"]) == (4, ("training.lr=2e-5",))
    assert starts_ranks(params["nproc"], start["env"])
    agent = parse_args([*(told_meeting_place(start["env"]) or []), "--nproc-per-node=4", "-m", "mindspeed_mm"])
    assert (agent.nnodes, agent.node_rank, agent.master_addr, agent.master_port) == ("2", 1, "10.0.0.1", 29500)


def test_two_hosts_want_their_numbers(tmp_path: Path) -> None:
    code, starts, said = run_script(tmp_path, "two_hosts.sh", "run.yaml", MASTER_ADDR="10.0.0.1")
    assert code and not starts
    assert "NODE_RANK: the number of this host" in said


@pytest.mark.parametrize("named", [True, False])
def test_two_hosts_by_torchrun(tmp_path: Path, named: bool) -> None:
    own = {} if named else {"HOST_ADDR": "10.0.0.2", "RDZV_CONF": "is_host=0"}
    code, (start,), said = run_script(
        tmp_path, "two_hosts_torchrun.sh", "run.yaml", "training.lr=2e-5", MASTER_ADDR="10.0.0.1", **own
    )
    assert code == 0, said
    agent = parse_args(start["words"][1:])
    assert (agent.nnodes, agent.rdzv_backend, agent.rdzv_endpoint) == ("2", "c10d", "10.0.0.1:29400")
    assert (agent.local_addr, agent.rdzv_conf) == ((None, "") if named else ("10.0.0.2", "is_host=0"))
    trainer, *words = [agent.training_script, *agent.training_script_args]
    assert Path(trainer).samefile(FOLDER.parents[1] / "mindspeed_mm" / "fsdp" / "train" / "trainer.py")
    check_mm(["mm", "train", *words])


def test_slurm(tmp_path: Path) -> None:
    code, starts, _ = run_script(
        tmp_path, "slurm.sbatch", "run.yaml", "training.lr=2e-5", SLURM_NTASKS_PER_NODE="2", SLURM_JOB_ID="17"
    )
    assert code == 0
    for start in starts:
        assert not starts_ranks(check_mm(start["words"])["nproc"], start["env"])
    infos = [resolve_launch(start["env"]) for start in starts]
    assert infos == [LaunchInfo(rank, rank % 2, 4, "node07", 20017, ranks_here=2) for rank in range(4)]
    assert all(info.spans_hosts for info in infos)


def test_slurm_with_one_task_a_node(tmp_path: Path) -> None:
    code, starts, _ = run_script(
        *(tmp_path, "slurm_torchrun.sbatch", "run.yaml", "training.lr=2e-5"),
        SLURM_NTASKS_PER_NODE="1",
        SLURM_JOB_ID="17",
        SLURM_JOB_NUM_NODES="2",
        SLURM_JOB_NODELIST="node[07-08]",
        SLURM_GPUS_ON_NODE="8",
    )
    assert code == 0
    for node, start in enumerate(starts):
        assert check_mm(start["words"])["nproc"] == 8
        assert starts_ranks(8, start["env"])
        agent = parse_args([*(told_meeting_place(start["env"]) or []), "-m", "mindspeed_mm"])
        assert (agent.nnodes, agent.node_rank, agent.master_addr, agent.master_port) == ("2", node, "node07", 20017)


@pytest.mark.parametrize(("ends_with", "asked"), [("75", "requeue 17\n"), ("3", "")])
@pytest.mark.parametrize("name", ["slurm.sbatch", "slurm_torchrun.sbatch"])
def test_slurm_goes_on_after_a_saved_stop(tmp_path: Path, name: str, ends_with: str, asked: str) -> None:
    slurm = {"SLURM_NTASKS_PER_NODE": "1", "SLURM_JOB_ID": "17", "SLURM_JOB_NUM_NODES": "2"}
    slurm |= {"SLURM_JOB_NODELIST": "node[07-08]"}
    code, _, requeued = run_script(tmp_path, name, "run.yaml", ENDS_WITH=ends_with, **slurm)
    assert (code, requeued) == (int(ends_with), asked)


def test_kubeflow(monkeypatch: pytest.MonkeyPatch) -> None:
    job = YAML(typ="safe").load(TRAIN_JOB)
    assert (job["apiVersion"], job["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", job["metadata"]["name"])
    assert job["spec"].keys() == {"runtimeRef", "trainer", "runtimePatches"}
    assert job["spec"]["runtimeRef"] == {"name": "torch-distributed"}
    trainer = job["spec"]["trainer"]
    assert trainer.keys() == {"image", "numNodes", "numProcPerNode", "command", "resourcesPerNode"}
    assert all(isinstance(word, str) for word in trainer["command"])
    params = check_mm(trainer["command"])
    assert params["nproc"] == trainer["numProcPerNode"] == trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"]

    # What the operator sets in the second pod.
    environment = {
        "PET_NNODES": str(trainer["numNodes"]),
        "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
        "PET_NODE_RANK": "1",
        "PET_MASTER_ADDR": "mm-train-node-0-0.mm-train",
        "PET_MASTER_PORT": "29500",
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert starts_ranks(params["nproc"], environment)
    agent = parse_args(
        [*(told_meeting_place(environment) or []), f"--nproc-per-node={params['nproc']}", "-m", "mindspeed_mm"]
    )
    assert (agent.nnodes, int(agent.node_rank), int(agent.master_port)) == ("2", 1, 29500)
    assert (agent.master_addr, agent.nproc_per_node) == ("mm-train-node-0-0.mm-train", "8")


def test_kubeflow_mounts_what_it_declares() -> None:
    job = YAML(typ="safe").load(TRAIN_JOB)
    (patch,) = job["spec"]["runtimePatches"]
    (replicated,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = replicated["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert patch["manager"] and replicated["name"] == container["name"] == "node"
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    shared = next(mount["mountPath"] for mount in container["volumeMounts"] if mount["name"] == "shared")
    config, save = job["spec"]["trainer"]["command"][2], job["spec"]["trainer"]["command"][-1]
    assert config.startswith(f"{shared}/") and save.startswith(f"training.save={shared}/")
