"""Helpers of data providers."""
