"""Trains what draws in Ming-Lite-Omni by the flags of MindSpeed-MM's script of this name.

`torchrun … finetune_t2i.py --pretrained_model_name_or_path FOLDER --json_path ROWS --image_folder FOLDER …`.
"""

from __future__ import annotations

import sys

from mindspeed_mm.fsdp.train.provider.entry import run_entry
from mindspeed_mm.tasks.ming_t2i import run


def main() -> None:
    """Train as the flags say."""
    run_entry(lambda: run.run(sys.argv[1:]))


if __name__ == "__main__":
    main()
