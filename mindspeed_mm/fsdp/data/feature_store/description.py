"""`features.json`: what made a feature set. Work goes on only with the same, training only with what fits its model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mindspeed_mm.core.artifacts import atomic_write_text
from mindspeed_mm.core.errors import DataError, Problem
from mindspeed_mm.core.json_file import parse_json
from mindspeed_mm.fsdp.data.feature_store.provenance import Components, component_problems, from_json
from mindspeed_mm.fsdp.models.diffusion.adapter import DiffusionAdapter

FORMAT = "mindspeed-mm-features"
FORMAT_VERSION = 2
"""Before 2, the checksums of tensors were SHA-256."""


@dataclass(frozen=True)
class FeatureSetContents:
    """What a finished set holds."""

    samples: int
    skipped: int
    shards: Mapping[str, int]
    """File → bytes."""
    cut_captions: int = 0
    """Rows with a caption of which the text encoder did not read the end."""
    empty_captions: int = 0
    """Rows with an empty caption."""


@dataclass(frozen=True)
class Description:
    """Content of `features.json`: what a feature set was made of, by which encoders and settings."""

    family: str
    """Class of the transformer that the features are for."""
    task: str
    geometry: Mapping[str, Any]
    """Geometry of the VAE and the transformer, see `MediaGeometry`."""
    model_folder: str
    """Where the encoders were."""
    components: Components
    preprocessing: Mapping[str, Any]
    """What decides which pixels are made of a medium."""
    dtype: str | None
    """That encoders were run in; None: each as its folder stores it. With how they were quantised, where they were."""
    batch_size: int | None
    """Samples encoded at a time; None: by their pixels."""
    rows: int
    rows_fingerprint: str
    """Fingerprint of media, captions, further columns and sizes, in their order."""
    versions: Mapping[str, str] = field(default_factory=dict)
    component_configs: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    """What sizes follow from, for folders that lack the component: `vae` → its config.json."""
    contents: FeatureSetContents | None = None
    """None while it is not finished."""
    first_batch: int = 0
    """Number of the first batch of the latest work; those before it are of rows as they were earlier."""
    plan: str = ""
    """Hash of what the latest work encodes; empty: every row."""
    format: str = FORMAT
    format_version: int = FORMAT_VERSION

    def write(self, path: Path) -> None:
        """Whole or not at all."""
        atomic_write_text(path, json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n")


def read_description(path: Path) -> Description:
    """Read and check `features.json`.

    Raises:
        DataError: It is missing, broken, of another kind, or of a newer version.
    """
    try:
        content = parse_json(path.read_bytes())
        if content.get("format") != FORMAT:
            raise ValueError(f"its format is {content.get('format')!r}")
        _check_version(content, path)
        contents = content.get("contents")
        return Description(
            **content
            | {
                "components": from_json(content["components"]),
                "contents": None if contents is None else FeatureSetContents(**contents),
            }
        )
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", where=str(path)) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"describes no features ({error})", where=str(path), way_out="Run mm extract with --overwrite."
        ) from error


def check_same_work(before: Description, now: Description, path: Path) -> None:
    """Raise `DataError` that names what differs, when features were begun by other encoders or in another way. Other
    rows and other sizes are work that is added."""
    problems = [Problem(what, key=key, where=str(path)) for key, what in _differences(before, now)]
    problems += component_problems(before.components, now.components, Path(now.model_folder))
    if problems:
        raise DataError(
            "features were begun with something else; undo the change, or make them all again with --overwrite",
            problems=problems,
        )


def check_fits(description: Description, adapter: DiffusionAdapter, path: Path) -> None:
    """Raise `DataError` when features are for another family, another task or latents of another kind."""
    mine = {"family": adapter.transformer_class, "task": adapter.task, **_numbers(asdict(adapter.geometry))}
    theirs = {"family": description.family, "task": description.task, **_numbers(description.geometry)}
    for name in mine:
        if mine[name] != theirs.get(name):
            raise DataError(
                f"features are for {name} {theirs.get(name)}, the model has {mine[name]}",
                where=str(path),
                key="data.dataset_param.basic_parameters.features_dir",
                way_out=f"They were made with {description.model_folder}: train that model, or run mm extract into "
                "another folder.",
            )


def _check_version(content: Mapping[str, Any], path: Path) -> None:
    version = content.get("format_version")
    if not isinstance(version, int) or version > FORMAT_VERSION:
        raise DataError(
            f"has format version {version}, this installation reads up to {FORMAT_VERSION}",
            where=str(path),
            key="format_version",
            way_out="Update mindspeed-mm.",
        )


def _differences(before: Description, now: Description) -> Iterator[tuple[str, str]]:
    for name in ("family", "task", "dtype", "batch_size"):
        was, new = getattr(before, name), getattr(now, name)
        if was != new:
            yield name, f"{_plain(was)} then, {_plain(new)} now"
    was, new = _numbers(before.geometry), _numbers(now.geometry)
    for name in sorted(was.keys() | new.keys()):
        if was.get(name) != new.get(name):
            yield f"geometry.{name}", f"{_plain(was.get(name))} then, {_plain(new.get(name))} now"


def _plain(value: Any) -> str:
    return "not set" if value is None else str(value)


def _numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    """As JSON gives them back: it has lists, no tuples."""
    plain = dict(values)
    for name, value in values.items():
        if isinstance(value, tuple):
            plain[name] = list(value)
    return plain
