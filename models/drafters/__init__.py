"""Drafters that are still to be trained: their files, and the images they learn from."""
