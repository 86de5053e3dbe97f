"""Answers by a model that understands: `mm infer`."""
