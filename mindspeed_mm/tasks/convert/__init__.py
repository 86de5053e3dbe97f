"""`mm convert`, and the converters that need a model or adapters as well as files."""
