"""`torchrun … examples/ming/finetune_vl.py …`: see mindspeed_mm/finetune_vl.py."""

from mindspeed_mm.finetune_vl import main

if __name__ == "__main__":
    main()
