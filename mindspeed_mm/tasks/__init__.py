"""One verb each: a function `run(...)` that returns a result for the command line to print."""
