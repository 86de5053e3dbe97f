"""`torchrun $DISTRIBUTED_ARGS pretrain_qwen2vl.py $GPT_ARGS …`: see mindspeed_mm/pretrain_qwen2vl.py."""

from mindspeed_mm.pretrain_qwen2vl import main

if __name__ == "__main__":
    main()
