"""From a folder of weights to a model: construction on meta, initial values, streaming and sharding of weights."""
