"""The command `mm`: parses the command line, calls a task, prints its result."""
