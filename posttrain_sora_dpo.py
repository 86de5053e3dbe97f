"""`torchrun … posttrain_sora_dpo.py …`: see mindspeed_mm/posttrain_sora_dpo.py."""

from mindspeed_mm.posttrain_sora_dpo import main

if __name__ == "__main__":
    main()
