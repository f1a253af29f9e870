"""Measures methods and drafters, and reports what was measured."""

import lab as lab  # its rows of METHODS are measured, too
