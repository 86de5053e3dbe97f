"""Pictures and clips with captions, or the features extracted from them: `dataset_type: generation`."""
