"""`torchrun $DISTRIBUTED_ARGS pretrain_lumina.py $GPT_ARGS …`: see mindspeed_mm/pretrain_lumina.py."""

from mindspeed_mm.pretrain_lumina import main

if __name__ == "__main__":
    main()
