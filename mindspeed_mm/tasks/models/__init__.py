"""Which families of models there are, what is proven of each, and the way from a wish to the commands."""
