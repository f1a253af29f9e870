"""Parity with the released evaluate_posterior functions: relaxed greedy, rejection, filters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from adt_tree.lantern import Relaxation
from adt_tree.noise import Noise
from adt_tree.sampling import PassSampling, log_probs
from adt_tree.settings import Sampling
from adt_tree.static_trees import STATIC_TREES
from adt_tree.tree import DraftTree, Topology
from adt_tree.verify import Coupled, GreedyRelaxed, Rejection, verdict_from_hits
from tests.support.decoding import tree_of
from tests.support.golden import tensors, values

CODES = 64
CASES = range(6)
ZERO = torch.zeros(1, dtype=torch.int64)


def nearest() -> Tensor:
    """Returns the recorded table of 63 neighbours."""
    return tensors("posterior_nearest")["table"].long()


def relaxation(result: dict[str, Any]) -> Relaxation | None:
    """Returns the relaxation with which a result was recorded."""
    return Relaxation(nearest(), result["k"], result["delta"]) if result["lantern"] else None


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("family", ["t0_llamagen", "t0_anole"])
def test_greedy(family: str, case: int) -> None:
    data, results = tensors("posterior_greedy"), values("posterior")[family][case]
    key = f"{family}.{case}"
    # In our trees the root is its parent, in the recorded ones it has none.
    tree = tree_of(data[f"{key}.tokens"][None], data[f"{key}.parents"].clamp_min(0)[None])
    log_p = data[f"{key}.node_logits"][None].log_softmax(-1)
    for result in results:
        relaxed = relaxation(result)
        rule = GreedyRelaxed(CODES, relaxed) if relaxed else Coupled(Noise(CODES, silent=True))
        verdict = rule(tree, log_p, log_p, ZERO, ZERO)
        length = result["accept_length"]
        assert int(verdict.count) == length + 1
        assert tree.codes[0, verdict.path[0, : length + 1]].tolist() == result["accepted_tokens"]
        assert int(verdict.codes[0, length]) == result["bonus"]


def check_sampled(tree: DraftTree, rows: Tensor, p: Tensor, result: dict[str, Any], bonus: Tensor) -> None:
    """Gives the recorded uniforms to the nodes at which they were compared, and checks the recorded
    outcome."""
    taken, chances = [], torch.full((1, tree.nodes), 2.0)
    compared = [(int(rows[test[1], test[0]]), *test[2:]) for test in result["tests"]]
    for node, code, uniform, _, accepted, _ in compared:
        assert int(tree.codes[0, node]) == code
        chances[0, node] = uniform
        taken += [node] * accepted
    rule = Rejection(CODES, tree.q is not None, relaxation(result), reference=True)
    hit, residual = rule.judge(tree, p, chances)
    verdict = verdict_from_hits(tree, hit, residual.argmax(-1))
    length = int(verdict.count)
    assert length == result["accept_length"] + 1
    assert verdict.path[0, 1:length].tolist() == taken
    torch.testing.assert_close(residual[0, verdict.path[0, length - 1]], bonus, atol=2e-6, rtol=1e-4)
    # The corrected rule decides as recorded up to the first rejection of a code with borrowed mass.
    hit, _ = Rejection(CODES, tree.q is not None, relaxation(result)).judge(tree, p, chances)
    for node, _, _, _, accepted, borrowed in compared:
        assert bool(hit[0, node]) == accepted
        if borrowed is not None and borrowed >= 0 and not accepted:
            return


RECORDED = [("dyn_lumina", case) for case in range(3)]
RECORDED += [(family, case) for family in ("dyn_llamagen", "dyn_anole") for case in CASES]


@pytest.mark.parametrize(("family", "case"), RECORDED)
def test_dynamic_rejection(family: str, case: int) -> None:
    """Compares the comparisons and the outcome of one tree under all settings. Lumina's trees have no
    separators."""
    arrays, facts = "posterior_sampled", "posterior"
    if family == "dyn_lumina":
        arrays = facts = "lumina/posterior"
    data, results = tensors(arrays), values(facts)[family][case]["results"]
    key = f"{family}.{case}"
    tree = tree_of(data[f"{key}.tokens"][None], data[f"{key}.parents"].clamp_min(0)[None])
    for number, result in enumerate(results):
        logits, settings = data[f"{key}.node_logits"][None, None], sampling(result["processor"])
        p = log_probs(logits, PassSampling.uniform(settings, logits.device)).exp()
        check_sampled(tree, data[f"{key}.retrieve_indices"], p, result, data[f"{key}.{number}.sample_p"])


def sampling(filters: dict[str, Any], top_p_first: bool = True) -> Sampling:
    """Returns the filters of the released code, in its order."""
    return Sampling(filters["temperature"], filters["top_k"], filters["top_p"], 1.0, top_p_first)


@pytest.mark.parametrize("case", CASES)
def test_static_rejection(case: int) -> None:
    data, recorded = tensors("posterior_sampled"), values("posterior")["static_llamagen"][case]
    key, static = f"static_llamagen.{case}", Topology(STATIC_TREES[recorded["tree"]])
    tokens = data[f"{key}.tokens"]
    expanded = [node for level in static.levels for node in level]
    q = torch.zeros(1, len(tokens), CODES)
    q[0, expanded] = data[f"{key}.draft_distributions"]
    tree = tree_of(tokens[None], torch.tensor([static.parents]), q)
    rows = torch.tensor(values("static_trees")[recorded["tree"]]["retrieve"])
    logits, settings = data[f"{key}.node_logits"][None, None], sampling(recorded["processor"])
    p = log_probs(logits, PassSampling.uniform(settings, logits.device)).exp()
    for number, result in enumerate(recorded["results"]):
        check_sampled(tree, rows, p, result, data[f"{key}.{number}.sample_p"])


def test_first_sibling() -> None:
    data, recorded = tensors("posterior_greedy"), values("posterior")["first_sibling"]
    p, codes = data["first_sibling.logits"].softmax(-1), data["first_sibling.x"]
    ambiguous = {tuple(entry) for entry in recorded["ambiguous"]}
    for setting in recorded["settings"]:
        k, delta = setting["k"], setting["delta"]
        value, last = p.gather(-1, codes[:, None])[:, 0], torch.full_like(codes, -1)
        if setting["lantern"]:
            _, admissible, mass = Relaxation(nearest(), k, delta).aggregate(p, codes)
            value, last = value + mass, admissible.sum(-1) - 1
        clear = torch.tensor([(k, delta, row) not in ambiguous for row in range(len(codes))])
        torch.testing.assert_close(
            value[clear], torch.tensor(setting["accept_value"])[clear], atol=1e-6, rtol=1e-5
        )
        if setting["lantern"]:
            assert last[clear].tolist() == torch.tensor(setting["jstar"])[clear].tolist()


@pytest.mark.parametrize("order", ["topk_then_topp", "topp_then_topk"])
def test_filters(order: str) -> None:
    data = tensors("posterior_greedy")
    for number, setting in enumerate(values("posterior")["filters"]):
        filters = sampling(setting, top_p_first=order == "topp_then_topk")
        logits = data["filters.logits"][None]
        probabilities = log_probs(logits, PassSampling.uniform(filters, logits.device)).exp()
        expected = data[f"filters.{number}.probs_{order}"]
        torch.testing.assert_close(probabilities, expected, atol=1e-6, rtol=1e-5)
        assert torch.equal(probabilities > 0, expected > 0)
