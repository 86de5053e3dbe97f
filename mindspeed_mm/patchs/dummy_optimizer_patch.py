"""Empty: a step without an optimizer is what `training.lr: 0` gives."""
