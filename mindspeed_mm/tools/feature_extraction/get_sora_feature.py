"""Encodes the media and captions of data.json by Megatron-style flags, as `mm extract` does.

`torchrun $DISTRIBUTED_ARGS get_sora_feature.py $GPT_ARGS --mm-data … --mm-model … --mm-tool …`.
"""

from __future__ import annotations

from pathlib import Path

from mindspeed_mm.arguments import parse_args
from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.core.terminal import say
from mindspeed_mm.fsdp.train.provider.entry import run_entry
from mindspeed_mm.provider.translate import translate
from mindspeed_mm.tasks.extract import extract


def extract_features() -> None:
    """Write the features to `sorafeature.save_path` of tools.json.

    Raises:
        ConfigError: No folder is named, or the files name no generator and no media.
    """
    args = parse_args()
    translated = translate(args, for_training=False)
    folder = (translated.tools_json.get("sorafeature") or {}).get("save_path")
    if not folder:
        where, way_out = str(args.mm_tool or "--mm-tool"), "Name the folder that features are written to."
        raise ConfigError("is not given", where=where, key="sorafeature.save_path", way_out=way_out)
    options = {"batch_size": args.micro_batch_size, "dtype": compute_type(translated.model_json)}
    for outcome in extract.run(translated.config, out=Path(folder), **options):
        say(outcome.sentence())


def compute_type(model: JsonObject) -> str | None:
    """The type that all encoders of model.json compute in; None where they differ, or do not say."""
    types = set()
    for part in ("ae", "text_encoder", "image_encoder"):
        encoders = model.get(part)
        for encoder in encoders if isinstance(encoders, list) else [encoders]:
            if encoder:
                types.add(encoder.get("dtype"))
    if types == {"bf16"} or types == {"fp32"}:
        return str(types.pop())
    return None


def main() -> None:
    """Run `extract_features` as a script: an `MMError` ends the process with its message and exit code."""
    run_entry(extract_features)


if __name__ == "__main__":
    main()
