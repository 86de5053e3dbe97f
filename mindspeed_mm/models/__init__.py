"""Models of the provider API at the paths that its users' code imports: fronts over those of the engine."""
