"""Makes a model folder of CosyVoice3's released language model: safetensors and `config.json` of its `llm.pt`.

Run `python examples/cosyvoice3/make_folder.py RELEASE FOLDER`. RELEASE holds `llm.pt` and `CosyVoice-BlankEN`, the
configuration of the Qwen2 inside; FOLDER gets the rest, and keeps what it has: CosyVoice's own tokenizer belongs there.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from mindspeed_mm.checkpoint.pt_files import load_weights
from mindspeed_mm.core.errors import MMError, ModelFolderError
from mindspeed_mm.core.json_file import read_json_object

EXTRA_ROWS = 200
"""Rows of the speech embedding behind the tokens of the codec."""
HEAD, EMBEDDING = "llm.model.lm_head.weight", "llm.model.model.embed_tokens.weight"


def read_weights(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of `llm.pt` by their names, without what training noted beside them. Raises `CheckpointError`."""
    stored = load_weights(path)
    return {name: value.contiguous() for name, value in stored.items() if isinstance(value, torch.Tensor)}


def make_config(weights: dict[str, torch.Tensor], llm_config: dict[str, Any], *, tied: bool) -> dict[str, Any]:
    """`config.json`: the sizes of speech are those of the weights."""
    kept = {name: value for name, value in llm_config.items() if not name.startswith("_")}
    return {
        "architectures": ["CosyVoice3LM"],
        "model_type": "cosyvoice3",
        "llm_config": kept | {"tie_word_embeddings": tied, "vocab_size": len(weights[EMBEDDING])},
        "speech_token_size": len(weights["speech_embedding.weight"]) - EXTRA_ROWS,
        "extra_speech_rows": EXTRA_ROWS,
        "mix_ratio": [5, 15],
        "tie_word_embeddings": tied,
        "dtype": str(weights[EMBEDDING].dtype).removeprefix("torch."),
    }


def make_folder(release: Path, folder: Path) -> None:
    """Write weights and configuration.

    Raises:
        MMError: A file is missing or broken.
    """
    weights = read_weights(release / "llm.pt")
    llm_config = read_json_object(release / "CosyVoice-BlankEN" / "config.json", ModelFolderError)
    tied = HEAD not in weights or torch.equal(weights[HEAD], weights[EMBEDDING])
    if tied:
        weights.pop(HEAD, None)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = make_config(weights, llm_config, tied=tied)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def main() -> int:
    """Write the folder and say what is in it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("release", type=Path)
    parser.add_argument("folder", type=Path)
    chosen = parser.parse_args()
    try:
        make_folder(chosen.release, chosen.folder)
    except MMError as error:
        print(error, file=sys.stderr)
        return int(error.exit_code)
    print(f"{chosen.folder}: model.safetensors and config.json; the tokenizer is CosyVoice's own (README.md)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
