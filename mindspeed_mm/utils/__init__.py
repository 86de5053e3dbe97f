"""What scripts of MindSpeed-MM import of its utilities."""
