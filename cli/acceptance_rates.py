"""Measures how well a drafter predicts its target in each alignment (models.alignment)."""

from __future__ import annotations

import torch

from adt_tree.decode import autoregressive, finished
from adt_tree.grid import Grid
from adt_tree.noise import Noise
from adt_tree.roles import Request
from adt_tree.sampling import Sampling, log_probs
from models.decoder.packed import pack
from models.model import Model
from models.target import ARTarget, chain_mask

CELLS = 32  # codes of the one image on which the alignments are compared
PROMPT = "a photo of a red flower"


@torch.inference_mode()
def acceptance_rates(model: Model) -> dict[str, float]:
    """Returns, for each alignment, the mean of sum_x min(p(x), q(x)) over the first cells of one image.

    p is the target's distribution under the family's published guidance and q the drafter's, at temperature 1
    without filters. The sum is the rate at which rejection sampling accepts one draft (arXiv:2211.17192). The
    image is that of the AR baseline at seed 0. The model must have a drafter.
    """
    net, sampling = model.drafter_net, Sampling(1.0, 0, 1.0, model.spec.guidance)
    assert net is not None, "check_ckpts loads a drafter"
    # The image has one row, so it has no row ends.
    cells = min(CELLS, model.grid.rasters[0].width - 1)
    prompt = model.encode("0" if model.prompts.num_classes else PROMPT)
    grid, ids = Grid(1, cells + 1), model.cell_ids
    pack(model.decoder)
    target = ARTarget(model.decoder, grid, ids, 1, sampling.branches, prompt.length, max_nodes=cells)
    request, noise = Request("drafter alignment", prompt, seed=0), Noise(model.num_codes, silent=False)
    (image,) = finished(autoregressive(target, [request], sampling, noise))

    # One pass along the image gives every p, and one of the drafter every q.
    prefix, codes = target.prefill(0, prompt), torch.tensor([image.codes[:cells]], device=model.device)
    order = torch.arange(cells, device=model.device)[None]
    scored = target.score(codes, order, chain_mask(cells, model.device), committed=(0,))
    settings = sampling.as_tensors(scored.logits)
    p, rates = log_probs(scored.logits, settings).exp(), {}
    net.reserve(prompt.length + cells)
    for shift, name in ((1, "published"), (0, "unshifted")):
        predicted = []
        for branch, prompt_features in enumerate(prefix.features):
            features = torch.cat((prompt_features, scored.features[branch, 0, :-1]))
            tokens = prompt.tokens(branch) + [code + model.first_code for code in image.codes[:cells]]
            paired = torch.tensor([tokens[shift : shift + len(features)]], device=model.device)
            predicted.append(net.causal(paired, features[None])[:, -cells:])
        q = log_probs(target.logits(torch.stack(predicted)), settings).exp()
        rates[name] = float(torch.minimum(p, q).sum(dim=-1).mean())
    return rates
