"""The token shift of a drafter, measured where nobody knows it (option --drafter_alignment)."""

from __future__ import annotations

import sys
from dataclasses import replace

import torch

from adt_tree.noise import Noise
from adt_tree.sampling import Sampling, log_probs
from adt_tree.tree import root_only_tree
from adt_tree.verify import Coupled
from models.model import Model
from models.spec import TOKEN_SHIFTS

CELLS = 32  # codes of one image that are looked at
PROBE = "a photo of a red flower"


def settle(model: Model, wanted: str | None, guidance: float) -> Model:
    """The model with the token shift that is wanted (None: its family's), or that auto finds the better under
    this guidance; says on stderr which."""
    wanted = wanted or model.spec.token_shift
    if model.drafter_net is None or wanted == "published":
        return model
    if wanted == "auto":
        found = agreement(model, guidance)
        wanted = max(TOKEN_SHIFTS, key=lambda name: found[name])  # the first, published, where they tie
        shares = ", ".join(f"{name} {share:.3f}" for name, share in found.items())
        print(f"drafter alignment: {wanted} (shares agreed on: {shares})", file=sys.stderr)
    return replace(model, token_shift=wanted)


@torch.inference_mode()
def agreement(model: Model, guidance: float) -> dict[str, float]:
    """By token shift: the mean over an image's first cells of sum_x min(p(x), q(x)), p the target's guided
    distribution and q the drafter's, both at temperature 1 without filters: the rate at which one draft would
    be accepted.

    Both drafters are led along the codes that the target draws; one image, CELLS target passes.
    """
    sampling, device = Sampling(1.0, 0, 1.0, guidance), model.codebook.device
    prompt, cells = model.encode("0" if model.prompts.num_classes else PROBE), min(CELLS, model.grid.size - 1)
    target = model.target(1, sampling, 1, prompt.length)
    drafters = {name: replace(model, token_shift=name).drafter(target, 1, 1) for name in TOKEN_SHIFTS}
    prefix = target.prefill(0, prompt)
    rule, zero = (
        Coupled(Noise(model.num_codes, silent=False)),
        torch.zeros(1, dtype=torch.int64, device=device),
    )
    code = rule.choose(log_probs(prefix.logits[:, None], sampling), zero, zero)
    features = torch.stack([branch[-1] for branch in prefix.features])[:, None, None]
    for drafter in drafters.values():
        drafter.prefill(0, prompt, prefix)
    shares = dict.fromkeys(TOKEN_SHIFTS, 0.0)
    for cell in range(cells):
        drafted = {}
        for name, drafter in drafters.items():
            logits, _ = drafter.extend(features, code[:, None], zero + 1, [cell])
            drafted[name] = log_probs(logits, sampling)[0].exp()
        tree = root_only_tree(code)
        scored = target.forward(tree, [cell])
        log_p, position = log_probs(scored.logits, sampling), zero + cell + 1
        perturbed = log_p + rule.noise.gumbel(zero, position[:, None])
        verdict = rule(tree, log_p, perturbed, zero, position)
        target.commit(tree, verdict)
        code, features = verdict.codes[:, 0], scored.features
        for name, q in drafted.items():
            shares[name] += float(torch.minimum(q, log_p[0, 0].exp()).sum()) / cells
    return shares
