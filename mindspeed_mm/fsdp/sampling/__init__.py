"""Answers and drawings of a model: while it trains, afterwards, and in an evaluation."""
