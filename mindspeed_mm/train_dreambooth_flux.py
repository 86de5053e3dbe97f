"""Trains FLUX.1 on a few pictures of one thing by the flags of diffusers' script of this name.

`torchrun … train_dreambooth_flux.py --pretrained_model_name_or_path FOLDER --instance_data_dir FOLDER …`.
"""

from __future__ import annotations

import sys

from mindspeed_mm.fsdp.train.provider.entry import run_entry
from mindspeed_mm.tasks.dreambooth import run


def main() -> None:
    """Train as the flags say."""
    run_entry(lambda: run.run(sys.argv[1:]))


if __name__ == "__main__":
    main()
