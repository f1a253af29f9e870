"""The tests. They need neither a GPU nor a network."""

import os

# Tests compare stderr, so tqdm, which reads this when it is imported, must draw no bar.
os.environ["TQDM_DELAY"] = "100"
