"""Megatron-style checkpoints, `mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt`: read, written and divided anew."""
