"""Process groups, meshes and the application of parallel plans."""
