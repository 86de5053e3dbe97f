"""`torchrun … mindspeed_mm/fsdp/tasks/cosyvoice3/train.py run.yaml`: CosyVoice3 trains as every other model does."""

from mindspeed_mm.fsdp.train.trainer import Trainer as Trainer
from mindspeed_mm.fsdp.train.trainer import main

if __name__ == "__main__":
    main()
