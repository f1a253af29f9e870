"""Pictures drawn by an exported checkpoint, decoded plainly."""

from __future__ import annotations

from typing import Any

import numpy as np

from adt_tree.pipeline import Pipeline
from adt_tree.sampling import Sampling
from models.spec import LoadOptions

AT_ONCE = 64  # pictures in flight


def draw(texts: list[str], args: Any) -> np.ndarray:
    """uint8 [N, P, P, 3]: one picture a text, by the options of every stage that draws."""
    options = LoadOptions(args.model_path, need_drafter=False)
    pipe = Pipeline.from_pretrained("emoji", device="cpu", precision=args.precision, options=options)
    sampling = Sampling(temperature=args.temperature, guidance=args.cfg)
    return np.stack(pipe(texts, "ar", sampling=sampling, seed=args.seed, batch_size=AT_ONCE).images)
