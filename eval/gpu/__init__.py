"""Checks and measures a GPU part by part, and judges the results in one document."""
