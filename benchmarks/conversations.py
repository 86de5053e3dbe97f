"""Rows of conversations about pictures or clips, with a tiny Qwen3-VL folder whose processor is the real one.

`python -m benchmarks.conversations KIND FOLDER COUNT` makes them; it is a process of its own, so that who measures
stays small. Pictures are PNG files of 112 × 112 pixels, clips are mp4 files; `many` is the pictures' rows repeated.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import processes

SEED = 42
SIDE = 112
PICTURES = 2000
CLIPS = 200
CLIP_SIZE = (8, 48, 48)
"""Frames, height, width."""
_LONGEST = 256 * 256
_WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


def prepare(kind: str, folder: Path, count: int) -> Path:
    """Make a workload, and return the file of its rows; `model` lies beside it."""
    print(f"  making {count} rows ({kind})", flush=True)
    processes.run([sys.executable, "-m", "benchmarks.conversations", kind, str(folder), str(count)], timeout_s=300)
    return folder / "rows.jsonl"


def main(kind: str, folder: Path, count: int) -> None:
    """Write all of it."""
    (folder / "media").mkdir(parents=True, exist_ok=True)
    write_model(folder / "model")
    files = write_clips(folder, min(count, CLIPS)) if kind == "clips" else write_pictures(folder, min(count, PICTURES))
    with (folder / "rows.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows("video" if kind == "clips" else "image", files, count))


def rows(medium: str, files: list[str], count: int) -> Iterator[dict[str, Any]]:
    """A question and an answer on each medium, every one another."""
    for number in range(count):
        answer = " ".join(_WORDS[int(digit)] for digit in f"{number:06d}")
        question = f"<{medium}>What is shown here? This is row {number}."
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        yield {"messages": messages, f"{medium}s": [files[number % len(files)]]}


def write_model(folder: Path) -> None:
    """The tests' tiny folder; pictures keep their size."""
    from mindspeed_mm.fsdp.utils.processor import load_processor
    from tests.helpers.tiny_models import make_tiny_qwen3_vl

    make_tiny_qwen3_vl(folder, seed=SEED)
    processor: Any = load_processor(folder)
    for part in (processor.image_processor, processor.video_processor):
        part.size = {"shortest_edge": 16 * 16, "longest_edge": _LONGEST}
    processor.save_pretrained(folder)


def write_pictures(folder: Path, count: int) -> list[str]:
    """Smooth random pictures."""
    import numpy as np
    from PIL import Image

    draw, names = np.random.default_rng(SEED), [f"media/{number}.png" for number in range(count)]
    for name in names:
        coarse = Image.fromarray(draw.integers(0, 256, (14, 14, 3), dtype=np.uint8))
        coarse.resize((SIDE, SIDE), Image.Resampling.BICUBIC).save(folder / name)
    return names


def write_clips(folder: Path, count: int) -> list[str]:
    """Smooth random clips."""
    import numpy as np
    from PIL import Image

    from mindspeed_mm.fsdp.utils.media_files import write_media

    draw, names = np.random.default_rng(SEED), [f"media/{number}.mp4" for number in range(count)]
    frames, height, width = CLIP_SIZE
    for name in names:
        coarse = draw.integers(0, 256, (frames, 6, 6, 3), dtype=np.uint8)
        clip = np.stack([np.asarray(Image.fromarray(frame).resize((width, height))) for frame in coarse])
        write_media((folder / name).with_suffix(""), clip, fps=4.0)
    return names


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
