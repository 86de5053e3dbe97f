"""What a run needs of memory: the forecast, and advice when it is not enough."""
