"""VBench by its own package, which has an environment of its own and models that it downloads itself.

Interface: `VBench(device, full_info_json, out).evaluate(…, mode="custom_input")` writes `<name>_eval_results.json`, of
each dimension its score and that of each clip (vbench 0.1.5).
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mindspeed_mm.core.errors import DataError, MachineError, UsageError
from mindspeed_mm.core.json_file import read_json_object
from mindspeed_mm.tasks.evaluate.generated.figures import Measured, mean_of
from mindspeed_mm.tasks.evaluate.generated.samples import Samples, is_clip
from mindspeed_mm.tasks.evaluate.outside import Call, Wanted, find_outside

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
"""Dimensions that VBench measures of any clips; its other six are bound to its own prompts."""
_OF_PROMPTS = ("human_action", "temporal_style", "overall_consistency")
_WANTED = Wanted("VBench", "vbench", "--vbench-python", "pip install vbench")
_NAME = "clips"
_DRIVER = """
import json, pathlib, sys
import torch, vbench

asked = json.loads(pathlib.Path(sys.argv[1]).read_text())
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
info = pathlib.Path(vbench.__file__).parent / "VBench_full_info.json"
options = {"imaging_quality_preprocessing_mode": "longer"}
vbench.VBench(device, str(info), asked["out"]).evaluate(
    videos_path=asked["clips"], name=asked["name"], prompt_list=asked["prompts"],
    dimension_list=asked["dimensions"], mode="custom_input", **options,
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
    package = find_outside(_WANTED, python)
    with tempfile.TemporaryDirectory() as place:
        asked, written = _prepare(Path(place), clips, known, dimensions)
        driver = Path(place) / "driver.py"
        driver.write_text(_DRIVER, encoding="utf-8")
        code = package.run(Call(driver, [str(asked)]))
        if not written.is_file():
            what = f"VBench ended with exit code {code} and has written no results"
            raise MachineError(what, key="--vbench", way_out="What it printed above says why.")
        found = read_json_object(written, DataError)
    return {f"VBench {name}": _measured(*found[name]) for name in dimensions}, package.version


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


def _prepare(place: Path, clips: Samples, known: Mapping[str, str], dimensions: Sequence[str]) -> tuple[Path, Path]:
    """A folder as VBench wants it, one file a clip, and what it is asked; returns that file and that of the results."""
    folder = place / "clips"
    folder.mkdir()
    prompts = {}
    for number, (name, path) in enumerate(clips.items()):
        link = folder / f"{number:06}{path.suffix.lower()}"
        link.symlink_to(path.resolve())
        prompts[link.name] = known.get(name, Path(name).name)
    asked = {"clips": str(folder), "out": str(place), "name": _NAME, "dimensions": list(dimensions), "prompts": prompts}
    file = place / "asked.json"
    file.write_text(json.dumps(asked), encoding="utf-8")
    return file, place / f"{_NAME}_eval_results.json"


def _measured(score: float, by_clip: Sequence[Mapping[str, Any]]) -> Measured:
    """VBench's own score, with the interval of its clips."""
    interval = mean_of([float(clip["video_results"]) for clip in by_clip])
    return interval | {"value": float(score)}
