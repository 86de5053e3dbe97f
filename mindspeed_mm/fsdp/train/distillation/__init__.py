"""Distillation of generators: student, teacher and critic, and how a step trains two of them."""
