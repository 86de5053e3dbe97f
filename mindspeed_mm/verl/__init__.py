"""The engine as a backend of verl: verl draws, judges and computes losses, this package holds and trains the model.

verl imports `engine` by the entry point `verl.plugins`, and it registers itself (docs/posttrain_coming_from.md, "Under
verl").
"""
