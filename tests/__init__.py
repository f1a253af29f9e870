"""Tests. CPU only, no network."""
