"""What the operating system refuses is one line with the right exit code."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from mindspeed_mm.checkpoint.safetensors_file import write_safetensors
from mindspeed_mm.cli import main
from mindspeed_mm.core.errors import ExitCode, MMError
from mindspeed_mm.core.os_errors import explained_os_error

pytestmark = pytest.mark.edge("S6")


@pytest.mark.parametrize(
    ("number", "code"),
    [(errno.EACCES, 3), (errno.EROFS, 3), (errno.ENOSPC, 3), (errno.ESTALE, 3), (errno.ENAMETOOLONG, 2)],
)
def test_refusals_of_the_system_end_a_command_in_one_line(
    number: int, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(number, os.strerror(number), "/theirs/model.safetensors")

    monkeypatch.setattr(main.cli, "main", refuse)
    assert main.run(["infer"]) == code
    said = capsys.readouterr().err
    assert said.startswith(f"/theirs/model.safetensors  {os.strerror(number)}. ")
    assert said.count("\n") == 1


def test_what_nobody_foresaw_is_still_a_bug(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise FileNotFoundError(errno.ENOENT, "No such file", "x")

    monkeypatch.setattr(main.cli, "main", refuse)
    assert main.run(["infer"]) == ExitCode.BUG
    assert "this is a bug" in capsys.readouterr().err


@pytest.mark.parametrize("is_own", [True, False])
def test_a_folder_that_goes_away_under_a_command_is_told_in_one_line(
    is_own: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The folder of the results, or the one that the command was started in."""
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone if is_own else tmp_path)

    def remove(*args: object, **kwargs: object) -> None:
        gone.rmdir()
        (Path("answers.jsonl") if is_own else gone / "answers.jsonl").write_text("")

    monkeypatch.setattr(main.cli, "main", remove)
    assert main.run(["infer"]) == ExitCode.ENVIRONMENT
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "has been removed" in said and "run the command again" in said.lower()
    assert is_own or said.startswith(str(gone))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_users_weights_are_told_from_missing_ones(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    path = Path("/tmp") / f"mindspeed-mm-{os.getpid()}.safetensors"
    write_safetensors({"a": torch.ones(1)}, path)
    path.chmod(0o600)
    os.seteuid(65534)
    try:
        with pytest.raises(OSError, match="No such file") as caught, safe_open(path, "pt"):
            pass
        known = explained_os_error(caught.value)
    finally:
        os.seteuid(0)
        path.unlink()
    assert isinstance(known, MMError)
    assert (known.exit_code, str(path) in str(known), "Permission denied" in str(known)) == (3, True, True)


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_weights_have_the_umasks_mode(umask: int, mode: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        write_safetensors({"a": torch.ones(1)}, tmp_path / "a.safetensors", {"note": "text"})
    finally:
        os.umask(before)
    assert (tmp_path / "a.safetensors").stat().st_mode & 0o777 == mode
    assert load_file(tmp_path / "a.safetensors")["a"].tolist() == [1.0]
