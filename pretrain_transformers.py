"""`torchrun $DISTRIBUTED_ARGS pretrain_transformers.py $GPT_ARGS …`: see mindspeed_mm/pretrain_transformers.py."""

from mindspeed_mm.pretrain_transformers import main

if __name__ == "__main__":
    main()
