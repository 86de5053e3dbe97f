"""`torchrun $DISTRIBUTED_ARGS finetune_vl.py $GPT_ARGS …`: see mindspeed_mm/finetune_vl.py."""

from mindspeed_mm.finetune_vl import main

if __name__ == "__main__":
    main()
