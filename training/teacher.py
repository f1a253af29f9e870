"""The target's features along finished images, by the passes that decode: what its drafter is taught.

Dimensions: B images, n codes an image, m tokens an image (codes, and row ends where the model has them), P
rows of a prefix, D features.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from adt_tree.grid import Grid
from models.model import Model
from models.target import ARTarget, EncodedPrompt, chain_mask

BRANCHES = 2


def image_tokens(model: Model, codes: Tensor) -> Tensor:
    """Codes [.., n] -> [.., m], still counted from code 0: a row end behind every row but the last."""
    if model.row_end is None:
        return codes.long()
    rows = codes.long().unflatten(-1, (model.grid.height, model.grid.width))
    ends = torch.full_like(rows[..., :1], model.row_end - model.first_code)
    return torch.cat((rows, ends), dim=-1).flatten(-2)[..., :-1]


def drafter_tokens(model: Model, opening: EncodedPrompt, branch: int, codes: Tensor) -> Tensor:
    """Token ids [P + m - 1] of one image: entry e is the token behind row e, paired with its feature."""
    prefix = torch.tensor(opening.tokens(branch)[1:], dtype=torch.int64)
    return torch.cat((prefix, image_tokens(model, codes) + model.first_code))


@torch.no_grad()
def features(model: Model, openings: Sequence[EncodedPrompt], codes: Tensor) -> list[list[Tensor]]:
    """[P + m, D] of both guidance branches of every image; codes [B, n].

    They are those that decoding sees, in the model's type: a drafter reads them with row ends and padding.
    """
    device, count = model.codebook.device, len(openings)
    grid = model.grid if model.row_end is None else Grid(model.grid.height, model.grid.width + 1)
    longest = max(opening.length for opening in openings)
    target = ARTarget(
        model.decoder, grid, model.first_code, model.num_codes, count, BRANCHES, longest, max_nodes=0
    )
    prefixes = [target.prefill(slot, opening).features for slot, opening in enumerate(openings)]
    tokens = image_tokens(model, codes).to(device)
    length = tokens.shape[1]
    depths = torch.arange(length, device=device).expand(count, -1)
    hidden = target.features(tokens, depths, chain_mask(length, device).expand(count, -1, -1), 0)
    return [
        [torch.cat((prefixes[image][branch], hidden[branch, image])) for branch in range(BRANCHES)]
        for image in range(count)
    ]
