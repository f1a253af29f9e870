"""The two decoding loops: autoregressive() is the AR baseline, speculative() drafts. B images are in flight.

Coupled verification is lossless because the sampling noise is a function of (seed, position): at every node
of the tree the rule makes the choice that the AR baseline would make there, and it accepts a draft if and
only if the draft is that choice.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from functools import partial

import torch
from torch import Tensor

from adt_tree.batch import BatchSlots, StepOutput, nan_error
from adt_tree.noise import PositionNoise
from adt_tree.noise_table import NoiseTable
from adt_tree.policy import ROOT_ONLY, Policy
from adt_tree.ranges import part
from adt_tree.records import Decoded
from adt_tree.roles import Prefix, Proposer, Request, StepStart, Target
from adt_tree.sampling import PassSampling, log_probs
from adt_tree.settings import Sampling
from adt_tree.tree import DraftTree, root_only_tree
from adt_tree.verify import Coupled, Rule, Verdict, root_verdict


def finished(steps: Iterable[StepOutput]) -> Iterator[Decoded]:
    """Returns the images of a loop, each as soon as it is finished."""
    return (image for step in steps for image in step.finished)


@torch.inference_mode()
def autoregressive(
    target: Target, noise: NoiseTable, requests: Iterable[Request | None], sampling: Sampling
) -> Iterator[StepOutput]:
    """Yields the outcome of every target call of the AR baseline, which commits one code per image.

    The code is y = argmax(log p + G) with Gumbel noise G, a sample from p by the Gumbel-max trick. Coupled
    verification commits the same codes at the same seed.
    """
    rule, slots = Coupled(noise.noise), BatchSlots(target, requests, [target.release], sampling)
    idle = [ROOT_ONLY] * target.slots

    def begin(slot: int, request: Request, sampling: Sampling) -> Tensor:
        noise.begin(slot, request.seed, sampling.greedy)
        return first_code(target, rule, sampling, slot, request)[0]

    while slots.refill(begin):
        clock = time.perf_counter()
        with part("noise"):
            noise.advance(slots.committed)
        tree = target.run(root_only_tree, slots.last_codes)
        with part("target"):
            scored = target.forward(tree, slots.committed)
        noise_here = noise.at(slots.positions[:, None])
        top1, verdict = target.run(choose, slots.sampling, scored.logits, noise_here)
        with part("commit"):
            target.commit(tree, verdict)
        yield slots.advance(tree, top1, verdict, idle, clock)


def choose(sampling: PassSampling, logits: Tensor, noise: PositionNoise) -> tuple[Tensor, Verdict]:
    """Returns the log-probability of the most probable code [B, 1], and the verdict for trees that consist of
    the root: the argmax of log p + G follows it. logits [G, B, 1, V]; noise of that position."""
    log_p = log_probs(logits, sampling, noise.forced)
    return log_p.amax(dim=-1), root_verdict((log_p + noise.gumbel).argmax(dim=-1))


@torch.inference_mode()
def speculative(
    target: Target,
    proposer: Proposer,
    policy: Policy,
    rule: Rule,
    noise: NoiseTable,
    requests: Iterable[Request | None],
    sampling: Sampling,
) -> Iterator[StepOutput]:
    """Yields the outcome of every target call. A step is: shape, draft, score, verify, commit, observe.

    Under an exact rule the codes are distributed as the target's. Under the coupled rule without LANTERN they
    are the codes of autoregressive() at the same seed.
    """

    def begin(slot: int, request: Request, sampling: Sampling) -> Tensor:
        noise.begin(slot, request.seed, sampling.greedy)
        code, prefix = first_code(target, rule, sampling, slot, request)
        proposer.prefill(slot, request.prompt, prefix, code)
        policy.reset(slot, request.seed)
        return code

    slots = BatchSlots(target, requests, [target.release, proposer.release], sampling)
    while slots.refill(begin):
        clock = time.perf_counter()
        positions, committed, settings = slots.positions, slots.committed, slots.sampling
        with part("noise"):
            noise.advance(committed)
        # Shape: the policy sets the depth, width and budget of each image's tree.
        shapes = slots.shapes(policy)
        # Draft: a tree of likely continuations of the last committed code.
        with part("tree"):
            bounds, noise_below = slots.bounds(shapes, policy), partial(noise.below, positions)
            longest = target.padding.longest(committed)
            tree = proposer.propose(
                StepStart(bounds, slots.last_codes, positions, noise_below, longest, settings)
            )
        # Score: one target pass computes the distribution after every node.
        with part("target"):
            scored = target.forward(tree, committed)
        # Verify: the rule accepts a path of the tree, and the target chooses the code that follows it.
        with part("verify"):
            noise_here = noise.at(positions[:, None] + tree.depths)
            inputs = (tree, scored.logits, noise_here, slots.seeds, positions)
            top1, perturbed, verdict = target.run(judge, rule, settings, *inputs)
        # Commit: the cache entries of the path become part of the prefix; none is computed again.
        with part("commit"):
            target.commit(tree, verdict)
        # Observe: the proposer learns from the verdict, and the policy from the host's record of the step.
        with part("tree"):
            proposer.observe(tree, perturbed, scored.features, verdict, positions)
        step = slots.advance(tree, top1, verdict, shapes, clock)
        for slot, image in step.images:
            image.drafter_calls += proposer.calls(shapes[slot])
        policy.observe({slot: image.steps[-1] for slot, image in step.images})
        yield step


def judge(
    rule: Rule,
    sampling: PassSampling,
    tree: DraftTree,
    logits: Tensor,
    noise: PositionNoise,
    seeds: Tensor,
    positions: Tensor,
) -> tuple[Tensor, Tensor, Verdict]:
    """Returns the log-probability of the most probable code after every node [B, N], log p + G [B, N, V], and
    the verdict of the rule.

    noise: of the position after each node. logits [G, B, N, V]; seeds, positions [B].
    """
    log_p = log_probs(logits, sampling, noise.forced)
    perturbed = log_p + noise.gumbel
    return log_p.amax(dim=-1), perturbed, rule(tree, log_p, perturbed, seeds, positions)


def first_code(
    target: Target, rule: Rule, sampling: Sampling, slot: int, request: Request
) -> tuple[Tensor, Prefix]:
    """Prefills a slot. Returns the first code of the image, a scalar sampled by the rule, and the prefix."""
    with part("prefill"):
        prefix = target.prefill(slot, request.prompt)
    zero = torch.zeros(1, dtype=torch.int64, device=target.device)
    log_p = log_probs(prefix.logits[:, None], PassSampling.uniform(sampling, target.device))
    if bool(log_p[0, 0].isnan()):
        raise nan_error(request.name, 0)
    if sampling.greedy:  # the rule would add noise if the engine also samples images at other temperatures
        return log_p.argmax(dim=-1)[0], prefix
    return rule.choose(log_p, zero + request.seed, zero)[0], prefix
