"""`torchrun $DISTRIBUTED_ARGS pretrain_sora.py $GPT_ARGS …`: see mindspeed_mm/pretrain_sora.py."""

from mindspeed_mm.pretrain_sora import main

if __name__ == "__main__":
    main()
