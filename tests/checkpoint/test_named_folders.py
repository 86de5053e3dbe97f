"""Every converter says the same of a folder that is not there, and of a file in its place."""

from __future__ import annotations

import contextlib
import io
import shutil
from pathlib import Path

import pytest

from mindspeed_mm.cli import mm_convert
from mindspeed_mm.cli.converter_flags import flags_of
from mindspeed_mm.core.errors import MMError
from tests.helpers.tiny_models import make_tiny_qwen3

CASES = [
    (name, subcommand)
    for name in mm_convert.CONVERTERS
    for subcommand in mm_convert._converter(name).subcommands()
]  # fmt: skip
OUTPUTS = {"target_path", "target_dir", "save_dir", "save_hf_dir", "save_merged_hf_dir"}
TAKES_FILES = {"source_path", "lora_path", "lora_dir", "pt_path"}
"""Inputs that may be a file."""
WRITTEN = {"hf_to_mm": "mm_dir", "lora_hf_to_mm": "mm_dir", "hf_to_mm_ldt": "mm_dir"}
WRITTEN |= {"hf_to_dcp": "dcp_dir", "lora_hf_to_dcp": "dcp_dir"}


def last_part(flag: str) -> str:
    return flag.rpartition(".")[2]


def is_input(subcommand: str, flag: str) -> bool:
    name = last_part(flag)
    is_path = name.endswith(("dir", "path")) and name != "speaker_audio_path"
    return is_path and name not in OUTPUTS and WRITTEN.get(subcommand) != name


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("folders")
    make_tiny_qwen3(place / "model")
    (place / "empty").mkdir()
    (place / "file").write_text("x")
    return place


def said_of(place: Path, name: str, subcommand: str, flag: str, wrong: str) -> str:
    """What a converter says when one of its inputs is wrong and the others are a model's folder."""
    fields = flags_of(mm_convert._converter(name).subcommands()[subcommand])
    words = [name, subcommand, f"--{flag}", str(place / wrong)]
    for other, field in fields.items():
        if other == flag or not field.is_required:
            continue
        last = last_part(other)
        value = place / ("model" if is_input(subcommand, other) else "out")
        words += [f"--{other}", str(value) if last.endswith(("dir", "path")) else "1"]
    if (parallel := "--cfg.target_parallel_config.tp_size") not in words and parallel[2:] in fields:
        words += [parallel, "1"]
    if (parallel := "--cfg.parallel_config.tp_size") not in words and parallel[2:] in fields:
        words += [parallel, "1"]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            mm_convert.run(words)
        except MMError as error:
            return str(error)
        finally:
            shutil.rmtree(place / "out", ignore_errors=True)
    return "nothing"


@pytest.mark.parametrize(("name", "subcommand"), CASES)
def test_an_input_that_is_no_folder(place: Path, name: str, subcommand: str) -> None:
    inputs = list(flags_of(mm_convert._converter(name).subcommands()[subcommand]))
    for flag in filter(lambda flag: is_input(subcommand, flag), inputs):
        assert f"{place / 'absent'}  --{flag}  does not exist" in said_of(place, name, subcommand, flag, "absent")
        said = said_of(place, name, subcommand, flag, "file")
        assert (f"{place / 'file'}  --{flag}  is a file, not a folder" in said) != (last_part(flag) in TAKES_FILES)
        assert said_of(place, name, subcommand, flag, "empty") != "nothing"
