"""Ming-Lite-Omni's released folder, and what draws of it in diffusers' layout. Facts: `load_image_gen_modules` of
`modeling_bailingmm.py` and `sd3_loss.py` of inclusionAI/Ming at d97e2f3.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TextIO

from mindspeed_mm.checkpoint.common.config import ConvertGeneratorConfig
from mindspeed_mm.checkpoint.common.converter import Converter
from mindspeed_mm.checkpoint.conversion.files import SafetensorsFile
from mindspeed_mm.checkpoint.conversion.ledger import SourceLedger
from mindspeed_mm.checkpoint.conversion.run import Conversion, Converted, convert
from mindspeed_mm.checkpoint.lazy_tensor import LazyTensor
from mindspeed_mm.checkpoint.original.generator import Json
from mindspeed_mm.checkpoint.safetensors_folder import open_weights
from mindspeed_mm.core.errors import CheckpointError, ModelFolderError
from mindspeed_mm.core.json_file import read_json_object

_HERE = "mindspeed_mm.fsdp.models.ming_draw"
_INDEX: Json = {
    "_class_name": "MingDrawPipeline",
    "transformer": [f"{_HERE}.transformer", "MingImageTransformer"],
    "vae": ["diffusers", "AutoencoderKL"],
    "text_encoder": [f"{_HERE}.pipeline_ming_draw", "MingReader"],
    "tokenizer": ["mindspeed_mm.fsdp.models.ming.processing_ming", "BailingMMProcessor"],
    "queries": [f"{_HERE}.pipeline_ming_draw", "MingQueries"],
    "connector": ["transformers", "Qwen2ForCausalLM"],
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
}
_COPIED = ("vae", "scheduler", "connector")
_MLP = "mlp."
_RELEASED_MLP, _WEIGHTS = "mlp/model.safetensors", "diffusion_pytorch_model.safetensors"
_PROCESSOR = "preprocessor_config.json"
_OF_PROCESSOR = re.compile(r"tokeniz|special_tokens|added_tokens|vocab|merges|preprocessor_config|\.mvn$")
"""In the names of the files that the processor reads."""
_QUERY = re.compile(r"query_tokens_dict\.(\d+)x\1")
_SEEN_PIXELS = 451584
"""Of a picture that is edited, as the language model sees it (`test_infer_gen_image.py`, `t2i_dataset.py`)."""
_OWN_SETTINGS = ("condition_dim", "condition_inner_dim")
"""Of the transformer, which the released code has in its source."""


class MingConverter(Converter):
    """Ming-Lite-Omni 1.5: the released folder ↔ what draws in diffusers' layout."""

    def source_to_hf(self, cfg: ConvertGeneratorConfig) -> Converted:
        """Write what draws, and what it is told by, in the layout that trains."""
        return draws_of_release(cfg.source_path, cfg.target_path, stream=sys.stderr)

    def hf_to_source(self, cfg: ConvertGeneratorConfig) -> Converted:
        """Write such a folder, trained or not, under the released names."""
        return release_of_draws(cfg.source_path, cfg.target_path, stream=sys.stderr)


def draws_of_release(source: Path, target: Path, *, stream: TextIO | None = None) -> Converted:
    """Write what draws in a released folder in diffusers' layout.

    Args:
        source: With config.json, the language model, and transformer/, vae/, scheduler/, connector/ and mlp/.
        target: The folder to write.
        stream: Where progress is shown.

    Raises:
        ModelFolderError: A part is missing.
        CheckpointError: A file is damaged or of other contents, or what was written does not read back.
        UsageError: The target may not be written.
    """
    _check_parts(source, ("config.json", _PROCESSOR, "transformer/config.json", _RELEASED_MLP, *_COPIED))
    copies = {name: source / name for name in _COPIED}
    for path in sorted(source.iterdir()):
        if path.suffix == ".safetensors" or path.name.endswith(".index.json") or path.name == "config.json":
            copies[f"text_encoder/{path.name}"] = path
        elif path.is_file() and _OF_PROCESSOR.search(path.name) and path.name != _PROCESSOR:
            copies[f"tokenizer/{path.name}"] = path
    seen = _read(source / _PROCESSOR) | {"min_pixels": _SEEN_PIXELS, "max_pixels": _SEEN_PIXELS}
    with ExitStack() as stack:
        ledgers = [SourceLedger(stack.enter_context(open_weights(source / name)), source / name)
                   for name in ("transformer", "mlp")]  # fmt: skip
        transformer, others = (ledger.tensors for ledger in ledgers)
        mlp = {name: tensor for name, tensor in others.items() if name.startswith(_MLP)}
        queries = {name: tensor for name, tensor in others.items() if name not in mlp}
        config = _read(source / "transformer/config.json") | {"_class_name": "MingImageTransformer"}
        # Of the first layer's matrix, (condition_inner_dim, condition_dim).
        config |= dict(zip(_OWN_SETTINGS, reversed(_shape(mlp, "mlp.fc1.weight", source)), strict=True))
        files = {
            f"transformer/{_WEIGHTS}": SafetensorsFile({**transformer, **mlp}),
            f"queries/{_WEIGHTS}": SafetensorsFile(queries),
        }
        texts = {
            "model_index.json": _json(_INDEX),
            "transformer/config.json": _json(config),
            "queries/config.json": _json(_settings_of(queries, source)),
            f"tokenizer/{_PROCESSOR}": _json(seen),
        }
        plan = Conversion([source], ledgers, files, {"kind": "diffusers"}, copies=copies, texts=texts)
        return convert(plan, target, stream=stream)


def release_of_draws(source: Path, target: Path, *, stream: TextIO | None = None) -> Converted:
    """Write such a folder under the released names, and as the released folder lies. Pixels of pictures that are seen
    stay as drawing has them. Arguments and errors as of `draws_of_release`.
    """
    parts = ("transformer", "queries", "text_encoder", "tokenizer", *_COPIED)
    _check_parts(source, (*parts, "transformer/config.json"))
    copies = {name: source / name for name in _COPIED}
    for name in ("text_encoder", "tokenizer"):
        copies |= {path.name: path for path in sorted((source / name).iterdir())}
    with ExitStack() as stack:
        ledgers = [SourceLedger(stack.enter_context(open_weights(source / name)), source / name) for name in parts[:2]]
        transformer, queries = (ledger.tensors for ledger in ledgers)
        mlp = {name: tensor for name, tensor in transformer.items() if name.startswith(_MLP)}
        config = _read(source / "transformer/config.json") | {"_class_name": "SD3Transformer2DModel"}
        # The released class does not take them.
        kept = {name: value for name, value in config.items() if name not in _OWN_SETTINGS}
        own = {name: tensor for name, tensor in transformer.items() if name not in mlp}
        files = {
            f"transformer/{_WEIGHTS}": SafetensorsFile(own),
            _RELEASED_MLP: SafetensorsFile({**mlp, **queries}),
        }
        plan = Conversion([source], ledgers, files, {"kind": "hf"}, copies=copies,
                          texts={"transformer/config.json": _json(kept)})  # fmt: skip
        return convert(plan, target, stream=stream)


def _check_parts(source: Path, names: tuple[str, ...]) -> None:
    for name in names:
        if not (source / name).exists():
            raise ModelFolderError(
                "is missing, and what draws in Ming-Lite-Omni needs it",
                where=str(source / name),
                way_out="Name the folder of Ming-Lite-Omni-1.5, or one that this converter wrote.",
            )


def _settings_of(tensors: Mapping[str, LazyTensor], source: Path) -> Json:
    sides = sorted(int(found[1]) for name in tensors if (found := _QUERY.fullmatch(name)))
    connector, hidden = _shape(tensors, "proj_in.weight", source)
    if not sides:
        raise _lacks("query_tokens_dict.16x16", source)
    return {"_class_name": "MingQueries", "hidden_size": hidden, "connector_size": connector, "scales": sides}


def _shape(tensors: Mapping[str, LazyTensor], name: str, source: Path) -> tuple[int, ...]:
    if name not in tensors:
        raise _lacks(name, source)
    return tuple(tensors[name].shape)


def _lacks(name: str, source: Path) -> CheckpointError:
    return CheckpointError(
        f"has no tensor {name}", where=str(source / _RELEASED_MLP), way_out="Name the folder of Ming-Lite-Omni-1.5."
    )


def _read(path: Path) -> Json:
    return read_json_object(path, ModelFolderError)


def _json(value: Json) -> str:
    return json.dumps(value, indent=2) + "\n"
