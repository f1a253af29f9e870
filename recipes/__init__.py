"""Recipes that made checkpoints of this repository."""
