"""Tests of adt_tree/generation/."""
