"""`mm-convert` and `mm convert`: their grammar, their errors, and what they write."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file

from mindspeed_mm.checkpoint.common.config import ConvertMMConfig
from mindspeed_mm.checkpoint.common.converter import Converter
from mindspeed_mm.cli import main as mm
from mindspeed_mm.cli import mm_convert
from mindspeed_mm.core.errors import ConfigError, ModelFolderError, UsageError
from tests.helpers.conversion_scripts import run_script
from tests.helpers.tiny_models import make_tiny_qwen3_vl

GENERIC = "GenericDCPConverter"
ROOT = Path(__file__).parents[2]


class RecordingConverter(Converter):
    """Keeps what it was given."""

    given: ConvertMMConfig

    def hf_to_mm(self, cfg: ConvertMMConfig) -> None:
        """Divide a folder."""
        type(self).given = cfg


REQUIRED = ["--cfg.mm_dir", "mm", "--cfg.hf_config.hf_dir=hf"]


@pytest.mark.parametrize("subcommand", ["hf_to_mm", "hf2mg"])
def test_the_documents_flags_reach_the_converter(subcommand: str) -> None:
    layers = "[[10,10,10,2],[0,0,0,0]]"
    flags = ["--cfg.parallel_config.vit_pp_layers", layers, "--cfg.parallel_config.llm_pp_layers", "[14,14]"]
    mm_convert.run(["RecordingConverter", subcommand, *REQUIRED, *flags, "--cfg.parallel_config.tp_size", "2"])
    given = RecordingConverter.given
    assert (given.mm_dir, given.hf_config.hf_dir) == (Path("mm"), Path("hf"))
    assert given.parallel_config.vit_pp_layers == [[10, 10, 10, 2], [0, 0, 0, 0]]
    assert given.parallel_config.llm_pp_layers == [[14, 14]]
    assert given.parallel_config.tp_size == 2


def test_what_print_config_prints_is_taken_back_and_flags_win(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mm_convert.run(["RecordingConverter", "hf_to_mm", *REQUIRED, "--print_config"])
    file = tmp_path / "convert.yaml"
    file.write_text(capsys.readouterr().out)
    assert "# Ranks that divide each layer." in file.read_text()
    mm_convert.run(["RecordingConverter", "hf_to_mm", "--config", str(file), "--cfg.parallel_config.ep_size", "4"])
    given = RecordingConverter.given
    assert (given.mm_dir, given.parallel_config.ep_size, given.parallel_config.tp_size) == (Path("mm"), 4, 1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["GenericDCPConvertor", "hf_to_dcp"], "Did you mean 'GenericDCPConverter'"),
        (["MOSSTTSConverter", "dcp_to_hf", "--load_dir", "save/iter_0000010"], "is needed"),
        (["OpenSoraConverter", "hf_to_mm", "--cfg.source_path", "a"], "is planned"),
        (["RecordingConverter", "hf_to_m"], "Did you mean 'hf_to_mm'"),
        (["RecordingConverter", "resplit"], "has no 'resplit'"),
        (["RecordingConverter", "hf_to_mm", "--cfg.mm_dri", "x"], "Did you mean '--cfg.mm_dir'"),
        (["RecordingConverter", "hf_to_mm", "mm"], "'mm' is not a flag"),
        (["RecordingConverter", "hf_to_mm", "--cfg.mm_dir"], "needs a value"),
        (["RecordingConverter", "hf_to_mm", "--cfg.mm_dir=x"], "--cfg.hf_config.hf_dir  is needed"),
        (["RecordingConverter", "hf_to_mm", *REQUIRED, "--cfg.parallel_config.tp_size=0"], "greater than 0"),
        (["RecordingConverter", "hf_to_mm", *REQUIRED, "--cfg.parallel_config.llm_pp_layers", "[1,"], "not valid YAML"),
    ],
)
def test_mistakes_are_named_with_the_way_out(words: list[str], message: str) -> None:
    with pytest.raises((UsageError, ConfigError)) as caught:
        mm_convert.run(words)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("words", "needed"),
    [
        (["Qwen2VLConverter", "hf_to_mm"], ["cfg.mm_dir", "cfg.hf_config.hf_dir"]),
        (["Qwen2VLConverter", "mm_to_hf", "--cfg.mm_dir=x"], ["cfg.hf_config.hf_dir", "cfg.save_hf_dir"]),
        (
            ["Qwen2VLConverter", "lora_hf_to_mm", "--cfg.mm_dir=x", "--cfg.hf_config.hf_dir=y"],
            ["cfg.parallel_config.llm_pp_layers"],
        ),
        ([GENERIC, "hf_to_dcp"], ["hf_dir", "dcp_dir"]),
    ],
)
def test_every_flag_that_is_missing_is_named_with_an_example(words: list[str], needed: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        mm_convert.run(words)
    assert [problem.key for problem in caught.value.problems] == [f"--{flag}" for flag in needed]
    assert all(problem.what.startswith("is needed") for problem in caught.value.problems)
    example = shlex.split(caught.value.headline.partition("For example: mm-convert ")[2])
    assert mm_convert.run([*example, "--print_config"]) == 0
    assert {f"--{flag}" for flag in needed} <= set(example)


class OtherNamesConverter(Converter):
    """Has two names for a flag."""

    other_flags: ClassVar[Mapping[str, Mapping[str, str]]] = {"dcp_to_hf": {"dcp_dir": "load_dir"}}
    given: ClassVar[list[tuple[str, int]]] = []

    def dcp_to_hf(self, load_dir: str, lora_rank: int = 0) -> None:
        """Keep what is given."""
        self.given.append((load_dir, lora_rank))


def test_another_name_of_a_flag_and_dashes_in_it_are_understood(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["OtherNamesConverter", "dcp_to_hf"]
    mm_convert.run([*command, "--dcp_dir", "a", "--lora-rank", "4"])
    mm_convert.run([*command, "--load_dir=b", "--lora_rank=5"])
    file = tmp_path / "flags.yaml"
    file.write_text("dcp_dir: c\n")
    mm_convert.run([*command, "--config", str(file)])
    mm_convert.run(["OtherNamesConverter", "--dcp_to_hf", "--load_dir", "d"])  # as a script of HunyuanVideo has it
    assert OtherNamesConverter.given == [("a", 4), ("b", 5), ("c", 0), ("d", 0)]
    mm_convert.run([*command, "--help"])
    assert "--load_dir (or --dcp_dir)" in capsys.readouterr().out


def test_environment_variables_give_flags_and_files_and_words_override_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = "MM_CONVERT_RECORDINGCONVERTER__HF_TO_MM__CFG__"
    for name, value in (("MM_DIR", "mm"), ("HF_CONFIG__HF_DIR", "hf"), ("PARALLEL_CONFIG__LLM_PP_LAYERS", "[[1,3]]")):
        monkeypatch.setenv(start + name, value)
    with pytest.raises(ConfigError, match="is needed"):
        mm_convert.run(["RecordingConverter", "hf_to_mm"])
    monkeypatch.setenv("JSONARGPARSE_DEFAULT_ENV", "true")
    mm_convert.run(["RecordingConverter", "hf_to_mm"])
    given = RecordingConverter.given
    assert (given.mm_dir, given.hf_config.hf_dir) == (Path("mm"), Path("hf"))
    assert given.parallel_config.llm_pp_layers == [[1, 3]]
    file = tmp_path / "flags.yaml"
    file.write_text("cfg:\n  mm_dir: of_file\n  hf_config:\n    hf_dir: of_file\n")
    mm_convert.run(["RecordingConverter", "hf_to_mm", "--config", str(file), "--cfg.hf_config.hf_dir", "of_words"])
    given = RecordingConverter.given
    assert (given.mm_dir, given.hf_config.hf_dir) == (Path("of_file"), Path("of_words"))


def test_errors_of_a_conversion_name_the_flag(tmp_path: Path) -> None:
    for name in ("x", "y"):
        (tmp_path / name).mkdir()
    words = ["--cfg.mm_dir", str(tmp_path), "--cfg.hf_config.hf_dir", str(tmp_path)]
    words += ["--cfg.llm_hf_config.hf_dir", str(tmp_path / "x")]
    words += ["--cfg.common_model_config.llm_hf_dir", str(tmp_path / "y")]
    with pytest.raises(UsageError) as caught:
        mm_convert.run(["GlmConverter", "hf_to_mm", *words])
    assert caught.value.problems[0].key == "--cfg.llm_hf_config.hf_dir"


def test_the_help_names_every_converter_and_hf2mg_without_torch() -> None:
    code = (
        "import sys; from mindspeed_mm.cli import mm_convert; mm_convert.run(['--help']); "
        "assert not {'torch', 'transformers'} & sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    for word in (*mm_convert.CONVERTERS, *mm_convert.PLANNED, "hf2mg", "mg2hf", "--plugin"):
        assert word in done.stdout


def test_every_converter_that_is_listed_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    for name in mm_convert.CONVERTERS:
        mm_convert.run([name, "--help"])
        assert "Subcommands:" in capsys.readouterr().out
    mm_convert.run([GENERIC, "dcp_to_hf", "--help"])
    assert "--model_assets_dir" in capsys.readouterr().out


def test_a_plugin_brings_a_converter_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "converters_of_mine.py").write_text(
        "from mindspeed_mm.checkpoint.common.converter import Converter\n"
        "class MineConverter(Converter):\n"
        "    '''Mine.'''\n"
        "    def hf_to_mm(self, steps: int = 1) -> None:\n"
        "        '''Nothing.'''\n"
        "        assert steps == 3\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert mm_convert.run(["--plugin", "converters_of_mine", "MineConverter", "hf_to_mm", "--steps", "3"]) == 0


PAGES = [*(ROOT / "docs").glob("*.md"), *(ROOT / "examples").glob("*/convert_*.sh")]


def documented_commands() -> list[list[str]]:
    """Lines of pages and scripts that start with `mm-convert`, continuation lines joined."""
    texts = [page.read_text(encoding="utf-8").replace("\\\n", " ") for page in PAGES]
    lines = [line for text in texts for line in re.findall(r"^\s*mm-convert (\w[^#\n]*)", text, flags=re.MULTILINE)]
    return [shlex.split(line) for line in lines]


def test_every_documented_command_parses(capsys: pytest.CaptureFixture[str]) -> None:
    commands = documented_commands()
    assert len(commands) >= 5
    for words in commands:
        mm_convert.run([*words, "--print_config"])
    with pytest.raises(UsageError):
        mm_convert.run([*commands[0], "--of_no_converter", "1", "--print_config"])


def test_the_examples_script_converts_there_and_back(tmp_path: Path) -> None:
    folder = make_tiny_qwen3_vl(tmp_path / "model")
    run_script("qwen3vl", scratch=tmp_path / "scratch", MODEL=str(folder))
    one, two = load_file(folder / "model.safetensors"), load_file(tmp_path / "model-exported/model.safetensors")
    assert one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)


def plain_folder(folder: Path) -> dict[str, torch.Tensor]:
    folder.mkdir()
    tensors = {"a.weight": torch.arange(6.0).reshape(2, 3), "b.weight": torch.ones(3, dtype=torch.bfloat16)}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text('{"architectures": ["OfNoLibrary"]}')
    return tensors


def test_mm_convert_recognises_the_source_both_ways(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = plain_folder(tmp_path / "hf")
    assert mm.run(["convert", str(tmp_path / "hf"), str(tmp_path / "dcp")]) == 0
    assert "2 tensors" in capsys.readouterr().out
    words = ["convert", str(tmp_path / "dcp"), str(tmp_path / "back"), "--to", "hf", "--model", str(tmp_path / "hf")]
    assert mm.run(words) == 0
    found = load_file(tmp_path / "back/model.safetensors")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[key], tensors[key]) and found[key].dtype == tensors[key].dtype for key in tensors)


def test_mm_convert_says_what_is_missing_or_does_not_go_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain_folder(tmp_path / "hf")
    source, out = str(tmp_path / "hf"), str(tmp_path / "out")
    assert mm.run(["convert", source, out, "--to", "hf"]) == 2
    told = capsys.readouterr().err
    assert "nothing to convert from a folder of kind 'hf' to 'hf'" in told
    assert "hf → dcp or megatron, dcp → hf or megatron" in told and "by way of hf" in told
    assert "converter of their own: mm-convert --help" in told
    assert mm.run(["convert", source, out, "--model", source]) == 2
    assert "--model  is not used" in capsys.readouterr().err
    assert mm.run(["convert", source, out, "--tp", "2"]) == 2
    assert "Add --to megatron." in capsys.readouterr().err
    assert mm.run(["convert", source, out, "--to", "megatron"]) == 4
    told = capsys.readouterr().err
    assert f"{source}/config.json  model_type  is None, whose Megatron-style names" in told and "--to dcp" in told
    assert mm.run(["convert", source, str(tmp_path / "dcp")]) == 0
    assert mm.run(["convert", str(tmp_path / "dcp"), out]) == 2
    assert "--model FOLDER" in capsys.readouterr().err
    assert mm.run(["convert", str(tmp_path / "dcp"), out, "--to", "megatron", "--tp", "2"]) == 2
    assert "does not say which model it holds" in capsys.readouterr().err
    assert mm.run(["convert", str(tmp_path / "dcp"), out, "--to", "dcp"]) == 2
    assert "from a folder of kind 'dcp' to 'dcp'. Possible are" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_wrong_model_folder_is_named_with_the_way_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain_folder(tmp_path / "hf")
    dcp, out = str(tmp_path / "dcp"), str(tmp_path / "out")
    assert mm.run(["convert", str(tmp_path / "hf"), dcp]) == 0
    (tmp_path / "empty").mkdir()
    for name, what in (
        ("nowhere", "does not exist. Relative paths start at"),
        ("empty", "has no config.json. Name the folder with its config.json"),
        ("dcp", "has no config.json. Name the folder with its config.json"),
    ):
        assert mm.run(["convert", dcp, out, "--model", str(tmp_path / name)]) == 4
        assert f"{tmp_path / name}  {what}" in capsys.readouterr().err
    plain_folder(tmp_path / "other")
    save_file(
        {f"{i}.weight": torch.ones(i) for i in range(1, 9)} | {"a.weight": torch.ones(1)},
        tmp_path / "other/model.safetensors",
    )
    assert mm.run(["convert", dcp, out, "--model", str(tmp_path / "other")]) == 4
    told = capsys.readouterr().err
    assert f"does not give the tensors of {tmp_path / 'other'}: 8 missing, 1 surplus, 1 of another shape. Name" in told
    assert "a.weight  has shape (2, 3), in the model's folder (1,)" in told and "and 3 more" in told
    make_tiny_qwen3_vl(tmp_path / "vl")
    assert mm.run(["convert", dcp, out, "--model", str(tmp_path / "vl")]) == 4
    assert f"does not hold the model that {tmp_path / 'vl/config.json'} describes" in (told := capsys.readouterr().err)
    assert "Name the folder of the model that was saved." in told
    assert not (tmp_path / "out").exists()


def test_mm_convert_divides_a_model_and_joins_it_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, divided, back = make_tiny_qwen3_vl(tmp_path / "hf"), tmp_path / "mm", tmp_path / "back"
    for words, told in (
        (["--ep", "2"], "--ep  the model has no experts"),
        (["--pp", "9"], "--pp  9 stages × 1 chunks are more than the model's 2 layers"),
        (["--tp", "3"], "Choose another tp_size."),
    ):
        assert mm.run(["convert", str(source), str(divided), "--to", "megatron", *words]) != 0
        assert told in capsys.readouterr().err
    assert mm.run(["convert", str(source), str(divided), "--to", "megatron", "--tp", "2"]) == 0
    assert sorted(path.name for path in (divided / "release").glob("mp_rank_*")) == ["mp_rank_00", "mp_rank_01"]
    assert mm.run(["convert", str(divided), str(back), "--to", "hf", "--model", str(source)]) == 0
    one, two = load_file(source / "model.safetensors"), load_file(back / "model.safetensors")
    assert one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)


def test_without_experts_there_is_nothing_to_stack(tmp_path: Path) -> None:
    plain_folder(tmp_path / "hf")
    words = ["ExpertMergeDcpConverter", "hf_to_dcp", f"--hf_dir={tmp_path / 'hf'}", f"--save_dir={tmp_path / 'd'}"]
    with pytest.raises(ModelFolderError, match=r"no key is one of .*experts.*Use GenericDCPConverter"):
        mm_convert.run(words)
    assert not (tmp_path / "d").exists()


def test_experts_one_by_one_are_stacked_and_come_back(tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    folder.mkdir()
    at = "thinker.model.layers.0.mlp.experts"
    tensors = {
        f"{at}.{e}.{name}.weight": torch.randn(shape)
        for e in range(3)
        for name, shape in (("gate_proj", (4, 5)), ("up_proj", (4, 5)), ("down_proj", (5, 4)))
    } | {"thinker.model.norm.weight": torch.ones(5)}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    mm_convert.run(["ExpertMergeDcpConverter", "hf_to_dcp", "--hf_dir", str(folder), "--save_dir", str(tmp_path / "d")])
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(tmp_path / "d/release", tmp_path / "whole.pt")
    held = torch.load(tmp_path / "whole.pt", weights_only=True)["model"]
    by_hand = [torch.cat([tensors[f"{at}.{e}.{n}.weight"] for n in ("gate_proj", "up_proj")]) for e in range(3)]
    assert torch.equal(held[f"{at}.gate_up_proj"], torch.stack(by_hand))
    words = ["--hf_dir", str(folder), "--dcp_dir", str(tmp_path / "d"), "--save_dir", str(tmp_path / "back")]
    mm_convert.run(["ExpertMergeDcpConverter", "dcp_to_hf", *words, "--dcp_prefix", ""])
    found = load_file(tmp_path / "back/model.safetensors")
    assert found.keys() == tensors.keys() and all(torch.equal(found[key], tensors[key]) for key in tensors)
    prefixes = ["--dcp_prefix", "model.thinker.", "--hf_prefix", "thinker."]
    words = ["--hf_dir", str(folder), "--save_dir", str(tmp_path / "prefixed")]
    mm_convert.run(["ExpertMergeDcpConverter", "hf_to_dcp", *words, *prefixes])
    dcp_to_torch_save(tmp_path / "prefixed/release", tmp_path / "prefixed.pt")
    assert torch.load(tmp_path / "prefixed.pt", weights_only=True)["model"].keys() == {f"model.{key}" for key in held}
    words = ["--hf_dir", str(folder), "--dcp_dir", str(tmp_path / "prefixed"), "--save_dir", str(tmp_path / "again")]
    mm_convert.run(["ExpertMergeDcpConverter", "dcp_to_hf", *words, *prefixes])
    again = load_file(tmp_path / "again/model.safetensors")
    assert again.keys() == tensors.keys() and all(torch.equal(again[key], tensors[key]) for key in tensors)
    with pytest.raises(UsageError, match="no key begins with 'talker"):
        mm_convert.run(["ExpertMergeDcpConverter", "dcp_to_hf", *words[:-1], "x", "--dcp_prefix", "talker."])


def test_both_commands_answer_in_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Errors, too; and a folder that a conversion wrote is a checkpoint, not a run."""
    plain_folder(tmp_path / "hf")
    words = ["hf_to_dcp", "--hf_dir", str(tmp_path / "hf"), "--dcp_dir", str(tmp_path / "dcp")]
    assert mm_convert.run([GENERIC, *words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["converter"], told["subcommand"], told["folder"]) == (GENERIC, "hf_to_dcp", str(tmp_path / "dcp"))
    assert told["tensors"] == 2 and told["verify_s"] > 0
    with pytest.raises(SystemExit) as ended:
        mm_convert.main([GENERIC, "--json", "hf_to_dcp", "--hf_dir", str(tmp_path / "none"), "--dcp_dir", "out"])
    said = capsys.readouterr()
    (problem,) = json.loads(said.out)["error"]["problems"]
    assert ended.value.code == 4 and problem["key"] == "--hf_dir" and problem["what"] == "does not exist"
    assert "does not exist" in said.err
    back = ["convert", str(tmp_path / "dcp"), str(tmp_path / "back"), "--model", str(tmp_path / "hf"), "--json"]
    assert mm.run(back) == 0
    assert json.loads(capsys.readouterr().out)["source_kind"] == "dcp"


def test_a_converter_that_returns_nothing_answers_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    mm_convert.run(["RecordingConverter", "hf_to_mm", *REQUIRED, "--json"])
    assert json.loads(capsys.readouterr().out) == {"converter": "RecordingConverter", "subcommand": "hf_to_mm"}
