"""The target's features along finished images, which its drafter learns to predict.

They are computed by the same passes as in decoding. Dimensions: n codes of an image, m tokens of an image
(codes, and row ends where the model has them), P positions of a prompt, D features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from models.decoder.packed import pack
from models.model import Model
from models.target import ARTarget, EncodedPrompt, chain_mask

BRANCHES = 2  # of guidance: conditional, unconditional


def image_tokens(model: Model, codes: Tensor) -> Tensor:
    """Returns the token ids [.., m] of codes [.., n]. Where the model has row ends, there is one after every
    row but the last."""
    ids = codes.long() + model.first_code
    row_end = model.prompts.cells.row_end
    if row_end is None:
        return ids
    rows = ids.unflatten(-1, (model.grid.height, model.grid.width))
    ends = torch.full_like(rows[..., :1], row_end)
    return torch.cat((rows, ends), dim=-1).flatten(-2)[..., :-1]


def drafter_tokens(model: Model, prompt: EncodedPrompt, branch: int, codes: Tensor) -> Tensor:
    """Returns token ids [P + m - 1] for the drafter: entry e is the token after position e.

    The drafter reads it together with the target's feature at position e. codes: [n], of one image.
    """
    prefix = torch.tensor(prompt.tokens(branch)[1:], dtype=torch.int64)
    return torch.cat((prefix, image_tokens(model, codes)))


@torch.no_grad()
def features(model: Model, prompt: EncodedPrompt, codes: Tensor) -> list[Tensor]:
    """Returns the features [P + m, D] of both guidance branches of an image, in the model's data type.

    codes: [n]. Decoding computes the same features. Row ends and a prompt's padding have features too. One
    image is one pass, because features must be the same to the last bit whatever else is encoded. On a CPU
    one image keeps the cores busy.
    """
    device = model.codebook.device
    pack(model.decoder)
    target = ARTarget(model.decoder, model.grid, model.prompts.cells, 1, BRANCHES, prompt.length, max_nodes=0)
    prefix = target.prefill({0: prompt})[0].features
    tokens = image_tokens(model, codes).to(device)[None]
    depths = torch.arange(tokens.shape[1], device=device)[None]
    hidden = target.features(tokens, depths, chain_mask(tokens.shape[1], device), [prompt.length])[:, 0]
    return [torch.cat((prefix[branch], hidden[branch])) for branch in range(BRANCHES)]
