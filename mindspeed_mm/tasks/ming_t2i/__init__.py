"""Training of what draws in Ming-Lite-Omni by the flags of MindSpeed-MM's script."""
