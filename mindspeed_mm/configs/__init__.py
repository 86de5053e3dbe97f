"""What scripts of MindSpeed-MM import for their flags."""
