"""Every import that the users' documents and MindSpeed-MM's guides show works in a process that has imported nothing
before; and the names behind them act."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SHIM = ROOT / "megatron_shim"

DOCUMENTS = """
from mindspeed_mm.fsdp.utils.register import model_register, data_register
from mindspeed_mm.fsdp.models.modelhub import ModelHub
from mindspeed_mm.fsdp.train.trainer import Trainer
from mindspeed_mm.fsdp.train.train_engine import TrainEngine
from mindspeed_mm.fsdp.distributed.torch_parallelize import ParallelApplier
from mindspeed_mm.fsdp.features.apply_features import FeaturesApplier
from mindspeed_mm.fsdp.data import build_mm_dataset, build_mm_dataloader
from mindspeed_mm.training import pretrain
from mindspeed_mm.arguments import parse_args
from mindspeed_mm.fsdp.utils.device import get_device_type, get_torch_device
from mindspeed_mm.fsdp.distributed.parallel_state import get_parallel_state
from mindspeed_mm.models.common.module import MultiModalModule
from mindspeed_mm.models.transformers.base_model import FSDP2Mixin, WeightInitMixin
from mindspeed_mm.models.transformers.internvl3_5 import InternVLChatModelGeneration
from mindspeed_mm.models.hf_src.internvl3_5 import InternVLChatModelGeneration
from mindspeed_mm.models.common.modelzoo import ModelHub
from mindspeed_mm.models.transformers_model import TransformersModel
from mindspeed_mm.models.vl_model import VLModel
from mindspeed_mm.models.sora_model import SoRAModel
from mindspeed_mm.models.ae import AEModel
from mindspeed_mm.models.text_encoder import TextEncoder, Tokenizer
from mindspeed_mm.models.predictor import PredictModel
from mindspeed_mm.models.diffusion import DiffusionModel
from mindspeed_mm.training import pretrain, train, train_step, get_args
from mindspeed_mm.data import build_mm_dataset, build_mm_dataloader
from mindspeed_mm.models.model_registry import ModelRegistry
from checkpoint.common.converter import Converter
from checkpoint.fsdp.generic_dcp_converter import GenericDCPConverter
import mindspeed_mm.pretrain_vlm, mindspeed_mm.pretrain_sora, mindspeed_mm.pretrain_transformers
import mindspeed_mm.loss
import mindspeed_mm.models.text_decoder, mindspeed_mm.models.audio, mindspeed_mm.models.dit
import mindspeed_mm.models.diffusion
from mindspeed_mm.models.common import norm, rope, embedding, spec
"""
"""Of the five documents: the lines that they show, and the modules that they name."""
GUIDES = """
from mindspeed_mm.fsdp.models.base_model import BaseModel
from mindspeed_mm.fsdp.params.argument import Arguments
from mindspeed_mm.fsdp.params.model_args import ModelArguments
from mindspeed_mm.config.config_manager import ConfigManager
from mindspeed_mm.configs.config import mm_extra_args_provider
from mindspeed_mm.data.data_utils.utils import build_iterations
from mindspeed_mm.patchs import dummy_optimizer_patch
"""
"""Of MindSpeed-MM's guides, what the documents do not show."""
OTHER_LIBRARIES = """
import mindspeed.megatron_adaptor
from megatron.core import mpu
from megatron.core.enums import ModelType
from megatron.training import get_args, print_rank_0
from megatron.training.arguments import core_transformer_config_from_args
from megatron.training.utils import average_losses_across_data_parallel_group
from mindspeed_llm.fsdp2.model_registry import ModelRegistry
"""
"""Lines of entries and of document 004 that import libraries which need not be installed."""
SITE = f"import site; site.addsitedir({str(SHIM)!r})\n"
"""What installing the shim does: its `.pth` file is read when Python starts."""


def run(script: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script, *words], capture_output=True, text=True, timeout=600, cwd=ROOT, check=False
    )


def test_documented_imports_in_one_fresh_process() -> None:
    made = run(SITE + OTHER_LIBRARIES + DOCUMENTS + GUIDES)
    assert made.returncode == 0, made.stderr


@pytest.mark.slow
@pytest.mark.parametrize("line", [line for line in (DOCUMENTS + GUIDES).splitlines() if line])
def test_each_documented_import_comes_first(line: str) -> None:
    """Nothing that another one has prepared is needed."""
    made = run(line)
    assert made.returncode == 0, made.stderr


def test_the_shim_gives_way_and_is_asked_last() -> None:
    """A library that is there is taken, other imports do not wake the shim, and without it nothing is found."""
    without = run("import mindspeed.megatron_adaptor")
    assert "No module named 'mindspeed'" in without.stderr
    idle = run(SITE + "import sys, json\nimport mindspeed_mm_megatron_shim as shim\n"
               "assert isinstance(sys.meta_path[-1], shim.NamesFinder) and 'torch' not in sys.modules")  # fmt: skip
    assert idle.returncode == 0, idle.stderr


def test_an_installed_library_is_taken(tmp_path: Path) -> None:
    (tmp_path / "megatron" / "training").mkdir(parents=True)
    (tmp_path / "megatron" / "training" / "__init__.py").write_text("get_args = 'its own'\n")
    script = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n" + SITE
    script += "import mindspeed.megatron_adaptor\nfrom megatron.training import get_args\nassert get_args == 'its own'"
    made = run(script)
    assert made.returncode == 0, made.stderr
