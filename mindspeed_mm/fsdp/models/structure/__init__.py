"""What a model consists of: decoder layers, towers, tied weights, the points where it can be cut."""
