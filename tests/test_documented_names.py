"""Names that the users' documents fix can be imported."""

from __future__ import annotations

import importlib
import importlib.util
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

import mindspeed_mm
from mindspeed_mm.fsdp.params.argument import Arguments

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "mindspeed_mm"

BUILT = (
    "mindspeed_mm.arguments.parse_args",
    "mindspeed_mm.fsdp.utils.register.model_register",
    "mindspeed_mm.fsdp.utils.register.data_register",
    "mindspeed_mm.fsdp.utils.register.import_plugin",
    "mindspeed_mm.fsdp.models.modelhub.ModelHub",
    "mindspeed_mm.fsdp.models.base_model.BaseModel",
    "mindspeed_mm.fsdp.models.base_model.WeightInitMixin",
    "mindspeed_mm.fsdp.train.trainer.Trainer",
    "mindspeed_mm.fsdp.train.train_engine.TrainEngine",
    "mindspeed_mm.fsdp.tasks.funasr.trainer.Trainer",
    "mindspeed_mm.fsdp.tasks.cosyvoice3.train.Trainer",
    "mindspeed_mm.fsdp.distributed.torch_parallelize.ParallelApplier",
    "mindspeed_mm.fsdp.distributed.parallel_state.get_parallel_state",
    "mindspeed_mm.fsdp.features.apply_features.FeaturesApplier",
    "mindspeed_mm.fsdp.data.build_mm_dataset",
    "mindspeed_mm.fsdp.data.build_mm_dataloader",
    "mindspeed_mm.fsdp.data.datasets.huggingface.qwen2vl_dataset",
    "mindspeed_mm.fsdp.utils.device.get_device_type",
    "mindspeed_mm.fsdp.utils.device.get_torch_device",
    "mindspeed_mm.fsdp.tools.profiler",
    "mindspeed_mm.checkpoint.common.converter.Converter",
    "mindspeed_mm.checkpoint.fsdp.generic_dcp_converter.GenericDCPConverter",
    "mindspeed_mm.models.common.module.MultiModalModule",
    "mindspeed_mm.models.common.modelzoo.ModelHub",
    "mindspeed_mm.models.transformers.base_model.FSDP2Mixin",
    "mindspeed_mm.models.transformers.base_model.WeightInitMixin",
    "mindspeed_mm.models.transformers_model.TransformersModel",
    "mindspeed_mm.models.transformers.internvl3_5.InternVLChatModelGeneration",
    "mindspeed_mm.models.hf_src.internvl3_5.InternVLChatModelGeneration",
    "mindspeed_mm.models.text_decoder.find_layered_decoder",
    "mindspeed_mm.models.audio.find_audio_tower",
    "mindspeed_mm.models.diffusion.find_adapter",
    "mindspeed_mm.models.dit.build_transformer",
    "mindspeed_mm.models.common.norm.RMSNorm",
    "mindspeed_mm.models.common.rope.longest_of",
    "mindspeed_mm.models.common.embedding.embedding_of",
    "mindspeed_mm.models.common.spec.resolve_spec",
    "mindspeed_mm.models.model_registry.ModelRegistry",
    "mindspeed_mm.loss.build_objective",
    "mindspeed_mm.config.config_manager.ConfigManager",
    "mindspeed_mm.models.vl_model.VLModel",
    "mindspeed_mm.models.vlm_model.VLMModel",
    "mindspeed_mm.configs.config.mm_extra_args_provider",
    "mindspeed_mm.utils.transformer_model_config.get_model_config",
    "mindspeed_mm.utils.utils.compute_token_level_loss",
    "mindspeed_mm.utils.utils.EncoderBalanceComm",
    "mindspeed_mm.patchs.torch_dcp_patch",
    "mindspeed_mm.models.sora_model.SoRAModel",
    "mindspeed_mm.data.build_mm_dataset",
    "mindspeed_mm.data.build_mm_dataloader",
    "mindspeed_mm.training.pretrain",
    "mindspeed_mm.training.train",
    "mindspeed_mm.training.train_step",
)

COMMANDS = {"mm": "mindspeed_mm.cli.main:main", "mm-convert": "mindspeed_mm.cli.mm_convert:main"}

SECTIONS = {"model", "data", "parallel", "training", "features", "tools"}


def find(name: str) -> object:
    """What a dotted name stands for: a module, or an attribute of one. Raises ImportError or AttributeError."""
    if importlib.util.find_spec(name.rpartition(".")[0]) is None:
        raise ImportError(name)
    module = importlib.import_module(name.rpartition(".")[0])
    if hasattr(module, name.rpartition(".")[2]):
        return getattr(module, name.rpartition(".")[2])
    return importlib.import_module(name)


@pytest.mark.parametrize("name", BUILT)
def test_built_name_is_there(name: str) -> None:
    assert find(name) is not None


def test_the_check_itself() -> None:
    for wrong in ("mindspeed_mm.nothing.Trainer", "mindspeed_mm.fsdp.train.trainer.Trainr"):
        with pytest.raises((ImportError, AttributeError)):
            find(wrong)


def test_distribution_and_commands() -> None:
    distribution = metadata.distribution("mindspeed-mm")
    assert distribution.version == mindspeed_mm.__version__
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
    assert declared == COMMANDS
    installed = {entry.name: entry.value for entry in distribution.entry_points if entry.group == "console_scripts"}
    assert installed.items() <= COMMANDS.items()  # of an older installation from these sources, the first alone
    for place in COMMANDS.values():
        assert callable(find(place.replace(":", ".")))


def test_python_m_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mindspeed_mm", "--version"], capture_output=True, text=True, timeout=600, check=False
    )
    assert (done.returncode, done.stdout) == (0, f"mm, version {mindspeed_mm.__version__}\n")


def test_sections_of_the_yaml() -> None:
    assert Arguments.model_fields.keys() >= SECTIONS


def test_checkpoint_is_the_package_s_own() -> None:
    assert importlib.import_module("checkpoint.keymap") is importlib.import_module("mindspeed_mm.checkpoint.keymap")


@pytest.mark.parametrize(
    ("registry", "home"),
    [("model_register", "fsdp/models/*/modeling_*.py"), ("data_register", "fsdp/data/datasets/*/*_dataset.py")],
)
def test_every_built_in_id_has_its_line_in_its_own_folder(registry: str, home: str) -> None:
    """So that a search of the sources for an id finds it."""
    line = re.compile(rf'^\s*@?{registry}\.register\("(\w+)"', re.MULTILINE)
    at_home = {id_ for path in PACKAGE.glob(home) for id_ in line.findall(path.read_text())}
    anywhere = {id_ for path in PACKAGE.rglob("*.py") for id_ in line.findall(path.read_text())}
    assert at_home == anywhere != set()
