"""Numbers of Step-Video that no configuration states. Imports nothing."""

GROUP_FRAMES, GROUP_LATENTS = 17, 3
"""Frames that the VAE encodes together, and the latent frames that they become."""
CLIP_TOKENS = 77
"""Of Hunyuan's CLIP: captions are padded to it, and all are attended to."""
MOTION_SCORE = 5.0
"""How much moves, where nobody says it (config.py of stepfun-ai/Step-Video-TI2V)."""
SHIFT = 13.0
"""Of noise levels (`time_shift` of the authors' pipelines)."""
