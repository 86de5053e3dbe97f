"""`torchrun $DISTRIBUTED_ARGS pretrain_deepseekvl.py $GPT_ARGS …`: see mindspeed_mm/pretrain_deepseekvl.py."""

from mindspeed_mm.pretrain_deepseekvl import main

if __name__ == "__main__":
    main()
