"""The likelihood of images under the model: mean -log p per code, whichever method made the codes.

p is the guided distribution at temperature 1 without filters, after the codes before it in raster order. So
images at any temperature compare, and a code that a filter would exclude has a finite value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from adt_tree.roles import Model, Request, Target
from adt_tree.sampling import Sampling, log_probs
from adt_tree.tree import DraftTree
from adt_tree.verify import Verdict
from eval.runs.measurements import Measured

NODES = 32  # codes of a pass


@torch.inference_mode()
def add_nll(
    model: Model, guidance: float, requests: Sequence[Request], measured: Mapping[str, Sequence[Measured]]
) -> None:
    """Sets `nll` of all images. requests: those from which they were made. measured: by configuration."""
    prompts, sampling = {request.name: request.prompt for request in requests}, Sampling(guidance=guidance)
    target = model.target(1, sampling, NODES, max(prompt.length for prompt in prompts.values()))
    for image in (image for batches in measured.values() for batch in batches for image in batch.images):
        image.nll = nll(target, sampling, prompts[image.name], image.codes)


def nll(target: Target, sampling: Sampling, prompt: object, image: Sequence[int]) -> float:
    """Returns the mean of -log p over the codes of an image. target: with a slot and room for NODES nodes."""
    ends = [target.grid.is_row_end(position) for position in range(target.grid.length)]
    following = iter(image)
    cells = torch.tensor([0 if end else next(following) for end in ends], device=target.device)
    logits = target.prefill(0, prompt).logits[:, None]
    settings, first = sampling.as_tensors(logits), 0
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
