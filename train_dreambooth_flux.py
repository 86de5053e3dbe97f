"""`torchrun … train_dreambooth_flux.py …`: see mindspeed_mm/train_dreambooth_flux.py."""

from mindspeed_mm.train_dreambooth_flux import main

if __name__ == "__main__":
    main()
