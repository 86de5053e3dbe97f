"""`torchrun $DISTRIBUTED_ARGS evaluate_gen.py $GPT_ARGS …`: see mindspeed_mm/evaluate_gen.py."""

from mindspeed_mm.evaluate_gen import main

if __name__ == "__main__":
    main()
