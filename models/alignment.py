"""The alignment of a drafter: which token it reads beside each feature (option --drafter_alignment).

With tokens t and features f, entry p of a drafter's cache predicts the feature at p + 1 from a pair:

    published   (f[p], t[p + 1])   with the token that the target generated from f[p]: EAGLE, arXiv:2401.15077
    unshifted   (f[p], t[p])       with the feature's own token

The released code drafts with the first and trains the drafters of Anole and Lumina-mGPT with the second. A
drafter works best the way it was trained, and nobody published which way that was: `auto` measures both.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from adt_tree.decode import autoregressive, finished
from adt_tree.grid import Grid
from adt_tree.noise import Noise
from adt_tree.roles import Request
from adt_tree.sampling import Sampling, log_probs
from models.spec import ALIGNMENTS
from models.target import ARTarget, chain_mask

if TYPE_CHECKING:
    from models.model import Model

CELLS = 32  # codes of the one image on which `auto` compares the alignments
PROMPT = "a photo of a red flower"


class Shifted:
    """Pairs each feature with the token after it."""

    def prompt(self, slot: int, tokens: list[int]) -> list[int]:
        """Returns the tokens that are paired with a prompt's features, for all features but the last. That
        one is paired by committed(), once the first code is known."""
        return tokens[1:]

    def committed(self, codes: Tensor, count: Tensor) -> Tensor:
        """Returns the codes [B, A] to pair with the features from which the target generated `codes` [B, A].

        The first count [B] codes of a row are valid, perhaps none. Separators are codes here too: token id
        less first_code.
        """
        return codes

    def drafted(self, codes: Tensor, ancestors: Tensor) -> Tensor:
        """Returns the codes [B, W] to pair with the features of a level's parents. See Drafter.expand."""
        return codes


class Unshifted:
    """Pairs each feature with its own token: the code before the one that the target generated from it."""

    def __init__(self, slots: int, first_code: int, device: torch.device) -> None:
        self._first_code = first_code
        # [B]: the newest code of each slot; before the first code, the prompt's last token less first_code.
        self._newest = torch.zeros(slots, dtype=torch.int64, device=device)
        self._expanded = self._newest[:, None][:, :0]  # [B, E]: codes of the nodes expanded in this tree

    def prompt(self, slot: int, tokens: list[int]) -> list[int]:
        self._newest[slot] = tokens[-1] - self._first_code
        return tokens[:-1]

    def committed(self, codes: Tensor, count: Tensor) -> Tensor:
        before = torch.cat((self._newest[:, None], codes[:, :-1]), dim=1)
        last = codes.gather(1, (count[:, None] - 1).clamp(min=0))[:, 0]
        self._newest.copy_(torch.where(count > 0, last, self._newest))
        return before

    def drafted(self, codes: Tensor, ancestors: Tensor) -> Tensor:
        # Levels follow one another, so a node's parent is the last of its ancestors in earlier levels.
        earlier = ancestors.shape[2] - codes.shape[1]
        codes_above = torch.cat((self._newest[:, None], self._expanded[:, :earlier]), dim=1)  # the root first
        self._expanded = torch.cat((codes_above[:, 1:], codes), dim=1)
        number = torch.arange(earlier + 1, device=codes.device)
        is_above = torch.cat((torch.ones_like(ancestors[..., :1]), ancestors[..., :earlier]), dim=2)
        return codes_above.gather(1, (is_above * number).amax(dim=2))


def pairing(alignment: str, target: ARTarget) -> Shifted | Unshifted:
    """Returns the pairing of tokens with features in that alignment, for a drafter of this target."""
    if alignment == "published":
        return Shifted()
    return Unshifted(target.slots, target.first_code, target.device)


def choose_alignment(model: Model, alignment: str | None, guidance: float) -> Model:
    """Returns the model with this alignment of its drafter; None means the family's default.

    `auto` measures both alignments under this guidance and prints its choice on stderr.
    """
    alignment = alignment or model.spec.alignment
    if model.drafter_net is None:
        return model
    if alignment == "auto":
        rates = acceptance_rates(model, guidance)
        alignment = max(ALIGNMENTS, key=lambda name: rates[name])  # published where they tie
        measured = ", ".join(f"{name} {rate:.3f}" for name, rate in rates.items())
        print(f"drafter alignment: {alignment} (acceptance rates: {measured})", file=sys.stderr)
    return replace(model, alignment=alignment)


@torch.inference_mode()
def acceptance_rates(model: Model, guidance: float) -> dict[str, float]:
    """Returns, for each alignment, the mean of sum_x min(p(x), q(x)) over the first cells of one image.

    p is the target's guided distribution and q the drafter's, at temperature 1 without filters. The sum is
    the rate at which rejection sampling accepts one draft (arXiv:2211.17192). The image is that of the AR
    baseline at seed 0.
    """
    net, sampling = model.drafter_net, Sampling(1.0, 0, 1.0, guidance)
    assert net is not None
    # The image has one row, because some families have separators between rows.
    cells = min(CELLS, model.grid.rasters[0].width - 1)
    prompt = model.encode("0" if model.prompts.num_classes else PROMPT)
    grid, ids = Grid(1, cells + 1), model.code_ids
    target = ARTarget(model.decoder, grid, ids, 1, sampling.branches, prompt.length, max_nodes=cells)
    request, noise = Request("drafter alignment", prompt, seed=0), Noise(model.num_codes, silent=False)
    (image,) = finished(autoregressive(target, [request], sampling, noise))

    # One pass along the image gives every p, and one of the drafter every q.
    prefix, codes = target.prefill(0, prompt), torch.tensor([image.codes[:cells]], device=model.device)
    order = torch.arange(cells, device=model.device)[None]
    scored = target.score(codes, order, chain_mask(cells, model.device), committed=(0,))
    p, rates = log_probs(scored.logits, sampling).exp(), {}
    net.reserve(prompt.length + cells)
    for shift, name in ((1, "published"), (0, "unshifted")):
        predicted = []
        for branch, prompt_features in enumerate(prefix.features):
            features = torch.cat((prompt_features, scored.features[branch, 0, :-1]))
            tokens = prompt.tokens(branch) + [code + model.first_code for code in image.codes[:cells]]
            paired = torch.tensor([tokens[shift : shift + len(features)]], device=model.device)
            predicted.append(net.causal(paired, features[None])[:, -cells:])
        q = log_probs(target.logits(torch.stack(predicted)), sampling).exp()
        rates[name] = float(torch.minimum(p, q).sum(dim=-1).mean())
    return rates
