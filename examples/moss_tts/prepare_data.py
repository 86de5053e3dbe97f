"""Adds the codes of sounds to rows of MOSS-TTS, with the released codec.

Run `python examples/moss_tts/prepare_data.py --codec-path models/MOSS-Audio-Tokenizer --input-jsonl raw.jsonl
--output-jsonl data/train_with_codes.jsonl`. Of each row `audio` becomes `audio_codes`; `ref_audio` becomes
`ref_audio_codes`, and `reference` and `reference_audio` become `reference_audio_codes`. Paths start at the folder of
the rows.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from mindspeed_mm.core.errors import DataError
from mindspeed_mm.fsdp.data.data_utils.decoding.audio import read_audio
from mindspeed_mm.fsdp.utils.device import current_device
from mindspeed_mm.fsdp.utils.torchvision_guard import prepare_for_transformers

Encode = Callable[[Path], list[list[int]]]


def main() -> None:
    """Read rows, encode their sounds, and write them."""
    given = _arguments()
    prepare_for_transformers()
    from mindspeed_mm.fsdp.models.moss_tts_delay.audio_codec import load_codec  # behind the guard of the line above

    device = current_device() if given.device == "auto" else torch.device(given.device)
    encode = cache(partial(_codes, load_codec(given.codec_path).to(device), device, given.n_vq))
    lines = given.input_jsonl.read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines if line.strip()]
    given.output_jsonl.parent.mkdir(parents=True, exist_ok=True)
    with given.output_jsonl.open("w", encoding="utf-8") as file:
        for number, row in enumerate(rows, 1):
            place = f"{given.input_jsonl}, row {number}"
            made = with_codes(row, encode, given.input_jsonl.parent, place, voices=not given.skip_reference_audio_codes)
            file.write(json.dumps(made, ensure_ascii=False) + "\n")


def with_codes(row: dict[str, Any], encode: Encode, folder: Path, place: str, *, voices: bool = True) -> dict[str, Any]:
    """A row with the codes of its sounds.

    Args:
        row: As it stands in its file.
        encode: Path of a sound → its codes.
        folder: Where relative paths start.
        place: Of the row, for messages.
        voices: Whether voices are encoded, too.

    Raises:
        DataError: There is no sound, or more than one where one belongs.
    """
    if not isinstance(row.get("audio"), str):
        raise DataError("there is no sound", where=place, key="audio", way_out="Give the path of one.")
    made = row | {"audio_codes": encode(folder / row["audio"])}
    for name in ("ref_audio", "reference_audio", "reference") if voices else ():
        paths = row.get(name) or []
        paths = [paths] if isinstance(paths, str) else paths
        if name == "ref_audio" and len(paths) > 1:
            what = f"{len(paths)} voices, where one belongs"
            raise DataError(what, where=place, key=name, way_out="Name several in reference_audio.")
        codes = [None if path is None else encode(folder / path) for path in paths]
        if name == "ref_audio" and codes:
            made["ref_audio_codes"] = codes[0]
        elif codes:
            made["reference_audio_codes"] = codes
    return made


def _codes(codec: Any, device: torch.device, books: int | None, path: Path) -> list[list[int]]:
    """Frames of codes of a sound, which is first brought to an even loudness, as published."""
    from mindspeed_mm.fsdp.models.moss_tts_delay.audio_codec import even_loudness

    with path.open("rb") as file:
        clip = read_audio(file, codec.rate, str(path))
    with torch.inference_mode():
        codes = codec.encode(even_loudness(torch.from_numpy(clip.samples).to(device)))
    if not len(codes):
        what = f"lasts {clip.seconds:.3f} s, less than one frame"
        raise DataError(what, where=str(path), way_out="Leave the row out.")
    return codes[:, :books].tolist()  # type: ignore[no-any-return]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Add the codes of sounds to rows of MOSS-TTS.")
    parser.add_argument("--input-jsonl", type=Path, required=True, help="rows with paths of sounds")
    parser.add_argument("--output-jsonl", type=Path, required=True, help="the same rows with codes")
    codec = Path("models/MOSS-Audio-Tokenizer")
    parser.add_argument("--codec-path", type=Path, default=codec, help="the codec's folder")
    parser.add_argument("--model-path", type=Path, help="accepted, and not needed")
    parser.add_argument("--device", default="auto", help="cpu, cuda, npu …; auto: that of training")
    parser.add_argument("--n-vq", type=int, help="codebooks that are kept; all where it is left out")
    parser.add_argument("--skip-reference-audio-codes", action="store_true", help="encode no voices")
    return parser.parse_args()


if __name__ == "__main__":
    main()
