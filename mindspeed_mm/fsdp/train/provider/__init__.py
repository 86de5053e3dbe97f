"""Training with functions of the user: a model provider, a data provider and a forward step, on the same engine."""
