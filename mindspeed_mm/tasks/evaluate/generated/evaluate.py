"""`mm evaluate --generated`: measures a folder of generated pictures and clips, against real ones and their prompts."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from mindspeed_mm.core.artifacts import DRAWN_MANIFEST, SAMPLES_MANIFEST, atomic_write_text, make_writable_folder
from mindspeed_mm.core.errors import DataError, UsageError
from mindspeed_mm.core.file_writing import any_of, check_output_file, is_object_of
from mindspeed_mm.tasks.evaluate.folder import Facts, results_folder
from mindspeed_mm.tasks.evaluate.generated import vbench
from mindspeed_mm.tasks.evaluate.generated.encoders import Clip, Dino
from mindspeed_mm.tasks.evaluate.generated.measures import Measured, frechet_distance, kernel_distance, mean_of, told
from mindspeed_mm.tasks.evaluate.generated.motion import Flow, consistency_of, flow_of, motion_of
from mindspeed_mm.tasks.evaluate.generated.pairs import Lpips, likeness
from mindspeed_mm.tasks.evaluate.generated.samples import Samples, find_samples, is_clip, prompts_of
from mindspeed_mm.tasks.requests.evaluate import FRAMES_AT_A_TIME, EvaluateRequest, names_of

RESULTS = "generated.json"
_OPTIONAL = ("reference", "features", "given_features", "lpips", "dino", "flow", "vbench")
_COUNTED = ("pictures", "clips", "real", "pairs")
_is_results = any_of(
    *(
        is_object_of(("measures", "counted", "folder"), _OPTIONAL, "counted", counted)
        for counted in (_COUNTED, ("pictures", "real", "pairs"))  # those of earlier releases had no clips
    )
)


@dataclass(frozen=True)
class GeneratedResult:
    """Measure → what was found, and what was measured."""

    measures: dict[str, Measured]
    facts: Facts

    def to_dict(self) -> dict[str, object]:
        """Return the content of `generated.json`: the measures, and the facts about what was measured."""
        return {"measures": self.measures, **self.facts}

    def lines(self) -> list[str]:
        """Return one line of text per measure. A further line explains why there is no CLIP score where only the
        prompts are missing."""
        lines = [told(name, one) for name, one in self.measures.items()]
        if "features" in self.facts and "CLIP score" not in self.measures:
            none = f"none, no {SAMPLES_MANIFEST} or {DRAWN_MANIFEST} tells the prompts of these samples"
            lines.append(f"CLIP score: {none}")
        return lines


@dataclass(frozen=True)
class _Found:
    """The samples of the folders."""

    own: Samples
    real: Samples
    prompts: Mapping[str, str]

    @property
    def pairs(self) -> list[tuple[Path, Path]]:
        """Generated and real ones of the same name."""
        return [(path, self.real[name]) for name, path in self.own.items() if name in self.real]

    @property
    def clips(self) -> list[Path]:
        """Paths of the generated samples that are clips, not pictures."""
        return [path for path in self.own.values() if is_clip(path)]

    def counted(self) -> dict[str, int]:
        """Return the numbers of generated pictures, clips, real samples and pairs, for `generated.json`."""
        clips = len(self.clips)
        return {"pictures": len(self.own) - clips, "clips": clips, "real": len(self.real), "pairs": len(self.pairs)}


def run(request: EvaluateRequest) -> GeneratedResult:
    """Measure, and write `generated.json`.

    Raises:
        UsageError: There is nothing to measure by, or no sample; or an option has nothing to measure.
        ModelFolderError: The folder of CLIP or DINO holds another model.
        DataError: A sample cannot be read.
        MachineError: LPIPS or VBench is not installed.
    """
    out = request.out or results_folder(None, request.folder)
    check_output_file(out / RESULTS, _is_results, "--out")
    own = find_samples(request.folder, "MODEL")
    real: Samples = {}
    if request.reference is not None:
        real = find_samples(request.reference, "--reference")
    found = _Found(own, real, prompts_of(request.folder, own))
    _check_has_something_to_measure(request, found)
    measures: dict[str, Measured] = {}
    measures |= _of_pairs(request, found)
    measures |= _by_clip_model(request, found)
    measures |= _of_given_features(request, found)
    measures |= _of_motion(request, found)
    facts = {"counted": found.counted(), **_named(request)}
    if dimensions := names_of(request.vbench):
        scores, version = vbench.measure(found.own, found.prompts, dimensions, request.vbench_python)
        measures |= scores
        facts["vbench"] = version
    result = GeneratedResult(measures, facts)
    make_writable_folder(out)
    atomic_write_text(out / RESULTS, json.dumps(result.to_dict(), indent=2, ensure_ascii=False) + "\n")
    return result


def _check_has_something_to_measure(request: EvaluateRequest, found: _Found) -> None:
    for key, given in (("--dino", request.dino), ("--flow", request.flow), ("--vbench", request.vbench)):
        if given and not found.clips:
            raise UsageError("needs video clips, but the samples contain none", key=key, way_out="Leave it out.")
    if request.lpips is not None and not found.pairs:
        way_out = "Give real pictures of the same names: --reference FOLDER."
        raise UsageError(
            "needs generated and real pictures of the same names, but there are none", key="--lpips", way_out=way_out
        )
    if request.reference is not None and not found.pairs and request.clip is None:
        raise UsageError(
            "none of its files has the name of a generated one",
            where=str(request.reference),
            key="--reference",
            way_out="Name the real files like the generated ones, or give --clip for distances of distributions.",
        )
    by_clip_model = request.clip is not None and (found.prompts or found.real)
    if found.clips or found.pairs or by_clip_model or request.features or request.reference_features:
        return
    raise UsageError(
        "there is nothing to measure the pictures by",
        where=str(request.folder),
        way_out="Give real pictures (--reference), a CLIP model (--clip) for pictures whose prompts are known, or "
        "features of both kinds of pictures (--features, --reference-features).",
    )


def _named(request: EvaluateRequest) -> dict[str, str | list[str]]:
    """The folders and files that it was measured with."""
    paths = {
        "folder": request.folder,
        "reference": request.reference,
        "features": request.clip,
        "lpips": request.lpips,
        "dino": request.dino,
        "flow": request.flow,
    }
    named: dict[str, str | list[str]] = {}
    for key, path in paths.items():
        if path is not None:
            named[key] = str(path.absolute())
    if request.features is not None and request.reference_features is not None:
        named["given_features"] = [str(path.absolute()) for path in (request.features, request.reference_features)]
    return named


def _of_pairs(request: EvaluateRequest, found: _Found) -> dict[str, Measured]:
    if not found.pairs:
        return {}
    lpips = None
    if request.lpips is not None:
        lpips = Lpips(request.lpips)
    return likeness(found.pairs, lpips)


def _by_clip_model(request: EvaluateRequest, found: _Found) -> dict[str, Measured]:
    """Scores of prompts, consistency of clips, and distances of distributions; of clips frame by frame."""
    if request.clip is None:
        return {}
    clip = Clip(request.clip, request.batch_size or FRAMES_AT_A_TIME)
    features = dict(zip(found.own, clip.of_samples(list(found.own.values())), strict=True))
    measures: dict[str, Measured] = {}
    if found.prompts:
        texts = clip.of_texts(list(found.prompts.values()))
        scores = []
        for name, text_F in zip(found.prompts, texts, strict=True):
            scores.append(_clip_score(features[name], text_F))
        measures["CLIP score"] = mean_of(scores)
    moving = []
    for name, path in found.own.items():
        if is_clip(path) and len(features[name]) > 1:
            moving.append(features[name])
    if moving:
        measures["consistency of CLIP features"] = consistency_of(moving)
    own_NF = torch.cat(list(features.values()))
    if len(own_NF) > 1 and found.real:
        real_NF = torch.cat(clip.of_samples(list(found.real.values())))
        if len(real_NF) > 1:
            measures |= _distances(own_NF, real_NF, "CLIP features")
    return measures


def _clip_score(frames_TF: torch.Tensor, text_F: torch.Tensor) -> float:
    """Mean over frames of 100 · cosine, none below 0 (Hessel et al. 2021, arXiv 2104.08718, without its factor)."""
    cosines_T = torch.cosine_similarity(frames_TF.double(), text_F.double(), dim=-1)
    return float((100 * cosines_T.clamp(min=0)).mean())


def _distances(own_NF: torch.Tensor, real_NF: torch.Tensor, of: str) -> dict[str, Measured]:
    return {
        f"Fréchet distance of {of}": {"value": frechet_distance(own_NF, real_NF)},
        f"kernel distance of {of}": {"value": kernel_distance(own_NF, real_NF)},
    }


def _of_given_features(request: EvaluateRequest, found: _Found) -> dict[str, Measured]:
    """Distances of features that are given; nothing where none are."""
    files = {"--features": request.features, "--reference-features": request.reference_features}
    lacking = [key for key, path in files.items() if path is None]
    if len(lacking) == 1:
        raise UsageError(
            "is not given, and the other features are", key=lacking[0], way_out="Name both files, or none."
        )
    if request.features is None or request.reference_features is None:
        return {}
    features, real = _read_pair(request.features, request.reference_features)
    if len(features) != len(found.own):
        kind = "clips" if len(found.clips) == len(found.own) else "pictures"
        what = f"holds features of {len(features)} {kind}, and there are {len(found.own)}"
        way_out = "Write one row for each, in the order of their names."
        raise DataError(what, where=str(request.features), key="--features", way_out=way_out)
    return _distances(features, real, "given features")


def _of_motion(request: EvaluateRequest, found: _Found) -> dict[str, Measured]:
    """Of the generated clips, if there are some."""
    if not found.clips:
        return {}
    measures = motion_of(found.clips)
    if request.dino is not None:
        features = Dino(request.dino, request.batch_size or FRAMES_AT_A_TIME).of_samples(found.clips)
        measures["consistency of DINO features"] = consistency_of(features)
    if request.flow is not None:
        measures |= flow_of(found.clips, Flow(request.flow))
    return measures


# --- given features ---------------------------------------------------------------------------------------------------
# Features of pictures that somebody else has computed, such as Inception's, for FID and KID as papers have them.

_FEWEST = 2
"""Rows that a covariance and an unbiased estimate take."""


def _read_features(path: Path, key: str) -> torch.Tensor:
    """The array of a `.npy` file, or the only one of a `.npz` file: a row for each picture, (N, F), in fp64.

    Args:
        path: The file. Nothing is unpickled.
        key: The option that names it.

    Raises:
        DataError: It is no such file, has another shape, fewer than two rows, or numbers that are not finite.
    """
    try:
        found = np.load(path, allow_pickle=False)
        if not isinstance(found, np.ndarray):
            with found:
                (found,) = (found[name] for name in found.files)
        # "safe": complex numbers and texts are refused
        features_NF = torch.from_numpy(found.astype(np.float64, casting="safe"))
    except (OSError, ValueError, TypeError, EOFError, zipfile.BadZipFile) as error:
        what = "is not a file of one array of numbers"
        raise DataError(what, where=str(path), key=key, way_out="Write one with numpy.save.") from error
    if features_NF.ndim != 2 or len(features_NF) < _FEWEST or not features_NF.isfinite().all():
        shape = "×".join(map(str, features_NF.shape))
        what = f"holds an array of {shape}; features are finite numbers, a row for each of two pictures or more"
        raise DataError(what, where=str(path), key=key, way_out="Write such an array with numpy.save.")
    return features_NF


def _read_pair(own: Path, real: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Features of generated and of real pictures, (N, F) and (M, F).

    Raises:
        DataError: A file is none of features, or they are of different widths.
    """
    a_NF, b_MF = _read_features(own, "--features"), _read_features(real, "--reference-features")
    if a_NF.shape[1] != b_MF.shape[1]:
        what = f"has features of width {b_MF.shape[1]}, and '{own}' of {a_NF.shape[1]}"
        raise DataError(what, where=str(real), key="--reference-features", way_out="Compute both with one model.")
    return a_NF, b_MF
