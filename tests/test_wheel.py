"""What is published: the wheel holds what the package reads and nothing else; slow: wheel and sdist are built, and the
wheel runs in an environment that has nothing but its core dependencies."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from mindspeed_mm.core.version import __version__

ROOT = Path(__file__).parents[1]
HAS_BUILDER = importlib.util.find_spec("hatchling") is not None
MOST_BYTES = 4_000_000
"""Of a wheel; one file of weights or pictures by mistake is larger."""
DATA = {
    "mindspeed_mm/py.typed",
    "mindspeed_mm/run.schema.json",
    "mindspeed_mm/tools/tools.json",
    "mindspeed_mm/quickstart/digits_tiny_config.yaml",
    "mindspeed_mm/quickstart/data/optdigits.tes.gz",
    "mindspeed_mm/quickstart/data/SOURCE.md",
}
KINDS = {".py", ".yaml", ".json", ".j2", ".html", ".typed", ".gz", ".md", ".toml", ".tsv", ".txt", ".css", ".js"}


def build(place: Path, out: Path, *targets: str) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(out), *(f"-t{target}" for target in targets)]
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """File of the wheel → size in bytes. Without the builder: what git does not ignore, which is what it takes."""
    if HAS_BUILDER:
        out = tmp_path_factory.mktemp("wheel")
        build(ROOT, out, "wheel")
        with zipfile.ZipFile(next(out.glob("*.whl"))) as wheel:
            return {each.filename: each.file_size for each in wheel.infolist() if ".dist-info/" not in each.filename}
    listed = ["git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard", "mindspeed_mm"]
    names = subprocess.run(listed, capture_output=True, text=True, check=True).stdout.splitlines()
    return {name: (ROOT / name).stat().st_size for name in names if (ROOT / name).is_file()}


def faults(content: dict[str, int]) -> list[str]:
    """What a wheel lacks, and what it must not hold."""
    found = [f"lacks {name}" for name in sorted(DATA - set(content))]
    for name in content:
        parts = Path(name).parts
        if parts[0] != "mindspeed_mm" or {"tests", "benchmarks", "examples", "__pycache__"} & set(parts):
            found.append(f"holds {name}")
        elif Path(name).suffix not in KINDS:
            found.append(f"holds a file of another kind: {name}")
    if sum(content.values()) > 4 * MOST_BYTES:
        found.append("is too large")
    return found


def test_the_wheel_holds_the_package_with_its_data_and_nothing_else(content: dict[str, int]) -> None:
    assert faults(content) == []
    here = {path.relative_to(ROOT).as_posix() for path in (ROOT / "mindspeed_mm").rglob("*") if is_shipped(path)}
    assert here == set(content)


def is_shipped(path: Path) -> bool:
    return path.is_file() and "__pycache__" not in path.parts


def test_a_fault_of_the_wheel_is_found(content: dict[str, int]) -> None:
    assert faults({name: size for name, size in content.items() if name != "mindspeed_mm/py.typed"})
    for name in ("tests/conftest.py", "mindspeed_mm/quickstart/tests/a.py", "mindspeed_mm/weights.safetensors"):
        assert faults(content | {name: 1})
    assert faults(content | {"mindspeed_mm/big.json": 10**8})


def test_licences_travel_with_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["license-files"] == ["LICENSE", "NOTICE"]
    assert all((ROOT / name).is_file() for name in project["license-files"])
    assert project["license"] == "Apache-2.0 AND CC-BY-4.0"


def test_the_shim_has_the_version_of_the_package() -> None:
    shim = tomllib.loads((ROOT / "megatron_shim" / "pyproject.toml").read_text())["project"]
    assert shim["version"] == __version__


def test_every_script_of_the_repository_root_has_a_module_in_the_package() -> None:
    """Users of the wheel run `python -m mindspeed_mm.<name>` in place of `python <name>.py`."""
    scripts = sorted(path.stem for path in ROOT.glob("*.py"))
    assert "pretrain_vlm" in scripts
    for name in scripts:
        module = (ROOT / "mindspeed_mm" / f"{name}.py").read_text()
        assert 'if __name__ == "__main__":\n    main()' in module, name
        assert f"from mindspeed_mm.{name} import main" in (ROOT / f"{name}.py").read_text()


# --- slow: built, installed, run --------------------------------------------------------------------------------------


def closure(requirements: list[str]) -> Iterator[importlib.metadata.Distribution]:
    """The distributions that these requirements ask for, and those that they ask for, without extras."""
    waiting, seen = [Requirement(each) for each in requirements], set()
    while waiting:
        each = waiting.pop()
        extras = each.extras or {""}
        key = (canonicalize_name(each.name), *sorted(each.extras))
        if key in seen or (each.marker and not each.marker.evaluate({"extra": ""})):
            continue
        seen.add(key)
        found = importlib.metadata.distribution(each.name)
        yield found
        for further in map(Requirement, found.requires or ()):
            if further.marker is None or any(further.marker.evaluate({"extra": extra}) for extra in extras):
                further.marker = None
                waiting.append(further)


def link_distributions(requirements: list[str], folder: Path) -> None:
    """A folder with links to all that these requirements bring, as pip would install it."""
    for found in closure(requirements):
        for name in {path.parts[0] for path in found.files or () if path.parts[0] not in ("..", "__pycache__")}:
            if not (folder / name).exists():
                (folder / name).symlink_to(Path(str(found.locate_file(name))))


class Installed:
    """A bare environment with a wheel, used from an empty folder."""

    def __init__(self, wheel: Path, folder: Path) -> None:
        self.bin, self.work = folder / "env" / "bin", folder / "empty"
        self.work.mkdir()
        venv.create(folder / "env", with_pip=True)
        self.run("python", "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", wheel)
        (site,) = (folder / "env" / "lib").glob("python*/site-packages")
        shown = importlib.metadata.Distribution.at(next(site.glob("mindspeed_mm-*.dist-info")))
        link_distributions([each for each in shown.requires or () if "extra ==" not in each], site)
        self.site = site

    def run(self, program: str, *words: object, code: int = 0) -> subprocess.CompletedProcess[str]:
        """Run a program of the environment, which must end with this code and without a traceback."""
        outside = ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME")
        variables = {name: value for name, value in os.environ.items() if name not in outside}
        command = [str(self.bin / program), *map(str, words)]
        done = subprocess.run(
            command, cwd=self.work, env=variables, capture_output=True, text=True, timeout=1500, check=False
        )
        assert done.returncode == code, (command, done.stdout[-2000:], done.stderr[-3000:])
        assert "Traceback" not in done.stderr, done.stderr
        return done


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("hatchling")
    out = tmp_path_factory.mktemp("dist")
    build(ROOT, out)
    build(ROOT / "megatron_shim", out, "wheel")
    return out


@pytest.mark.slow
def test_the_sdist_builds_the_same_wheel(built: Path, tmp_path: Path) -> None:
    with tarfile.open(next(built.glob("*.tar.gz"))) as packed:
        packed.extractall(tmp_path, filter="data")
    (source,) = tmp_path.glob("mindspeed_mm-*")
    build(source, tmp_path / "again", "wheel")
    wheels = [next(built.glob("mindspeed_mm-*.whl")), next((tmp_path / "again").glob("*.whl"))]
    assert wheels[0].stat().st_size < MOST_BYTES
    contents = []
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as opened:
            contents.append({each.filename: each.CRC for each in opened.infolist()})
    assert contents[0] == contents[1]
    licences = {Path(name).name for name in contents[0] if "/licenses/" in name}
    assert licences == {"LICENSE", "NOTICE"}
    assert not {"tests", "benchmarks", "examples", "docs"} & {path.name for path in source.iterdir()}


@pytest.mark.slow
def test_the_wheel_runs_where_nothing_but_its_core_dependencies_is(built: Path, tmp_path: Path) -> None:
    installed = Installed(next(built.glob("mindspeed_mm-*.whl")), tmp_path)
    where = installed.run("python", "-P", "-c", "import mindspeed_mm as m; print(m.__file__, m.__version__)").stdout
    assert where.split() == [str(installed.site / "mindspeed_mm" / "__init__.py"), __version__]
    for extra in ("diffusers", "sklearn", "pytest", "starlette"):
        assert not (installed.site / extra).exists()
    assert installed.run("mm", "--version").stdout.split()[-1] == __version__
    assert "quickstart" in installed.run("mm", "--help").stdout
    assert "hf_to_dcp" in installed.run("mm-convert", "--help").stdout
    assert json.loads(installed.run("mm", "doctor", "--json").stdout)["problems"] == 0
    schema = json.loads((installed.site / "mindspeed_mm" / "run.schema.json").read_text())
    assert json.loads(installed.run("mm", "schema", "--json").stdout) == schema
    for script in ("pretrain_vlm", "pretrain_sora"):
        installed.run("python", "-m", f"mindspeed_mm.{script}", code=2)

    said = installed.run("mm", "quickstart").stdout
    pattern = r"accuracy, [a-z-]+: .*"
    promised = re.findall(pattern, (ROOT / "README.md").read_text(encoding="utf-8"))
    assert re.findall(pattern, said) == promised
    assert f"source {tmp_path / 'env' / 'bin' / 'activate'}" in said
    config = installed.work / "runs" / "digits" / "digits_tiny_config.yaml"
    assert config.read_text().startswith(f"# yaml-language-server: $schema={installed.site.resolve().as_uri()}")
    installed.run("mm", "check", config.relative_to(installed.work))


@pytest.mark.slow
def test_the_shim_is_a_wheel_of_its_own(built: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(next(built.glob("mindspeed_mm_megatron_shim-*.whl"))) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert names == {"mindspeed_mm_megatron_shim.py", "mindspeed_mm_megatron_shim.pth"}
