"""`torchrun $DISTRIBUTED_ARGS pretrain_internvl.py $GPT_ARGS …`: see mindspeed_mm/pretrain_internvl.py."""

from mindspeed_mm.pretrain_internvl import main

if __name__ == "__main__":
    main()
