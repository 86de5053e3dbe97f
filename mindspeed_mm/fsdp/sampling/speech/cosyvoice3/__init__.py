"""CosyVoice3 (arXiv:2505.17589) speaks: text to speech tokens, these to mel frames, and these to a wave."""
