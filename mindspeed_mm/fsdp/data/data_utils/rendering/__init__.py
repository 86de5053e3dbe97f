"""Conversations as text and tokens: whose words are where."""
