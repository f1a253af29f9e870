"""Images <-> codes, and which codes are near which."""
