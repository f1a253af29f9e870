"""Tests. CPU only, no network."""

import os

os.environ["TQDM_DELAY"] = "100"  # errors are compared: no bars among them; tqdm reads it when imported
