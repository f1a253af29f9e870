"""Training of drafters, and of the embedded model."""
