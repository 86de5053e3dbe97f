"""Models of that back end: here each is the model of its folder."""
