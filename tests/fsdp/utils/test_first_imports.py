"""What libraries do when a process that has imported torch alone imports them: a torchvision that is built for another
torch, torchao, which nobody else imports, scipy, which few call, and transformers, which replaces itself."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.helpers.fresh_process import run_after

CLASHING = 'import torch\ntorch.library.register_fake("torchvision::nms")(lambda *arguments: None)\n'
METADATA = "Metadata-Version: 2.1\nName: torchvision\nVersion: 0.99.0\n"


def python(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Run code where `import torchvision` finds one whose compiled part cannot load; torch is imported."""
    package = folder / "site" / "torchvision"
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").write_text(CLASHING)
    (package / "_C.so").write_bytes(b"built for another torch")
    metadata = folder / "site" / "torchvision-0.99.0.dist-info"
    metadata.mkdir(exist_ok=True)
    (metadata / "METADATA").write_text(METADATA)
    return run_after("import torch", code, cwd=folder, path=[package.parent])


@pytest.mark.edge("U1")
def test_without_the_call_the_import_fails(tmp_path: Path) -> None:
    assert "torchvision::nms does not exist" in python(tmp_path, "import torchvision").stderr


@pytest.mark.edge("U1")
def test_one_call_makes_torchvision_importable_and_leaves_torchao_alone(tmp_path: Path) -> None:
    call = "import sys, mindspeed_mm as mm; mm.ensure_torchvision()"
    done = python(tmp_path, f"{call}; import torchvision; assert 'torchao' not in sys.modules")
    assert done.returncode == 0, done.stderr


@pytest.mark.edge("U1", "BN11")
@pytest.mark.parametrize("names", [["nms"], ["nms", "qnms"], ["roi_align"]])
def test_operators_that_a_process_has_defined_itself_are_taken(names: list[str], tmp_path: Path) -> None:
    code = (
        f"import torch\nlibrary = torch.library.Library('torchvision', 'DEF')\nfor name in {names}:\n"
        "    library.define(name + '(Tensor dets, Tensor scores, float threshold) -> Tensor')\n"
        "import mindspeed_mm as mm\nmm.ensure_torchvision()\nmm.ensure_torchvision()\nimport torchvision\n"
    )
    done = python(tmp_path, code)
    assert done.returncode == 0, done.stderr


@pytest.mark.edge("U1")
def test_a_plugin_may_import_torchvision(tmp_path: Path) -> None:
    (tmp_path / "my_plugin.py").write_text("import torchvision\n")
    done = python(tmp_path, "from mindspeed_mm.fsdp.utils.register import import_plugin as i; i(['my_plugin'])")
    assert done.returncode == 0, done.stderr


@pytest.mark.edge("U1")
def test_check_says_what_a_script_of_ones_own_needs(tmp_path: Path) -> None:
    """Of those who have code of their own: nobody else has anything to do about it."""
    code = (
        "import mindspeed_mm as mm\n"
        "def notes(**more):\n"
        "    training = {'lr': 1e-3, 'micro_batch_size': 1, **more}\n"
        "    return mm.check(model={'model_name_or_path': 'm'}, training=training).notes\n"
        "assert not notes()\n"
        "print(notes(plugin=['my_plugin']))"
    )
    (tmp_path / "my_plugin.py").touch()
    done = python(tmp_path, code)
    assert "torchvision 0.99.0 is built for another torch" in done.stdout, done.stderr
    assert "mindspeed_mm.ensure_torchvision()" in done.stdout


def test_importing_torchvision_works_in_a_fresh_process() -> None:
    code = (
        "from mindspeed_mm.fsdp.utils.torchvision_guard import prepare_for_transformers as e; e(); e();"
        "import torch, torchvision.transforms.v2.functional as f; print(f.resize(torch.ones(3, 8, 8), [4, 4]).shape)"
    )
    done = run_after("import torch", code)
    assert done.returncode == 0, done.stderr
    assert "[3, 4, 4]" in done.stdout


TRANSFORMERS = """
from mindspeed_mm.fsdp.utils.torchvision_guard import prepare_for_transformers
prepare_for_transformers()
import transformers
"""
NO_TORCHAO = """
import sys
import transformers.modeling_utils, transformers.quantizers, peft
loaded = [name for name, module in sys.modules.items() if name.split(".")[0] == "torchao" and module is not None]
assert not loaded, loaded[:3]
from mindspeed_mm.fsdp.utils.torchao_library import load_torchao
assert load_torchao("optim", key="").AdamW8bit
"""


def test_libraries_leave_torchao_alone_and_who_asks_gets_it() -> None:
    done = run_after(TRANSFORMERS, NO_TORCHAO)
    assert done.returncode == 0, done.stderr[-2000:]


ABSENT = 77
SCIPY = f"""
import importlib.util, sys
if importlib.util.find_spec("scipy") is None:
    sys.exit({ABSENT})
if sys.argv[1] == "before":
    import scipy.optimize
import torch
from transformers.loss.loss_utils import LOSS_MAPPING
from transformers.loss import loss_for_object_detection as loss
names = [name for name in sys.modules if name.startswith("scipy")]
assert bool(names) == (sys.argv[1] == "before"), names[:3]
cost = torch.tensor([[4.0, 1.0, 3.0], [2.0, 0.0, 5.0], [3.0, 2.0, 2.0]])
assert [found.tolist() for found in loss.linear_sum_assignment(cost, maximize=True)] == [[0, 1, 2], [0, 2, 1]]
import scipy.optimize
assert scipy.optimize.minimize
assert (scipy.optimize.linear_sum_assignment is loss.linear_sum_assignment) == (sys.argv[1] == "before")
"""


@pytest.mark.parametrize("when", ["before", "after"])
def test_scipy_is_imported_by_the_first_loss_that_calls_it(when: str) -> None:
    """Which `python -m benchmarks startup` shows: it is 36 MB and 0.4 s of each start."""
    done = run_after(TRANSFORMERS, SCIPY, when)
    if done.returncode == ABSENT:
        pytest.skip("scipy is not installed")
    assert done.returncode == 0, done.stderr[-2000:]


SCHEDULERS = f"""
import importlib.util, sys
if importlib.util.find_spec("scipy") is None or importlib.util.find_spec("diffusers") is None:
    sys.exit({ABSENT})
if sys.argv[1] == "before":
    import scipy.stats
from diffusers.schedulers import scheduling_deis_multistep, scheduling_flow_match_euler_discrete as euler
assert ("scipy.stats" in sys.modules) == (sys.argv[1] == "before")
times = euler.FlowMatchEulerDiscreteScheduler(use_beta_sigmas=True)
times.set_timesteps(4)
import scipy.stats
beta = [float(0.001 + 0.999 * scipy.stats.beta.ppf(1 - place / 3, 0.6, 0.6)) for place in range(4)]
assert abs(times.sigmas[:4] - __import__("torch").tensor(beta)).max() < 1e-3, (times.sigmas, beta)
assert scipy.stats.norm and euler.scipy is scipy
"""


@pytest.mark.parametrize("when", ["before", "after"])
def test_statistics_of_scipy_are_imported_by_the_first_scheduler_that_asks_for_them(when: str) -> None:
    done = run_after(TRANSFORMERS, SCHEDULERS, when)
    if done.returncode == ABSENT:
        pytest.skip("scipy or diffusers is not installed")
    assert done.returncode == 0, done.stderr[-2000:]


FUN_ASR = f"""
import importlib, importlib.util, sys
if importlib.util.find_spec("transformers.models.fun_asr_nano") is None:
    sys.exit({ABSENT})
from mindspeed_mm.fsdp.utils.fun_asr_features import provide_fun_asr_features
assert "transformers.processing_utils" not in sys.modules
if sys.argv[1] == "before":
    provide_fun_asr_features()
importlib.import_module("transformers.processing_utils")
if sys.argv[1] == "after":
    provide_fun_asr_features()
for module in (importlib.import_module("transformers"), importlib.import_module("transformers.models.fun_asr_nano")):
    module.FunAsrNanoFeatureExtractor(feature_size=23)
"""


@pytest.mark.parametrize("when", ["before", "after"])
def test_the_extractor_of_fun_asr_stays_when_transformers_replaces_itself(when: str) -> None:
    """Its first use of a processor puts another module of its name into `sys.modules`."""
    done = run_after(TRANSFORMERS, FUN_ASR, when)
    if done.returncode == ABSENT:
        pytest.skip("this transformers has no Fun-ASR-Nano")
    assert done.returncode == 0, done.stderr


ASK = """
import sys
from mindspeed_mm.fsdp.utils.register import model_register
assert "transformers" not in sys.modules
model_register.get("qwen3_tts")
"""


def test_a_model_whose_module_begins_with_transformers_can_be_the_first() -> None:
    done = run_after("import torch", ASK)
    assert done.returncode == 0, done.stderr
