"""`mm evaluate --generated`: measures a folder of generated pictures against real ones and against their prompts."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from mindspeed_mm.core.artifacts import (
    DRAWN_MANIFEST,
    SAMPLES_MANIFEST,
    atomic_write_text,
    make_writable_folder,
    read_jsonl,
)
from mindspeed_mm.core.errors import DataError, ModelFolderError, UsageError
from mindspeed_mm.core.file_writing import check_output_file, is_object_of
from mindspeed_mm.core.json_file import read_json_object
from mindspeed_mm.fsdp.data.data_utils.media import MediaLoader
from mindspeed_mm.fsdp.sampling.answers.scoring import bootstrap_interval
from mindspeed_mm.fsdp.utils.device import current_device
from mindspeed_mm.fsdp.utils.processor import load_processor
from mindspeed_mm.tasks.evaluate.folder import results_folder
from mindspeed_mm.tasks.evaluate.generated.given_features import read_pair
from mindspeed_mm.tasks.evaluate.generated.measures import frechet_distance, kernel_distance, psnr, ssim

RESULTS = "generated.json"
_ENDINGS = (".png", ".jpg", ".jpeg", ".webp")
_is_results = is_object_of(
    ("measures", "counted", "folder"),
    ("reference", "features", "given_features"),
    "counted",
    ("pictures", "real", "pairs"),
)


@dataclass(frozen=True)
class GeneratedRequest:
    """What is measured.

    Args:
        folder: The generated pictures, with the `samples.jsonl` or `manifest.jsonl` of their prompts, if any.
        reference: Real pictures: of the same names for likeness, any for the distances.
        clip: Folder of a CLIP model.
        features: File of features of the generated pictures, as `read_features` takes it.
        reference_features: File of those of the real ones.
        out: Where `generated.json` goes; None: as `results_folder` says.
        batch_size: Pictures that go through CLIP together.
    """

    folder: Path
    reference: Path | None = None
    clip: Path | None = None
    features: Path | None = None
    reference_features: Path | None = None
    out: Path | None = None
    batch_size: int = 32


@dataclass(frozen=True)
class GeneratedResult:
    """Measure → its `value`, and for means `low` and `high`, the bounds of a 95 % interval; and what was measured."""

    measures: dict[str, dict[str, Any]]
    facts: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """What `generated.json` holds."""
        return {"measures": self.measures, **self.facts}

    def lines(self) -> list[str]:
        """For people."""
        told = []
        for name, one in self.measures.items():
            value = "infinite" if one["value"] is None else f"{one['value']:.5g}"
            interval = f" (n={one['n']}, 95 % interval {one['low']:.5g} to {one['high']:.5g})" if "low" in one else ""
            told.append(f"{name}: {value}{interval}")
        if "features" in self.facts and "CLIP score" not in self.measures:
            none = f"none, no {SAMPLES_MANIFEST} or {DRAWN_MANIFEST} tells the prompts of these pictures"
            told.append(f"CLIP score: {none}")
        return told


def run(request: GeneratedRequest) -> GeneratedResult:
    """Measure, and write `generated.json`.

    Raises:
        UsageError: There is nothing to measure by, or no picture.
        ModelFolderError: The folder of CLIP holds another model.
        DataError: A picture cannot be read.
    """
    out = request.out or results_folder(None, request.folder)
    check_output_file(out / RESULTS, _is_results, "--out")
    own = _pictures(request.folder, "MODEL")
    real = _pictures(request.reference, "--reference") if request.reference is not None else {}
    prompts = _prompts(request.folder, own) if request.clip is not None else {}
    measures, given = _of_given_features(request, own)
    if not real and not prompts and not measures:
        raise UsageError(
            "there is nothing to measure the pictures by",
            where=str(request.folder),
            way_out="Give real pictures (--reference), a CLIP model (--clip) for pictures whose prompts are known, or "
            "features of both kinds of pictures (--features, --reference-features).",
        )
    pairs = [(own[name], real[name]) for name in own if name in real]
    counted = {"pictures": len(own), "real": len(real), "pairs": len(pairs)}
    facts: dict[str, Any] = {"counted": counted, "folder": str(request.folder.absolute()), **given}
    measures |= _likeness(pairs) if pairs else {}
    if request.reference is not None:
        facts |= {"reference": str(request.reference.absolute())}
    if request.clip is not None:
        clip = Clip(request.clip, request.batch_size)
        facts |= {"features": str(request.clip.absolute())}
        measures |= _by_clip(clip, own, real, prompts)
    if not measures:
        raise UsageError(
            "no picture of it has the name of a generated one",
            where=str(request.reference),
            key="--reference",
            way_out="Name the real pictures as the generated ones, or give --clip for distances of distributions.",
        )
    result = GeneratedResult(measures, facts)
    make_writable_folder(out)
    atomic_write_text(out / RESULTS, json.dumps(result.to_dict(), indent=2, ensure_ascii=False) + "\n")
    return result


class Clip:
    """A local CLIP model: features of pictures and of texts.

    Args:
        folder: As transformers has it.
        batch_size: Pictures at a time.
    """

    def __init__(self, folder: Path, batch_size: int) -> None:
        config = folder / "config.json"
        if not config.is_file() or read_json_object(config, ModelFolderError).get("model_type") != "clip":
            raise ModelFolderError("holds no CLIP model", where=str(folder), key="--clip")
        self._folder, self._batch_size = folder, batch_size
        self._processor: Any = load_processor(folder, use_fast=False)

    @cached_property
    def _model(self) -> Any:
        from transformers import CLIPModel  # seconds

        return CLIPModel.from_pretrained(self._folder, local_files_only=True).to(current_device()).eval()

    def of_pictures(self, paths: Sequence[Path]) -> torch.Tensor:
        """(N, F), not normalised."""
        return self._features(paths, lambda batch: self._model.get_image_features(**self._shown(batch)))

    def of_texts(self, texts: Sequence[str]) -> torch.Tensor:
        """(N, F), not normalised; a text is cut at the model's longest."""
        return self._features(texts, lambda batch: self._model.get_text_features(**self._read(batch)))

    def _shown(self, batch: Sequence[Path]) -> Any:
        pictures = [_load(path) for path in batch]
        return self._processor(images=pictures, return_tensors="pt").to(current_device())

    def _read(self, batch: Sequence[str]) -> Any:
        options = {"padding": True, "truncation": True, "return_tensors": "pt"}
        return self._processor(text=list(batch), **options).to(current_device())

    @torch.inference_mode()
    def _features(self, items: Sequence[Any], features: Callable[[Sequence[Any]], Any]) -> torch.Tensor:
        found = [features(items[start:][: self._batch_size]) for start in range(0, len(items), self._batch_size)]
        # A tensor until transformers 5, an output object that holds it since.
        return torch.cat([each if isinstance(each, torch.Tensor) else each.pooler_output for each in found]).cpu()


def _by_clip(clip: Clip, own: dict[str, Path], real: dict[str, Path], prompts: dict[str, str]) -> dict[str, Any]:
    features = clip.of_pictures(list(own.values()))
    measures: dict[str, Any] = {}
    if prompts:
        texts = clip.of_texts([prompts[name] for name in prompts])
        places = [list(own).index(name) for name in prompts]
        likeness = torch.cosine_similarity(features[places].double(), texts.double())
        measures["CLIP score"] = _mean((100 * likeness.clamp(min=0)).tolist())
    if min(len(own), len(real)) > 1:
        real_features = clip.of_pictures(list(real.values()))
        measures["Fréchet distance of CLIP features"] = {"value": frechet_distance(features, real_features)}
        measures["kernel distance of CLIP features"] = {"value": kernel_distance(features, real_features)}
    return measures


def _of_given_features(request: GeneratedRequest, own: dict[str, Path]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Distances of features that are given, and the files that they stand in; nothing where none are."""
    files = {"--features": request.features, "--reference-features": request.reference_features}
    lacking = [key for key, path in files.items() if path is None]
    if len(lacking) == 1:
        raise UsageError(
            "is not given, and the other features are", key=lacking[0], way_out="Name both files, or none."
        )
    if request.features is None or request.reference_features is None:
        return {}, {}
    features, real = read_pair(request.features, request.reference_features)
    if len(features) != len(own):
        what = f"holds features of {len(features)} pictures, and there are {len(own)}"
        raise DataError(what, where=str(request.features), key="--features")
    measures = {
        "Fréchet distance of given features": {"value": frechet_distance(features, real)},
        "kernel distance of given features": {"value": kernel_distance(features, real)},
    }
    return measures, {"given_features": [str(path.absolute()) for path in files.values() if path is not None]}


def _likeness(pairs: Sequence[tuple[Path, Path]]) -> dict[str, Any]:
    values = list(_pair_values(pairs))
    return {name: _mean([value[place] for value in values]) for place, name in enumerate(("PSNR", "SSIM"))}


def _pair_values(pairs: Sequence[tuple[Path, Path]]) -> Iterator[tuple[float, float]]:
    for own, real in pairs:
        a, b = (torch.from_numpy(np.asarray(_load(path)).copy()).permute(2, 0, 1) / 255.0 for path in (own, real))
        try:
            if a.shape != b.shape:
                raise ValueError(f"has {a.shape[2]}×{a.shape[1]} pixels, and '{real}' {b.shape[2]}×{b.shape[1]}")
            yield psnr(a, b), ssim(a, b)
        except ValueError as error:
            raise DataError(str(error), where=str(own), way_out="Make pictures of the same size.") from error


def _mean(values: Sequence[float]) -> dict[str, Any]:
    if not all(map(math.isfinite, values)):  # JSON has no infinity
        return {"value": None, "n": len(values)}
    array = np.array(values)
    low, high = bootstrap_interval(array, np.ones(len(array)))
    return {"value": float(array.mean()), "n": len(array), "low": low, "high": high}


def _pictures(folder: Path, key: str) -> dict[str, Path]:
    """Relative name without its ending → file."""
    found = sorted(path for path in folder.rglob("*") if path.suffix.lower() in _ENDINGS) if folder.is_dir() else []
    if not found:
        raise UsageError(f"is not a folder with pictures ({', '.join(_ENDINGS)})", where=str(folder), key=key)
    return {str(path.relative_to(folder).with_suffix("")): path for path in found}


def _prompts(folder: Path, pictures: dict[str, Path]) -> dict[str, str]:
    """Name → prompt, of pictures that a manifest beside them tells of."""
    names = {path.resolve(): name for name, path in pictures.items()}
    found = {}
    for manifest in sorted(path for name in (SAMPLES_MANIFEST, DRAWN_MANIFEST) for path in folder.rglob(name)):
        for entry in read_jsonl(manifest):
            name = names.get((manifest.parent / str(entry.get("file", ""))).resolve())
            if name is not None and isinstance(entry.get("prompt"), str):
                found[name] = entry["prompt"]
    return found


def _load(path: Path) -> Image.Image:
    return MediaLoader(path.parent).load_image(path.name)
