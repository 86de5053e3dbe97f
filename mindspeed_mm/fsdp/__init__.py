"""The engine: configuration, data, models, plans, training."""
