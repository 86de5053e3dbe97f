"""`torchrun $DISTRIBUTED_ARGS pretrain_videoalign.py $GPT_ARGS …`: see mindspeed_mm/pretrain_videoalign.py."""

from mindspeed_mm.pretrain_videoalign import main

if __name__ == "__main__":
    main()
