"""A torchvision that is built for another torch: plugins, the Python door and scripts of a user's own."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.helpers.fresh_process import run_after

pytestmark = pytest.mark.edge("U1")

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


def test_without_the_call_the_import_fails(tmp_path: Path) -> None:
    assert "torchvision::nms does not exist" in python(tmp_path, "import torchvision").stderr


def test_one_call_makes_torchvision_importable_and_leaves_torchao_alone(tmp_path: Path) -> None:
    call = "import sys, mindspeed_mm as mm; mm.ensure_torchvision()"
    done = python(tmp_path, f"{call}; import torchvision; assert 'torchao' not in sys.modules")
    assert done.returncode == 0, done.stderr


@pytest.mark.edge("BN11")
@pytest.mark.parametrize("names", [["nms"], ["nms", "qnms"], ["roi_align"]])
def test_operators_that_a_process_has_defined_itself_are_taken(names: list[str], tmp_path: Path) -> None:
    code = (
        f"import torch\nlibrary = torch.library.Library('torchvision', 'DEF')\nfor name in {names}:\n"
        "    library.define(name + '(Tensor dets, Tensor scores, float threshold) -> Tensor')\n"
        "import mindspeed_mm as mm\nmm.ensure_torchvision()\nmm.ensure_torchvision()\nimport torchvision\n"
    )
    done = python(tmp_path, code)
    assert done.returncode == 0, done.stderr


def test_a_plugin_may_import_torchvision(tmp_path: Path) -> None:
    (tmp_path / "my_plugin.py").write_text("import torchvision\n")
    done = python(tmp_path, "from mindspeed_mm.fsdp.utils.register import import_plugin as i; i(['my_plugin'])")
    assert done.returncode == 0, done.stderr


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
