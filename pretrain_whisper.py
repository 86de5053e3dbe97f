"""`torchrun $DISTRIBUTED_ARGS pretrain_whisper.py $GPT_ARGS …`: see mindspeed_mm/pretrain_whisper.py."""

from mindspeed_mm.pretrain_whisper import main

if __name__ == "__main__":
    main()
