"""`mm extract` as a command: help, JSON, exit codes, several ranks, signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.distributed import alone
from tests.helpers.runs import mm
from tests.tasks.extraction_run import files, forked, make_run, run, wait_for


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli")
    run(make_run(folder))
    return folder


def test_help_has_two_examples() -> None:
    said = mm("extract", "--help")
    assert said.code == 0
    assert said.out.count("  mm extract ") == 2
    for option in ("--out", "--batch-size", "--nproc", "--dtype", "--overwrite", "--verify", "--json"):
        assert option in said.out


def test_json_is_all_that_stdout_gets(prepared: Path, tmp_path: Path) -> None:
    said = mm(
        "extract", prepared / "run.yaml", "--out", tmp_path / "out", "--json", "--batch-size", 3, "--dtype", "fp32"
    )
    assert said.code == 0, said.err
    told = json.loads(said.out)
    assert (told["out"], told["samples"], told["skipped"], told["kept"]) == (str(tmp_path / "out"), 12, 0, 0)
    assert told["samples_per_s"] > 0
    again = mm("extract", prepared / "run.yaml", "--out", tmp_path / "out", "--dtype", "fp32", "--verify", "size")
    assert again.code == 0, again.err
    assert again.out.startswith(f"{tmp_path / 'out'}: 12 samples, 12 rows were already done")


def test_features_dir_is_where_they_go_unless_told_otherwise(prepared: Path, tmp_path: Path) -> None:
    key = "data.dataset_param.basic_parameters.features_dir"
    said = mm("extract", prepared / "run.yaml", f"{key}={tmp_path / 'here'}")
    assert said.code == 0, said.err
    assert (tmp_path / "here" / "index.jsonl").is_file()


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["--verify", "never"], 2, "'never' is not one of 'hash', 'size'"),
        (["--batch-size", "0"], 2, "--batch-size"),
        (["--dtype", "bf61"], 2, "bf61"),
        (["training.lrr=1"], 2, "Did you mean 'lr'"),
        (["--dtype", "bf16"], 4, "dtype  not set then, bf16 now"),
        (["model.model_name_or_path=/nowhere"], 4, "/nowhere"),
    ],
)
def test_exit_codes(prepared: Path, words: list[str], code: int, told: str) -> None:
    said = mm("extract", prepared / "run.yaml", *words)
    assert (said.code, said.out) == (code, ""), said.err
    assert told in said.err
    assert "Traceback" not in said.err


@alone
def test_sigterm_ends_with_75_and_the_same_command_goes_on(prepared: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"

    def work() -> None:
        from mindspeed_mm.tasks.extract.batches import BatchEncoder

        real = BatchEncoder.__call__

        def slow(self: BatchEncoder, batch: object) -> object:
            time.sleep(0.2)
            return real(self, batch)  # type: ignore[arg-type]

        BatchEncoder.__call__ = slow  # type: ignore[method-assign, assignment]
        said = mm("extract", prepared / "run.yaml", "--out", out, "--batch-size", 1)
        (tmp_path / "said").write_text(said.err)
        os._exit(said.code)

    process = forked(work)
    deadline = time.monotonic() + 60
    while not list(out.glob("work/batch-*")) and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(process, signal.SIGTERM)
    assert wait_for(process) == 75
    assert " of 12 samples are done. Run the same command again to continue." in (tmp_path / "said").read_text()
    said = mm("extract", prepared / "run.yaml", "--out", out)  # the batch size is remembered
    assert said.code == 0, said.err
    assert "rows were already done" in said.out


@pytest.mark.slow
def test_two_ranks_by_the_launcher(prepared: Path, tmp_path: Path) -> None:
    """The whole command, twice: to an end, and with rows that end it."""

    def start(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "mindspeed_mm", "extract", str(prepared / "run.yaml"), "--nproc", "2", *words]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)

    done = start("--out", str(tmp_path / "out"), "--batch-size", "2", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["samples"] == 12
    one = tmp_path / "one"
    assert mm("extract", prepared / "run.yaml", "--out", one, "--batch-size", 2).code == 0
    assert files(tmp_path / "out") == files(one)
    refused = start("--out", str(tmp_path / "out"), "--dtype", "bf16")
    assert refused.returncode == 4
    assert refused.stderr.count("dtype  not set then, bf16 now") == 1
