"""Media as a model takes them: what a plugin must do, and the built-in ones."""
