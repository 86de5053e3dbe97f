"""The Python door's arguments, objects and rows, as the commands take them from files."""
