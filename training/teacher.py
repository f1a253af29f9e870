"""The target's features along finished images, which its drafter learns to predict.

They are computed by the same passes as in decoding. Dimensions: B images, n codes per image, m tokens per
image (codes, and row ends where the model has them), P positions of a prompt, D features.
"""

from __future__ import annotations

from collections.abc import Sequence

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
    if model.prompts.row_end is None:
        return ids
    rows = ids.unflatten(-1, (model.grid.height, model.grid.width))
    ends = torch.full_like(rows[..., :1], model.prompts.row_end)
    return torch.cat((rows, ends), dim=-1).flatten(-2)[..., :-1]


def drafter_tokens(model: Model, prompt: EncodedPrompt, branch: int, codes: Tensor) -> Tensor:
    """Returns token ids [P + m - 1] for the drafter: entry e is the token after position e.

    The drafter reads it together with the target's feature at position e. codes: [n], of one image.
    """
    prefix = torch.tensor(prompt.tokens(branch)[1:], dtype=torch.int64)
    return torch.cat((prefix, image_tokens(model, codes)))


@torch.no_grad()
def features(model: Model, prompts: Sequence[EncodedPrompt], codes: Tensor) -> list[list[Tensor]]:
    """Returns the features [P + m, D] of both guidance branches of every image, in the model's data type.

    codes: [B, n]. Decoding computes the same features. Row ends and a prompt's padding have features too.
    """
    device, count = model.codebook.device, len(prompts)
    longest = max(prompt.length for prompt in prompts)
    pack(model.decoder)
    target = ARTarget(model.decoder, model.grid, model.cell_ids, count, BRANCHES, longest, max_nodes=0)
    prefixes = [target.prefill(slot, prompt).features for slot, prompt in enumerate(prompts)]
    tokens = image_tokens(model, codes).to(device)
    length = tokens.shape[1]
    depths = torch.arange(length, device=device).expand(count, -1)
    ancestors = chain_mask(length, device).expand(count, -1, -1)
    hidden = target.features(tokens, depths, ancestors, [prompt.length for prompt in prompts])
    return [
        [torch.cat((prefixes[image][branch], hidden[branch, image])) for branch in range(BRANCHES)]
        for image in range(count)
    ]
