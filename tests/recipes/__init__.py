"""Tests of recipes/."""
