"""The sizes of the axes that a configuration asks for, resolved for a number of ranks."""
