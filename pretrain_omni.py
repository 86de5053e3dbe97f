"""`torchrun $DISTRIBUTED_ARGS pretrain_omni.py $GPT_ARGS …`: see mindspeed_mm/pretrain_omni.py."""

from mindspeed_mm.pretrain_omni import main

if __name__ == "__main__":
    main()
