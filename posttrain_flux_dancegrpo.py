"""`torchrun … posttrain_flux_dancegrpo.py …`: see mindspeed_mm/posttrain_flux_dancegrpo.py."""

from mindspeed_mm.posttrain_flux_dancegrpo import main

if __name__ == "__main__":
    main()
