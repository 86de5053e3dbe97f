"""Features that Lightricks' trainer made: `dataset_type: ltx2_precomputed` and `ltx2_3_precomputed`."""
