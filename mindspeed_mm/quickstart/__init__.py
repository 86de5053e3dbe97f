"""The quick start: trains, exports, evaluates and asks a model that reads the scanned digits of this package."""
