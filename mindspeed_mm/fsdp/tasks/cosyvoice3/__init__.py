"""CosyVoice3: the language model that turns text into speech tokens."""
