"""Measures and stores runs: prompts, run folders, the harness of bench, metrics and reports."""
