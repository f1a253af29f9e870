"""Checkpoint files: fetching them, checking their headers against a module, and loading their tensors."""
