"""The YAML file as the user wrote it: its tree with positions, its paths and old names, the keys that are not known."""
