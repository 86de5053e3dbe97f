"""`posttrain_flux_dancegrpo.py`: MindSpeed-MM's flags for FLUX.1 that learns from HPSv2 by DanceGRPO."""
