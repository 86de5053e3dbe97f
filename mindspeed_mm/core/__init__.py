"""Ground floor: errors, patterns, suggestions, units, artifacts. Nothing here imports torch."""
