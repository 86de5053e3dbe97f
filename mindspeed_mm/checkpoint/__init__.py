"""Weight formats and conversion: key maps, readers and writers for each layout."""
