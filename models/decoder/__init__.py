"""The decoder of all families: its layers, its key/value cache and the kernels of its attention."""
