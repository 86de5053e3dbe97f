"""Looks at the machine and its packages before anything is trained."""
