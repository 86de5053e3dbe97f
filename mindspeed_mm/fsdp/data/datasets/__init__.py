"""Data sets, one folder each; a plugin adds its own with `@data_register.register("<dataset_type>")`."""
