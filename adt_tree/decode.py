"""The two decoding loops: autoregressive() is the AR baseline, speculative() drafts. B images are in flight.

Coupled verification is lossless because the sampling noise is a function of (seed, position): at every node
of the tree the rule makes the choice that the AR baseline would make there, and it accepts a draft if and
only if the draft is that choice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from adt_tree.batch import BatchSlots, StepOutput, outcomes
from adt_tree.policy import ROOT_ONLY, Policy
from adt_tree.ranges import part
from adt_tree.records import Decoded
from adt_tree.roles import Prefix, Proposer, Request, Target
from adt_tree.sampling import PassSampling, log_probs
from adt_tree.settings import Sampling
from adt_tree.tree import DraftTree, root_only_tree
from adt_tree.verify import Coupled, Rule, Verdict, root_verdict


def finished(steps: Iterable[StepOutput]) -> Iterator[Decoded]:
    """Returns the images of a loop, each as soon as it is finished."""
    return (image for step in steps for image in step.finished)


@torch.inference_mode()
def autoregressive(
    target: Target, slots: BatchSlots, requests: Iterable[Request | None]
) -> Iterator[StepOutput]:
    """Yields the outcome of every target call of the AR baseline, which commits one code per image.

    The code is y = argmax(log p + G) with Gumbel noise G, a sample from p by the Gumbel-max trick. Coupled
    verification commits the same codes at the same seed.
    """
    rule, idle = Coupled(slots.noise.noise), [ROOT_ONLY] * target.slots

    slots.open(requests)
    while slots.refill(lambda begun: first_codes(target, rule, begun)[0]):
        bounds = target.padding.committed(slots.committed)
        with part("target"):
            tree, verdict, table = target.run(next_codes, target, slots, slots.sampling, bounds)
        yield slots.advance(tree, verdict, table, idle)


def next_codes(
    target: Target, slots: BatchSlots, sampling: PassSampling, bounds: Sequence[int]
) -> tuple[DraftTree, Verdict, Tensor]:
    """Does score_and_judge() for trees that consist of the root. Returns the trees, the verdict and the table
    for the host."""
    tree = root_only_tree(slots.last_codes.clone())  # a copy, because the step overwrites these codes
    _, _, verdict, _, table = score_and_judge(target, follow_root, slots, sampling, tree, bounds)
    return tree, verdict, table


def follow_root(
    tree: DraftTree, log_p: Tensor, perturbed: Tensor, seeds: Tensor, positions: Tensor
) -> Verdict:
    """Returns the verdict for trees that consist of the root: the argmax of log p + G follows it."""
    return root_verdict(perturbed.argmax(dim=-1))


@torch.inference_mode()
def speculative(
    target: Target,
    proposer: Proposer,
    policy: Policy,
    rule: Rule,
    slots: BatchSlots,
    requests: Iterable[Request | None],
) -> Iterator[StepOutput]:
    """Yields the outcome of every target call. A step is: shape, draft, score, verify, commit, observe.

    Under an exact rule the codes are distributed as the target's. Under the coupled rule without LANTERN they
    are the codes of autoregressive() at the same seed.
    """

    def begin(begun: Mapping[int, tuple[Request, Sampling]]) -> Tensor:
        table, prefixes = first_codes(target, rule, begun)
        for (slot, (request, _)), code in zip(begun.items(), table[:, 0], strict=True):
            proposer.prefill(slot, request.prompt, prefixes[slot], code)
            policy.reset(slot, request.seed)
        return table

    slots.open(requests)
    while slots.refill(begin):
        # Shape: the policy sets the depth, width and budget of each image's tree.
        shapes = slots.shapes(policy)
        # Draft: a tree of likely continuations of the last committed code.
        with part("tree"):
            tree = proposer.propose(slots.step_start(shapes, policy))
        # Score, verify and commit, which one recording repeats on a GPU.
        with part("target"):
            inputs = (target, rule, slots, slots.sampling, tree, target.padding.committed(slots.committed))
            perturbed, features, verdict, positions, table = target.run(score_and_judge, *inputs)
        # Observe: the proposer learns from the verdict, and the policy from the host's record of the step.
        with part("tree"):
            proposer.observe(tree, perturbed, features, verdict, positions)
        step = slots.advance(tree, verdict, table, shapes)
        for slot, image in step.images:
            image.drafter_calls += proposer.calls(shapes[slot])
        policy.observe({slot: image.steps[-1] for slot, image in step.images})
        yield step


def score_and_judge(
    target: Target,
    judge: Callable[[DraftTree, Tensor, Tensor, Tensor, Tensor], Verdict],
    slots: BatchSlots,
    sampling: PassSampling,
    tree: DraftTree,
    bounds: Sequence[int],
) -> tuple[Tensor, Tensor, Verdict, Tensor, Tensor]:
    """Takes a step on the device: scores and judges the trees and commits the accepted paths.

    judge: a Rule, or follow_root(). bounds: of Padding.committed(). Returns log p + G [B, N, V], features
    [G, B, N, D], the verdict, the positions [B] before it, and the table for the host (batch.outcomes).
    """
    # Score: one target pass computes the distribution after every node.
    scored = target.forward(tree, bounds)
    # Verify: the rule accepts a path of the tree, and the target chooses the code that follows it.
    with part("verify"):
        below = slots.positions[:, None] + tree.depths
        noise, positions = slots.noise.at(below), below[:, 0]
        log_p = log_probs(scored.logits, sampling, noise.forced)
        perturbed = log_p + noise.gumbel
        verdict = judge(tree, log_p, perturbed, slots.noise.seeds, positions)
        table = outcomes(tree, log_p.amax(dim=-1), verdict)
    # Commit: the cache entries of the path become part of the prefix; none is computed again.
    with part("commit"):
        target.commit(tree, verdict)
        slots.commit(verdict)
    return perturbed, scored.features, verdict, positions, table


def first_codes(
    target: Target, rule: Rule, begun: Mapping[int, tuple[Request, Sampling]]
) -> tuple[Tensor, Mapping[int, Prefix]]:
    """Prefills slots. Returns a table [slots, 2] int64 for the host, and the prefixes. A row of the table is
    the first code, sampled by the rule, and 1 if its logits are not numbers."""
    with part("prefill"):
        prefixes = target.prefill({slot: request.prompt for slot, (request, _) in begun.items()})
    zero, table = torch.zeros(1, dtype=torch.int64, device=target.device), []
    for slot, (request, sampling) in begun.items():
        log_p = log_probs(prefixes[slot].logits[:, None], PassSampling.uniform(sampling, target.device))
        # Greedy apart: the rule adds noise if the engine also samples other images.
        greedy = sampling.greedy
        code = log_p.argmax(dim=-1) if greedy else rule.choose(log_p, zero + request.seed, zero)
        table.append(torch.cat((code, log_p[0, :1].isnan())))
    return torch.stack(table), prefixes
