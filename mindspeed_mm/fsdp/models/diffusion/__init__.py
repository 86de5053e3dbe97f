"""What all generators share: the adapter that a family fills in, its encoders, its sampler."""
