"""Muon (Jordan et al. 2024): momentum, then orthogonalised updates, for the hidden matrices of a network.

torch.optim.Muon computes one matrix at a time and always in bfloat16, which is a hundred times slower than
fp32 on a CPU without bfloat16 units. The class here stacks matrices of equal shape, takes the data type as an
option, and orthogonalises the parts of a fused projection (q, k, v) one by one.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor, nn

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ROUNDS, MOMENTUM = 4, 0.95


def orthogonalise(matrices: Tensor, dtype: torch.dtype = torch.float32, rounds: int = ROUNDS) -> Tensor:
    """Returns an approximation of U V^T for each of the matrices U S V^T [G, m, n], by Newton-Schulz rounds.

    Its singular values lie between 0.7 and 1.2. dtype: of the computation; the result has the data type of
    the matrices.
    """
    a, b, c = COEFFICIENTS
    wide = matrices.shape[1] <= matrices.shape[2]
    x = matrices if wide else matrices.mT
    x = (x / x.flatten(1).norm(dim=1).clamp(min=1e-7)[:, None, None]).to(dtype)
    for _ in range(rounds):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x if wide else x.mT).to(matrices.dtype)


class Muon(torch.optim.Optimizer):
    """Muon with Nesterov momentum and decoupled weight decay.

    Updates have a root mean square of 0.2 * lr, as AdamW's do, so that both share one learning-rate scale.
    params: 2-D, with the attribute `muon_parts`, the number of equal blocks of rows that are orthogonalised
    one by one. dtype: of the Newton-Schulz rounds.
    """

    def __init__(
        self, params: list[nn.Parameter], lr: float, weight_decay: float, dtype: torch.dtype
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Updates every parameter that has a gradient."""
        assert closure is None
        for group in self.param_groups:
            stacks: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = defaultdict(list)
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["momentum"] = torch.zeros_like(param)
                state["momentum"].lerp_(param.grad, 1 - MOMENTUM)
                update = param.grad.lerp(state["momentum"], MOMENTUM)
                parts = param.chunk(param.muon_parts), update.chunk(param.muon_parts)
                for weight, part in zip(*parts, strict=True):
                    stacks[tuple(weight.shape)].append((weight, part))
            for (rows, columns), pairs in stacks.items():
                update = orthogonalise(torch.stack([part for _, part in pairs]), self.dtype)
                scale = 0.2 * max(rows, columns) ** 0.5 * group["lr"]
                for (weight, _), change in zip(pairs, update, strict=True):
                    weight.mul_(1 - group["lr"] * group["weight_decay"]).add_(change, alpha=-scale)


def muon_and_adamw(
    module: nn.Module, muon_lr: float, adam_lr: float, weight_decay: float, dtype: torch.dtype = torch.float32
) -> list[torch.optim.Optimizer]:
    """Returns Muon for the matrices of a decoder's blocks or of a drafter, and AdamW for everything else.

    weight_decay: of Muon's matrices alone, as a factor of the learning rate. dtype: of Muon's rounds.
    """
    hidden: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    for name, param in module.named_parameters():
        is_matrix = name.startswith(("blocks.", "block.", "fc.")) and param.ndim == 2 and "qk_" not in name
        (hidden if is_matrix else rest).append(param)
        if is_matrix:
            parts = {"qkv": 3, "gate_up": 2}.get(name.split(".")[-2], 1)
            param.muon_parts = parts  # type: ignore[attr-defined]
    muon = Muon(hidden, muon_lr, weight_decay, dtype)
    return [muon, torch.optim.AdamW(rest, lr=adam_lr, betas=(0.9, 0.95), weight_decay=0.0)]
