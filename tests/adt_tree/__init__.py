"""Tests of adt_tree/."""
