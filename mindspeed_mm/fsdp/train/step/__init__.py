"""One optimizer step: forward and backward, pipelines, the objective's counts and sums."""
