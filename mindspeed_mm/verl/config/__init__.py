"""What verl's hydra composes: `hydra.searchpath=[pkg://mindspeed_mm.verl.config] model_engine=mindspeed_mm`."""
