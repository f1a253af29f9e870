"""Tests of demo/."""
