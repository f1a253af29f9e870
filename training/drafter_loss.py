"""What a drafter is trained for: features by SmoothL1, distributions of codes, over unrolled steps.

Step 1 reads the target's features; step j reads the drafter's own features of step j - 1, as decoding does j
levels into a tree (EAGLE-3's training-time test): entry e of step j attends to target entries up to e - j + 1
and to its own ancestors, entries e - j + i of steps i = 2..j. With one step it is EAGLE's loss.

Dimensions: R rows (images, or branches of images), T entries, q code positions, D features, V codes.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from operator import mul

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adt_tree.sampling import guide
from models.drafter import DrafterNet
from models.transformer import attend_densely

RANKS = 3  # how many of the drafter's first choices are held against the target's


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of some images. coupled: the first half conditional, the second their unconditional branches."""

    tokens: Tensor  # [R, T] the token after each entry: entry e pairs feature e with token e + 1
    features: Tensor  # [R, T, D] target features
    where: Tensor  # [R, q] entries whose output predicts the feature of a token of the image
    chooses: Tensor  # [q] bool: a code is chosen there, no row end
    coupled: bool


@dataclass(frozen=True, slots=True)
class Objective:
    """L = sum_j decay^(j - 1) (SmoothL1 + p_w * distance) over steps j."""

    steps: int = 1
    p_w: float = 0.1
    decay: float = 0.8
    guidance: float | None = None  # of the distributions compared; None: each branch's own
    distance: str = "cross_entropy"  # or total_variation: 1 - the agreement


@dataclass(frozen=True, slots=True)
class Outcome:
    """Loss and its parts, and how far the distributions agree at each step, under its guidance."""

    loss: Tensor
    regression: float  # of the first step
    entropy: float
    hits: list[float]  # of the first step: the target's first choice among the drafter's first 1 .. RANKS
    agreement: list[float]  # sum over codes of min(p, q): the share of draws from q that the best rule takes


class Unrolled(nn.Module):
    """The network as a function from a batch to every step's outputs: one call a pass, so that processes
    share their gradients."""

    def __init__(self, net: DrafterNet) -> None:
        super().__init__()
        self.net = net

    def forward(self, tokens: Tensor, features: Tensor, steps: int) -> list[Tensor]:
        """Each step's predicted features [R, T, D]; output e of a step predicts feature e + 1."""
        net, length, outs = self.net, tokens.shape[1], list[Tensor]()
        attention, entry = net.block.attention, torch.arange(length, device=tokens.device)
        net.reserve(length)
        turn = net.turn(entry[None])
        distance = entry[:, None] - entry
        held: list[Tensor] = []
        for step in range(1, steps + 1):
            x = net.fuse(tokens, features)
            query, kv = attention.project(net.block.attention_norm(x), turn)
            held.append(kv)
            own = [distance == step - index for index in range(2, step + 1)]
            mask = torch.cat([distance >= step - 1, *own], dim=1)
            x = x + attention.out(attend_densely(query, torch.cat(held, dim=1), mask))
            outs.append(x + net.block.mlp(net.block.mlp_norm(x)))
            features = torch.cat((features[:, :1], outs[-1][:, :-1]), dim=1)
        return outs


def at(x: Tensor, where: Tensor) -> Tensor:
    """x [R, T, D] at entries where [R, q] -> [R, q, D]."""
    return x.gather(1, where[..., None].expand(-1, -1, x.shape[-1]))


def code_logits(features: Tensor, batch: Batch, head: nn.Module, guidance: float | None) -> Tensor:
    """Logits [.., V] fp32 where codes are chosen: guided over both branches, or each row's own."""
    chosen = features[:, batch.chooses].to(next(head.parameters()).dtype)
    logits = head(chosen).float()
    if guidance is None:
        return logits
    assert batch.coupled, "guidance needs both branches of every image"
    return guide(logits.unflatten(0, (2, -1)), guidance)


def measure(outs: list[Tensor], batch: Batch, head: nn.Module, objective: Objective) -> Outcome:
    """The loss of the steps' outputs, and how far their distributions are the target's. Means over positions,
    as the published loss: its head is frozen, its temperature 1, its distribution that of the image codes."""
    wanted = at(batch.features, batch.where + 1).float()
    p = code_logits(wanted, batch, head, objective.guidance).softmax(dim=-1)
    choice = p.argmax(dim=-1, keepdim=True)
    total, agreement = wanted.new_zeros(()), list[float]()
    for step, out in enumerate(outs):
        drafted = at(out, batch.where)
        log_q = code_logits(drafted, batch, head, objective.guidance).log_softmax(dim=-1)
        entropy = -(p * log_q).sum(dim=-1).mean()
        common = torch.minimum(p, log_q.exp()).sum(dim=-1).mean()
        distance = entropy if objective.distance == "cross_entropy" else 1 - common
        regression = F.smooth_l1_loss(drafted.float(), wanted)
        total = total + objective.decay**step * (regression + objective.p_w * distance)
        agreement.append(common.item())
        if step == 0:
            found = log_q.topk(min(RANKS, log_q.shape[-1]), dim=-1).indices == choice
            hits = found.float().cumsum(dim=-1).flatten(0, -2).mean(dim=0).tolist()
            parts = regression.item(), entropy.item(), hits
    return Outcome(total, *parts, agreement)


def expected_tau(agreement: list[float]) -> float:
    """Codes a target call of a chain whose levels are accepted so often, one after another."""
    return sum(accumulate([1.0, *agreement], mul))
