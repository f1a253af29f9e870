"""Measures and stores runs: prompts, run folders, the harness of bench, metrics and reports."""

import lab as lab  # its rows of METHODS are measured, too
