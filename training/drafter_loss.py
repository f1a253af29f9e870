"""The loss of a drafter: SmoothL1 on features and cross-entropy of codes, over unrolled steps.

Step 1 reads the target's features. Step j reads the drafter's own features of step j - 1, as decoding does at
level j of a tree (training-time test, EAGLE-3, 2503.01840). With one step this is EAGLE's loss (2401.15077).

Dimensions: R rows (images, or guidance branches of images), T entries, q token positions of an image,
D features, V codes. Entry e pairs the target's feature at position e with the token at position e + 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from operator import mul

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adt_tree.sampling import guide
from models.decoder.transformer import attend_densely
from models.drafter import DrafterNet


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of some images. If coupled, the first half is conditional and the second half unconditional."""

    tokens: Tensor  # [R, T] the token of each entry
    features: Tensor  # [R, T, D] target features
    entries: Tensor  # [R, q] entries whose output predicts the feature of a token of the image
    is_code: Tensor  # [q] bool: that token's successor is a code, not a row end
    coupled: bool


@dataclass(frozen=True, slots=True)
class Objective:
    """L = sum_j decay^(j - 1) (SmoothL1 + p_w * cross-entropy) over steps j."""

    steps: int = 1
    p_w: float = 0.1
    decay: float = 0.8
    guidance: float | None = None  # of the distributions that are compared; None: each branch by itself


@dataclass(frozen=True, slots=True)
class Outcome:
    """The loss, its parts, and the agreement with the target at each step."""

    loss: Tensor
    regression: float  # SmoothL1 of the first step
    entropy: float  # cross-entropy of the first step
    agreement: list[float]  # sum over codes of min(p, q): how often the best rule accepts a sample from q


class Unrolled(nn.Module):
    """A drafter that returns the outputs of all steps in one forward call.

    Distributed training averages gradients per forward call, so the steps must be in one.
    """

    def __init__(self, net: DrafterNet) -> None:
        super().__init__()
        self.net = net

    def forward(self, tokens: Tensor, features: Tensor, steps: int) -> list[Tensor]:
        """Returns the predicted features [R, T, D] of each step; output e predicts feature e + 1.

        Entry e of step j stands for the node j - 1 levels below the committed entry e - j + 1. It attends to
        the committed entries and to the ancestors on its path, each at the step that computed it:

            step 3, entry e:   step 1: 0 .. e-2    step 2: e-1    step 3: e
        """
        net, length, outputs = self.net, tokens.shape[1], list[Tensor]()
        entry = torch.arange(length, device=tokens.device)
        net.reserve(length)
        rotation = net.rotations(entry[None])
        distance = entry[:, None] - entry
        keys_values: list[Tensor] = []
        for step in range(1, steps + 1):
            x = net.fuse(tokens, features)
            query, kv = net.block.project(x, rotation)
            keys_values.append(kv)
            ancestors = [distance == step - earlier for earlier in range(2, step + 1)]
            mask = torch.cat([distance >= step - 1, *ancestors], dim=1)
            outputs.append(net.block.merge(x, attend_densely(query, torch.cat(keys_values, dim=1), mask)))
            features = torch.cat((features[:, :1], outputs[-1][:, :-1]), dim=1)
        return outputs


def at(x: Tensor, entries: Tensor) -> Tensor:
    """Returns the rows [R, q, D] of x [R, T, D] at `entries` [R, q]."""
    return x.gather(1, entries[..., None].expand(-1, -1, x.shape[-1]))


def code_logits(features: Tensor, batch: Batch, head: nn.Module, guidance: float | None) -> Tensor:
    """Returns fp32 logits [.., V] where a code follows: guided over both branches, or each row by itself.

    features: [R, q, D].
    """
    before_codes = features[:, batch.is_code].to(next(head.parameters()).dtype)
    logits = head(before_codes).float()
    if guidance is None:
        return logits
    assert batch.coupled, "guidance needs both branches of every image"
    return guide(logits.unflatten(0, (2, -1)), guidance)


def measure(outputs: list[Tensor], batch: Batch, head: nn.Module, objective: Objective) -> Outcome:
    """Returns the loss of the steps' outputs and their agreement with the target, as means over positions.

    As in the published loss, the head is frozen, the temperature is 1 and the distributions are those over
    image codes.
    """
    targets = at(batch.features, batch.entries + 1).float()
    p = code_logits(targets, batch, head, objective.guidance).softmax(dim=-1)
    total, agreement = targets.new_zeros(()), list[float]()
    for step, output in enumerate(outputs):
        drafted = at(output, batch.entries)
        log_q = code_logits(drafted, batch, head, objective.guidance).log_softmax(dim=-1)
        entropy = -(p * log_q).sum(dim=-1).mean()
        overlap = torch.minimum(p, log_q.exp()).sum(dim=-1).mean()
        regression = F.smooth_l1_loss(drafted.float(), targets)
        total = total + objective.decay**step * (regression + objective.p_w * entropy)
        agreement.append(overlap.item())
        if step == 0:
            parts = regression.item(), entropy.item()
    return Outcome(total, *parts, agreement)


def expected_tau(agreement: list[float]) -> float:
    """Returns the codes per target call of a chain whose level j is accepted at a rate of agreement[j - 1].

    1 + a_1 + a_1 a_2 + ...: a level counts only if all above it are accepted.
    """
    return sum(accumulate([1.0, *agreement], mul))
