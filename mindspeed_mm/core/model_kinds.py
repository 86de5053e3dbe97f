"""Kinds of models: what the package does differently for each, asked as facts.

Code reads a fact of `ModelKind`, or finds the function for a kind in a table; a test sees to it that every table has a
row for every kind. Only commands that are for one kind compare kinds, to refuse the others. `docs/architecture.md` says
where a further kind goes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mindspeed_mm.core.errors import ModelFolderError
from mindspeed_mm.core.json_file import read_json_object

GENERATOR_INDEX = "model_index.json"
"""The file that makes a folder one in diffusers' layout."""


@dataclass(frozen=True)
class ModelKind:
    """A kind of model, by the questions that are asked about it."""

    name: str
    title: str
    """Models of this kind, as the help of an option begins."""
    plural: str
    """Models of this kind, in a sentence."""
    singular: str
    """One of them, with its article."""
    library: Literal["transformers", "diffusers"]
    """What loads an exported model and its adapters."""
    has_tokens: bool
    """Whether it is trained on labelled tokens, which have a template, a longest sample and a cross-entropy."""
    casts_inputs: bool
    """Whether a forward's inputs may all be rounded to the type that it computes in."""
    spreads_samples: bool
    """Whether context parallelism spreads the tokens of a sample inside the model, so that every rank computes the loss
    of the whole sample; otherwise it spreads rows, and every rank computes the loss of its own tokens."""
    returns_views: bool
    """Whether blocks return views of one tensor, which nothing writes into."""
    trained_part: str
    """The folder of what is trained, inside a model's folder; empty: all of it is."""
    outline_attention: str | None
    """The attention of a model that is built for its names and shapes alone, on any machine; None: its own."""


LANGUAGE = ModelKind(
    "language",
    title="Language models",
    plural="language models",
    singular="a language model",
    library="transformers",
    has_tokens=True,
    casts_inputs=True,
    spreads_samples=False,
    returns_views=False,
    trained_part="",
    outline_attention="eager",
)
"""Models of transformers, and of plugins, that are trained on tokens."""
GENERATOR = ModelKind(
    "generator",
    title="Generators",
    plural="image and video generators",
    singular="an image or video generator",
    library="diffusers",
    has_tokens=False,
    # All inputs cast together, timesteps and rotary tables would be rounded to bf16, which tells 999 from 1000 no more.
    casts_inputs=False,
    spreads_samples=True,
    returns_views=True,  # blocks cut text and image out of one tensor
    trained_part="transformer",
    outline_attention=None,
)
"""Models that draw pictures and clips."""
UNIFIED = ModelKind(
    "unified",
    title="Unified models",
    plural="models that answer and draw",
    singular="a model that answers and draws",
    library="transformers",
    has_tokens=True,
    casts_inputs=False,  # noise levels and noisy latents, as of generators
    spreads_samples=False,
    returns_views=False,
    trained_part="",
    outline_attention=None,
)
"""Models that answer in words and draw pictures by denoising, in one sequence."""
KINDS = (LANGUAGE, GENERATOR, UNIFIED)
UNIFIED_TYPES = frozenset({"bagel", "internvlu"})
"""`model_type` in the config.json of their folders."""
PIPELINES_OF_UNIFIED = {"InternVLUPipeline": "InternVLUConverter"}
"""Class that the index of a released folder names whose model answers and draws → what writes it as one folder."""

EXPERT_PARTS = ("transformer", "transformer_2")
"""The folders of a generator's two transformers, of much noise and of little, where it has two."""


def expert_folders(folder: Path) -> list[Path]:
    """Both folders of a generator with two transformers; none of any other folder."""
    parts = [folder / name for name in EXPERT_PARTS]
    if all(map(Path.is_dir, parts)):
        return parts
    return []


def kind_of_folder(folder: str | Path | None) -> ModelKind:
    """The kind of model that a folder holds, by its files."""
    if folder is None:
        return LANGUAGE
    if (Path(folder) / GENERATOR_INDEX).is_file():
        return GENERATOR
    if _model_type(Path(folder) / "config.json") in UNIFIED_TYPES:
        return UNIFIED
    return LANGUAGE


def _model_type(config: Path) -> object:
    """What a config.json says; None where there is none, or whoever reads it will say what is wrong with it."""
    if not config.is_file():
        return None
    try:
        model_type = read_json_object(config, ModelFolderError).get("model_type")
    except ModelFolderError:
        return None
    if isinstance(model_type, str):
        return model_type
    return None
