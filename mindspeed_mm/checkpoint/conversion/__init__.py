"""The runner of every conversion: what is promised of an output folder is kept here, once for all layouts."""
