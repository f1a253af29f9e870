"""The likelihood of images under the model: mean -log p per code, whichever method made the codes.

p is the guided distribution at temperature 1 without filters, after the codes before it in raster order. So
images at any temperature compare, and a code that a filter would exclude has a finite value.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from adt_tree.roles import Target
from adt_tree.sampling import PassSampling, log_probs
from adt_tree.settings import Sampling
from adt_tree.tree import DraftTree
from adt_tree.verify import Verdict

NODES = 128  # codes of a pass


def nll(target: Target, sampling: Sampling, prompt: object, image: Sequence[int]) -> float:
    """Returns the mean of -log p over the codes of an image. target: with a slot and room for NODES nodes."""
    ends = [target.grid.is_row_end(position) for position in range(target.grid.length)]
    following = iter(image)
    cells = torch.tensor([0 if end else next(following) for end in ends], device=target.device)
    logits = target.prefill(0, prompt).logits[:, None]
    settings, first = PassSampling.uniform(sampling, logits.device), 0
    values = [log_probs(logits, settings)[:, cells[0]]]
    for codes in cells[:-1].split(NODES):  # each code as the parent of the next
        depths = torch.arange(len(codes), device=target.device)[None]
        ancestors, every = depths[..., None] >= depths[:, None], torch.ones_like(depths, dtype=torch.bool)
        tree = DraftTree(codes[None], (depths - 1).clamp(min=0), depths, ancestors, every, len(codes) - 1, 1)
        log_p = log_probs(target.forward(tree, [first]).logits[:, 0], settings)
        target.commit(tree, Verdict(depths, depths[:, -1] + 1, codes[None]))
        values.append(log_p.gather(1, cells[first + 1 : first + 1 + len(codes), None])[:, 0])
        first += len(codes)
    return -float(torch.cat(values)[~torch.tensor(ends)].mean())
