"""Several rows of an image at once (ZipAR, PJD): their schedule, what their nodes may see, and the loop.

An image has several heads. Each continues one row, with a root, drafts and a verdict of its own.
"""
