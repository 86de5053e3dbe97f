"""FLOPs of a training step by module, MFU and HFU: counted from the built model, without running it."""
