"""The decoding method that transformers' `generate` calls."""
