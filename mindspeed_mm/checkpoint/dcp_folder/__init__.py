"""The format of torch's distributed checkpoints: one reader, one writer."""
