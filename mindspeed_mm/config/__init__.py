"""Configurations at the paths that scripts of MindSpeed-MM's FSDP2 backend import."""
