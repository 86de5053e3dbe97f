"""The Dockerfiles: the versions are those of pyproject.toml and the constraints, what they copy is there and is sent to
the daemon, the shell reads their commands; slow: the steps of the CPU file in an empty environment of Python."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
PAGE = (ROOT / "docs" / "docker.md").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@dataclass
class Dockerfile:
    """The instructions of a file in their order, and the defaults of its arguments."""

    arguments: dict[str, str] = field(default_factory=dict)
    steps: list[tuple[str, str]] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> Dockerfile:
        lines = [line for line in path.read_text().splitlines() if line.strip() and not line.startswith("#")]
        found = cls()
        for line in "\n".join(lines).replace("\\\n", " ").splitlines():
            word, _, rest = line.partition(" ")
            assert word.isupper(), line
            if word == "ARG":
                name, _, default = rest.partition("=")
                found.arguments[name] = default
            found.steps.append((word, rest))
        return found

    def of(self, word: str) -> list[str]:
        """What follows an instruction, wherever it stands, with the arguments filled in."""
        return [self.filled(rest) for step, rest in self.steps if step == word]

    def filled(self, text: str) -> str:
        return re.sub(r"\$\{(\w+)\}", lambda found: self.arguments.get(found[1], found[0]), text)


def pins(name: str) -> dict[str, str]:
    lines = [line for line in (ROOT / name).read_text().splitlines() if line and not line.startswith("#")]
    return {canonicalize_name(package): version for package, version in (line.split("==") for line in lines)}


def test_there_is_a_file_for_each_device_and_the_page_shows_it() -> None:
    assert [path.name for path in FILES] == ["cpu.Dockerfile", "cuda.Dockerfile", "npu.Dockerfile"]
    for path in FILES:
        assert f"docker build -f docker/{path.name} -t" in PAGE and f"docker build -f docker/{path.name} -t" in (
            path.read_text()
        )


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_versions_are_those_of_the_project(path: Path) -> None:
    file = Dockerfile.read(path)
    (base,) = file.of("FROM")
    (python,) = re.findall(r"py(?:thon:)?(3\.\d+)", base)
    assert python in SpecifierSet(PROJECT["requires-python"])
    assert f"Programming Language :: Python :: {python}" in PROJECT["classifiers"]
    (constraints,) = [rest.split()[0] for rest in file.of("COPY") if rest.startswith("constraints")]
    if constraints == "constraints-floor.txt":  # whose first line names its Python
        assert f"Python {python}" in (ROOT / constraints).read_text().replace("\n#", "").split("torch==")[0]
    assert not re.findall(r"\b[\w-]+(?:==|>=)\d", path.read_text()), "versions are of the constraints alone"
    installs = [step for step in file.of("RUN") if "pip install" in step]
    assert len(installs) >= 2 and all(step.endswith("-c constraints.txt") for step in installs)
    (extras,) = re.findall(r'"\.\[([\w,]+)\]"', installs[-1])
    assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])


def test_torch_npu_is_the_one_of_torch(tmp_path: Path) -> None:
    file = Dockerfile.read(ROOT / "docker" / "npu.Dockerfile")
    (step,) = [each for each in file.of("RUN") if "torch_npu" in each]
    shutil.copy(ROOT / file.arguments["CONSTRAINTS"], tmp_path / "constraints.txt")
    command = step.replace("python3 -m pip", "echo")
    said = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert f"torch_npu=={pins(file.arguments['CONSTRAINTS'])['torch']}.*" in said.split()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_what_is_copied_is_there_and_is_sent_to_the_daemon(path: Path) -> None:
    sent = set(re.findall(r"^!(\S+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE))
    for rest in Dockerfile.read(path).of("COPY"):
        *sources, _ = rest.split()
        for source in sources:
            assert (ROOT / source).exists() and source in sent, source
    copied = {source for rest in Dockerfile.read(path).of("COPY") for source in rest.split()[:-1]}
    assert {PROJECT["readme"], "pyproject.toml", *PROJECT["license-files"]} <= copied  # the build reads them


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_shell_reads_every_command(path: Path) -> None:
    file = Dockerfile.read(path)
    commands = [*file.of("RUN"), *(re.findall(r'"-c", "((?:[^"\\]|\\.)*)"', "".join(file.of("ENTRYPOINT"))))]
    for command in commands:
        text = command.replace('\\"', '"')
        assert subprocess.run(["bash", "-n", "-c", text], capture_output=True, check=False).returncode == 0, text
    assert subprocess.run(["bash", "-n", "-c", "for x in a; do"], capture_output=True, check=False).returncode != 0


def test_the_page_explains_every_flag_that_it_uses() -> None:
    blocks = re.findall(r"```sh\n(.*?)```", PAGE, flags=re.DOTALL)
    used = {flag for block in blocks for flag in re.findall(r"(?<=\s)(--[a-z-]+|-v)\b", block)}
    explained = {flag for row in re.findall(r"^\| .*", PAGE, re.MULTILINE) for flag in re.findall(r"`(-[\w-]+)", row)}
    of_course = {"--rm", "--nproc"}
    assert used - of_course - explained <= {"--gpus"}  # its paragraph explains it
    assert "`--gpus '\"device=0,1\"'`" in PAGE


@pytest.mark.slow
def test_the_steps_of_the_cpu_file(tmp_path: Path) -> None:
    """COPY and pip, in a folder and an environment that are empty; TORCH_INDEX may name another index of CPU builds."""
    file = Dockerfile.read(ROOT / "docker" / "cpu.Dockerfile")
    image = tmp_path / "image"
    image.mkdir()
    (base,) = file.of("FROM")
    named = f"python{base.partition(':')[2].partition('-')[0]}"
    is_there = shutil.which(named) and subprocess.run([named, "-V"], capture_output=True, check=False).returncode == 0
    python = named if is_there else sys.executable
    subprocess.run([python, "-m", "venv", str(tmp_path / "env")], check=True)
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    variables["PATH"] = f"{tmp_path / 'env' / 'bin'}:{variables['PATH']}"
    file.arguments["TORCH_INDEX"] = os.environ.get("TORCH_INDEX", file.arguments["TORCH_INDEX"])
    done = []
    for word, rest in file.steps:
        text = file.filled(rest)
        if word == "COPY":
            *sources, target = text.split()
            for source in sources:
                place = image / target if target == source else image / target / Path(source).name
                if (ROOT / source).is_dir():
                    shutil.copytree(ROOT / source, place, ignore=shutil.ignore_patterns("__pycache__"))
                else:
                    shutil.copy(ROOT / source, place)
        elif word == "RUN" and "pip install" in text:
            ran = subprocess.run(
                ["bash", "-c", text],
                cwd=image,
                env=variables,
                capture_output=True,
                text=True,
                check=False,
                timeout=3000,
            )
            if ran.returncode and "NewConnectionError" in ran.stderr:
                pytest.skip("no package index can be reached")
            assert ran.returncode == 0, ran.stderr[-3000:]
        done.append(word)
    assert done.count("COPY") == 3
    (entry,) = file.of("ENTRYPOINT")
    program = tmp_path / "env" / "bin" / shlex.split(entry.strip("[]"))[0]
    work = tmp_path / "workspace"
    work.mkdir()
    for words, code in ((["--help"], 0), (["doctor"], 0), (["quickstart", "/dev/null"], 2)):
        ran = subprocess.run(
            [str(program), *words], cwd=work, env=variables, capture_output=True, text=True, check=False, timeout=600
        )
        assert ran.returncode == code and "Traceback" not in ran.stderr, (words, ran.stdout, ran.stderr)
