"""Parity with the released code and with transformers."""
