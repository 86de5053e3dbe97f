"""Models that speak: one room for the voice of each family."""
