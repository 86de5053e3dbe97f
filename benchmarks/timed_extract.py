"""`mm extract` as it is, noting when each batch was through; and, afterwards, what the features are.

`python -m benchmarks.timed_extract run TIMES CONFIG [OPTION…]` extracts and writes the times as JSON;
`python -m benchmarks.timed_extract means FEATURES MODEL` prints one JSON line: mean absolute feature of each sample.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path


def run(times_file: Path, words: list[str]) -> int:
    """Extract; the progress that people see is what tells how far it is."""
    from mindspeed_mm.cli.main import main
    from mindspeed_mm.fsdp.utils.work_progress import WorkProgress

    times = []
    advance = WorkProgress.advance

    def noted(progress: WorkProgress, samples: int) -> None:
        times.append({"time": time.time(), "samples": samples})
        advance(progress, samples)

    WorkProgress.advance = noted  # type: ignore[method-assign]
    try:
        main(["extract", *words])
    except SystemExit as ending:
        if ending.code:
            raise
    times_file.write_text(json.dumps(times), encoding="utf-8")
    return 0


def means(features: Path, model_folder: Path) -> None:
    """Print them, latents and text."""
    from mindspeed_mm.fsdp.utils.torchvision_guard import ensure_torchvision

    ensure_torchvision()  # transformers imports torchvision, whose compiled part a CPU build of torch may refuse
    import torch

    from benchmarks.bare_encoders import means_of
    from mindspeed_mm.fsdp.data.feature_store import open_features
    from mindspeed_mm.fsdp.models.diffusion.find import find_adapter

    adapter = find_adapter(model_folder)
    store = open_features(features, adapter)
    rows = [store.read(row, 0) for row in range(len(store))]
    text = adapter.pad_text([{"prompt_embeds": row["prompt_embeds"]} for row in rows])["prompt_embeds"]
    latents = torch.stack([row["latents"] for row in rows])
    print(json.dumps({"latents": means_of(latents), "text": means_of(text)}))


if __name__ == "__main__":
    if sys.argv[1] == "run":
        sys.exit(run(Path(sys.argv[2]), sys.argv[3:]))
    means(Path(sys.argv[2]), Path(sys.argv[3]))
