"""`torchrun … posttrain_qwen2vl_dpo.py …`: see mindspeed_mm/posttrain_qwen2vl_dpo.py."""

from mindspeed_mm.posttrain_qwen2vl_dpo import main

if __name__ == "__main__":
    main()
