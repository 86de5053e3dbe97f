"""Generators under the names of the authors' own files, of MindSpeed-MM and of diffusers."""
