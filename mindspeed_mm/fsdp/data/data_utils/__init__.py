"""The steps from a raw row to a batch: convert, render, expand media, collate."""
