"""`torchrun $DISTRIBUTED_ARGS pretrain_vlm.py $GPT_ARGS …`: see mindspeed_mm/pretrain_vlm.py."""

from mindspeed_mm.pretrain_vlm import main

if __name__ == "__main__":
    main()
