"""Features that trade time for memory, applied to a model in place."""
