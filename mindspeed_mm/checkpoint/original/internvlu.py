"""InternVL-U: the released folder keeps its two trained parts, its VAE and its tokenizer in folders of their own.
Training reads one folder, with the released names behind the name of their part."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from pathlib import Path

from mindspeed_mm.checkpoint.common.config import ConvertGeneratorConfig
from mindspeed_mm.checkpoint.common.converter import Converter
from mindspeed_mm.checkpoint.conversion.files import OutputFile
from mindspeed_mm.checkpoint.conversion.ledger import SourceLedger
from mindspeed_mm.checkpoint.conversion.run import Conversion, Converted, convert
from mindspeed_mm.checkpoint.hf_folder import safetensors_files
from mindspeed_mm.checkpoint.lazy_tensor import LazyTensor
from mindspeed_mm.checkpoint.safetensors_folder import check_same_tensors, open_weights
from mindspeed_mm.core.errors import CheckpointError, ModelFolderError, UsageError
from mindspeed_mm.core.json_file import JsonObject, read_json_object
from mindspeed_mm.core.model_kinds import GENERATOR_INDEX
from mindspeed_mm.fsdp.utils.added_tokens import added_token_id

_PARTS = ("vlm", "generation_decoder")
_PIPELINE = "InternVLUPipeline"
_MODEL_TYPE = "internvlu"
SPECIAL_TOKENS = (
    "</box>", "<box>", "<IMG_CONTEXT>", "</img>", "<img>", "</quad>", "<quad>", "</ref>", "<ref>", "<img_uncond>",
)  # fmt: skip
"""Tokens that have an embedding of their own beside the language model's, in the order of that table."""
_NO_TOKENIZER = {"processor_config.json", "preprocessor_config.json"}
"""Files of the folder `processor` that ask for a class of the release: what they say stands in config.json."""
_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin")


class InternVLUConverter(Converter):
    """InternVL-U: the released folder ↔ one folder, which trains."""

    def hf_to_mm(self, cfg: ConvertGeneratorConfig) -> Converted:
        """Write the released folder as one folder, which trains."""
        _refuse(cfg, "lora_path", "hf_dir")
        source = cfg.source_path
        config = _config(source)
        with ExitStack() as stack:
            ledgers: list[SourceLedger] = []
            tensors: dict[str, LazyTensor] = {}
            for part in _PARTS:
                ledger = SourceLedger(stack.enter_context(open_weights(source / part)), source / part)
                ledgers.append(ledger)
                tensors |= {f"{part}.{name}": tensor for name, tensor in ledger.tensors.items()}
            files, texts = safetensors_files(tensors)
            texts["config.json"] = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
            copies = {"vae": source / "vae"}
            for path in sorted((source / "processor").iterdir()):
                if path.is_file() and path.name not in _NO_TOKENIZER:
                    copies[path.name] = path
            return _run(Conversion([source], ledgers, files, {"kind": "mm"}, copies=copies, texts=texts), cfg)

    def mm_to_hf(self, cfg: ConvertGeneratorConfig) -> Converted:
        """Write that folder, or an exported one, in the released layout; `hf_dir` gives all but the weights."""
        _refuse(cfg, "lora_path")
        released = cfg.hf_dir
        if released is None:
            raise UsageError("is needed", key="--cfg.hf_dir", way_out="Name the released folder.")
        _check_released(released)
        with open_weights(cfg.source_path) as stored:
            ledger = SourceLedger(stored, cfg.source_path)
            files: dict[str, OutputFile] = {}
            texts: dict[str, str] = {}
            copies: dict[str, Path] = {}
            for part in _PARTS:
                own = {name.removeprefix(f"{part}."): tensor for name, tensor in ledger.tensors.items()
                       if name.startswith(f"{part}.")}  # fmt: skip
                # Before a file is written: an export of other weights would make a folder that does not load.
                check_same_tensors(own, cfg.source_path, released / part)
                written, indices = safetensors_files(own)
                files |= {f"{part}/{name}": file for name, file in written.items()}
                texts |= {f"{part}/{name}": text for name, text in indices.items()}
            for path in sorted(released.iterdir()):
                if path.name not in _PARTS:
                    copies[path.name] = path
                    continue
                for file in sorted(path.iterdir()):
                    if not file.name.endswith(_WEIGHTS):
                        copies[f"{path.name}/{file.name}"] = file
            sources = [cfg.source_path, released]
            return _run(Conversion(sources, [ledger], files, {"kind": "hf"}, copies=copies, texts=texts), cfg)


def _config(released: Path) -> JsonObject:
    """The one config.json: that of `vlm`, and what the other folders say beside it."""
    _check_released(released)
    vlm, head, vae = (read_json_object(released / part / "config.json", ModelFolderError) for part in (*_PARTS, "vae"))
    config = vlm | {
        "model_type": _MODEL_TYPE,
        "architectures": ["InternVLUForConditionalGeneration"],
        "generation_decoder_config": head,
        "processor_config": read_json_object(released / "processor" / "processor_config.json", ModelFolderError),
        "special_token_ids": [added_token_id(released / "processor", token) for token in SPECIAL_TOKENS],
        "vae_config": {
            "z_channels": vae.get("z_dim", 16),
            "downsample": 2 ** len(vae.get("temperal_downsample", (False, True, True))),
        },
    }
    # It names the release's own code, which is not run here.
    config.pop("auto_map", None)
    return config


def _check_released(folder: Path) -> None:
    index = folder / GENERATOR_INDEX
    name = read_json_object(index, ModelFolderError).get("_class_name") if index.is_file() else None
    if name != _PIPELINE:
        raise CheckpointError(
            f"its {GENERATOR_INDEX} names {name or 'nothing'}, and {_PIPELINE} is expected",
            where=str(folder),
            way_out="Name the folder of InternVL-U/InternVL-U as it is released.",
        )


def _refuse(cfg: ConvertGeneratorConfig, *keys: str) -> None:
    for key in keys:
        if getattr(cfg, key) is not None:
            raise UsageError("is not used here", key=f"--cfg.{key}", way_out="Leave it out.")


def _run(conversion: Conversion, cfg: ConvertGeneratorConfig) -> Converted:
    return convert(conversion, cfg.target_path, keep_backup=cfg.keep_backup, stream=sys.stderr)
