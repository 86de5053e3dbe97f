"""VBench by its own package, which has an environment of its own and models that it downloads itself.

Interface: `VBench(device, full_info_json, out).evaluate(…, mode="custom_input")` writes `<name>_eval_results.json`, of
each dimension its score and that of each clip (vbench 0.1.5). With `mode="vbench_standard"` the clips are of its own
prompts and named `<prompt>-<number>.mp4`.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from mindspeed_mm.core.artifacts import atomic_write_text, make_writable_folder
from mindspeed_mm.core.errors import DataError, MachineError, UsageError
from mindspeed_mm.core.json_file import JsonMapping, JsonObject, read_json_object
from mindspeed_mm.tasks.evaluate.generated.measures import Measured, mean_of
from mindspeed_mm.tasks.evaluate.generated.samples import Samples, is_clip
from mindspeed_mm.tasks.evaluate.outside import Call, OutsidePackage, Wanted, find_outside

OF_ANY_CLIPS = (
    "subject_consistency",
    "background_consistency",
    "temporal_flickering",
    "motion_smoothness",
    "dynamic_degree",
    "aesthetic_quality",
    "imaging_quality",
    "human_action",
    "temporal_style",
    "overall_consistency",
)
"""Dimensions that VBench measures of any clips."""
OF_ITS_PROMPTS = (
    "object_class",
    "multiple_objects",
    "color",
    "spatial_relationship",
    "scene",
    "appearance_style",
)
"""Those that are bound to its own prompts."""
_OF_PROMPTS = ("human_action", "temporal_style", "overall_consistency")
_WANTED = Wanted("VBench", "vbench", "--vbench-python", "pip install vbench")
_NAME = "clips"
OWN_RESULTS = "t2v_eval_results.json"
_DRIVER = """
import json, pathlib, sys
import torch, vbench

asked = json.loads(pathlib.Path(sys.argv[1]).read_text())
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
info = asked["info"] or str(pathlib.Path(vbench.__file__).parent / "VBench_full_info.json")
vbench.VBench(device, info, asked["out"]).evaluate(
    videos_path=asked["clips"], name=asked["name"], prompt_list=asked["prompts"],
    dimension_list=asked["dimensions"], mode=asked["mode"], **asked["options"],
)
"""


def measure(
    samples: Samples, prompts: Mapping[str, str], dimensions: Sequence[str], python: Path | None
) -> tuple[dict[str, Measured], str]:
    """What VBench finds of clips, and its version.

    Args:
        samples: The clips by name; pictures are left out.
        prompts: By name; needed of all where a dimension is about them.
        dimensions: Some of `OF_ANY_CLIPS`.
        python: Of the environment that VBench is installed in; None: this one.

    Raises:
        UsageError: A dimension is none of these, or a prompt is not known.
        MachineError: It is not installed, or has found nothing.
    """
    clips: dict[str, Path] = {}
    known: dict[str, str] = {}
    for name, path in samples.items():
        if is_clip(path):
            clips[name] = path
            if name in prompts:
                known[name] = prompts[name]
    _check(known, list(clips), dimensions)
    package = find_vbench(python)
    with tempfile.TemporaryDirectory() as place:
        written, folder = _asked_folder(Path(place), clips)
        prompts = {link: known.get(name, Path(name).name) for link, name in written.items()}
        options = {"imaging_quality_preprocessing_mode": "longer"}
        asked = {"clips": str(folder), "prompts": prompts, "mode": "custom_input", "info": "", "options": options}
        return _run(package, asked, dimensions, Path(place)), package.version


def measure_own_prompts(
    clips: Path, dimensions: Sequence[str], info: Path | None, out: Path, package: OutsidePackage, *, is_offline: bool
) -> dict[str, Measured]:
    """What VBench finds of clips of its own prompts; `t2v_eval_results.json` in `out` is what it wrote.

    Args:
        clips: Folder of `<prompt>-<number>.mp4`.
        dimensions: Some of `OF_ANY_CLIPS` and `OF_ITS_PROMPTS`.
        info: VBench_full_info.json; None: the package's own.
        out: Folder of the results.
        package: VBench.
        is_offline: Whether its models are taken from its folder of them, and not downloaded.

    Raises:
        MachineError: It has found nothing.
    """
    with tempfile.TemporaryDirectory() as place:
        asked = {
            "clips": str(clips.absolute()),
            "prompts": [],
            "mode": "vbench_standard",
            "info": "" if info is None else str(info.absolute()),
            "options": {"local": is_offline},
        }
        found = _run(package, asked, dimensions, Path(place))
        make_writable_folder(out)
        atomic_write_text(out / OWN_RESULTS, (Path(place) / f"{_NAME}_eval_results.json").read_text(encoding="utf-8"))
        return found


def find_vbench(python: Path | None) -> OutsidePackage:
    """VBench, of the environment of a Python. Errors as of `find_outside`."""
    return find_outside(_WANTED, python)


def _run(package: OutsidePackage, asked: JsonObject, dimensions: Sequence[str], place: Path) -> dict[str, Measured]:
    """Ask, and read what was written into `place`."""
    driver, question = place / "driver.py", place / "asked.json"
    driver.write_text(_DRIVER, encoding="utf-8")
    asked |= {"out": str(place), "name": _NAME, "dimensions": list(dimensions)}
    question.write_text(json.dumps(asked), encoding="utf-8")
    code = package.run(Call(driver, [str(question)]))
    written = place / f"{_NAME}_eval_results.json"
    if not written.is_file():
        what = f"VBench ended with exit code {code} and has written no results"
        raise MachineError(what, key="--vbench", way_out="What it printed above says why.")
    found = read_json_object(written, DataError)
    return {f"VBench {name}": _measured(*found[name]) for name in dimensions}


def _check(known: Mapping[str, str], clips: Sequence[str], dimensions: Sequence[str]) -> None:
    for name in dimensions:
        if name not in OF_ANY_CLIPS:
            way_out = f"Choose among {', '.join(OF_ANY_CLIPS)}."
            raise UsageError(f"'{name}' is no dimension of any clips", key="--vbench", way_out=way_out)
    unknown = [name for name in clips if name not in known]
    about_prompts = [name for name in dimensions if name in _OF_PROMPTS]
    if about_prompts and unknown:
        what = f"{about_prompts[0]} is about prompts, and that of '{unknown[0]}' is not known"
        way_out = "Put a samples.jsonl beside the clips: a line with file and prompt for each."
        raise UsageError(what, key="--vbench", way_out=way_out)


def _asked_folder(place: Path, clips: Samples) -> tuple[dict[str, str], Path]:
    """A folder as VBench wants it, one file a clip: name of the file → that of the clip, and the folder."""
    folder = place / "clips"
    folder.mkdir()
    named = {}
    for number, (name, path) in enumerate(clips.items()):
        # VBench reads prompts out of names; ours are given apart
        link = folder / f"{number:06}{path.suffix.lower()}"
        link.symlink_to(path.resolve())
        named[link.name] = name
    return named, folder


def _measured(score: float, by_clip: Sequence[JsonMapping]) -> Measured:
    """VBench's own score, with the interval of its clips."""
    interval = mean_of([float(clip["video_results"]) for clip in by_clip])
    return interval | {"value": float(score)}
