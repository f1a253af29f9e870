"""Calibration: rates of the reached nodes by source, rank and bin. The hybrid names a code once."""

from __future__ import annotations

import pytest
import torch

from adt_tree.calibrate import BOTH, DRAFTER, PRIOR, SEED, STALE, Calibration
from adt_tree.decode import speculative
from adt_tree.hybrid import HybridProposer
from adt_tree.noise import Noise
from adt_tree.policy import Fixed, TreeShape
from adt_tree.tree import DraftTree, ancestor_mask
from adt_tree.verify import Coupled, Verdict, reached_nodes
from tests.test_engine import CODES, IMAGES, LAWS, make_target
from tests.test_jacobi import hybrid

CPU = torch.device("cpu")


def tree(bins: list[int]) -> DraftTree:
    """Root 0; children 1, 2; node 3 under 1, node 4 under 2; the last node is padding."""
    parents = torch.tensor([[0, 0, 0, 1, 2, 0]])
    valid = torch.tensor([[True] * 5 + [False]])
    depths = torch.tensor([[0, 1, 1, 2, 2, 1]])
    codes = torch.zeros(1, 6, dtype=torch.int64)
    return DraftTree(
        codes, parents, depths, ancestor_mask(parents, 2), valid, 2, 2, bins=torch.tensor([bins])
    )


def test_only_reached_nodes_count() -> None:
    calibration = Calibration(2, CPU)
    before = calibration.visits.clone(), calibration.hits.clone()
    verdict = Verdict(torch.tensor([[0, 1, 0]]), torch.tensor([2]), torch.zeros(1, 3))
    # Node 1 is accepted, node 3 below it is not: 1, 2 and 3 were reached, 4 hangs below a rejected node.
    calibration.observe(tree([0, 1, 2, 3, 4, 5]), verdict)
    assert (calibration.visits - before[0])[:7].tolist() == [0, 1, 1, 1, 0, 0, 0]
    assert (calibration.hits - before[1])[:7].tolist() == [0, 1, 0, 0, 0, 0, 0]


def test_reached_nodes_leave_out_root_and_padding() -> None:
    """Node 1 and 3 below it are accepted: 1, 2 and 3 were reached, the root and padding (5) never are."""
    verdict = Verdict(torch.tensor([[0, 1, 3]]), torch.tensor([3]), torch.zeros(1, 3))
    reached, accepted = reached_nodes(tree([0] * 6), verdict)
    assert reached.tolist() == [[False, True, True, True, False, False]]
    assert accepted.tolist() == [[False, True, False, True, False, False]]


def test_rates_converge_to_what_is_seen_and_start_at_what_is_said() -> None:
    calibration = Calibration(2, CPU)
    said = torch.tensor([0.95, 0.03]).log()
    bins = calibration.bins(STALE, torch.zeros(2, dtype=torch.int64), said)
    assert calibration.log_rate(bins, said).exp() == pytest.approx([0.95, 0.03], abs=1e-5)
    sure = int(bins[0])
    for turn in range(200):
        path = [0, 1, 0] if turn % 4 == 0 else [0, 0, 0]
        count = 2 if turn % 4 == 0 else 1
        verdict = Verdict(torch.tensor([path]), torch.tensor([count]), torch.zeros(1, 3))
        calibration.observe(tree([0, sure, 0, 0, 0, 0]), verdict)
    seen = (50 + PRIOR * 0.97) / (200 + PRIOR)
    assert calibration.log_rate(bins, said).exp() == pytest.approx([0.95 * seen / 0.97, 0.03], abs=1e-5)
    assert calibration.log_rate(bins[:1], torch.zeros(1)) > calibration.log_rate(bins[:1], said[:1])


def test_sources_and_ranks_have_bins_of_their_own() -> None:
    calibration, said = Calibration(3, CPU), torch.tensor(-0.7)
    bins = {
        int(calibration.bins(source, torch.tensor(rank), said))
        for source in (DRAFTER, STALE, BOTH, SEED)
        for rank in range(3)
    }
    assert len(bins) == 12 and max(bins) < len(calibration.visits)
    far = calibration.bins(SEED, torch.tensor(9), said)
    assert far == calibration.bins(SEED, torch.tensor(2), said)


def test_codes_without_a_bin_are_neither_counted_nor_corrected() -> None:
    calibration, said = Calibration(2, CPU), torch.tensor([-0.7])
    none = torch.tensor([calibration.unbinned])
    verdict = Verdict(torch.tensor([[0, 1, 0]]), torch.tensor([2]), torch.zeros(1, 3))
    calibration.observe(tree([0, *none.tolist(), 2, 3, 4, 5]), verdict)
    assert float(calibration.visits.sum()) == PRIOR * len(calibration.visits) + 2  # nodes 2 and 3, not 1
    assert float(calibration.log_rate(none, said)) == float(said)


@pytest.mark.parametrize("law", ["sampled", "greedy", "filtered"])
def test_no_two_children_of_a_hybrid_node_share_a_code(law: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two would both be hits of the coupled rule, and the walk takes at most one child a node."""
    seen, grow = [], HybridProposer.propose

    def propose(self: HybridProposer, *args: object) -> DraftTree:
        seen.append(grow(self, *args))
        return seen[-1]

    monkeypatch.setattr(HybridProposer, "propose", propose)
    target = make_target(2, LAWS[law].branches)
    shape = Fixed(TreeShape(6, 4, 30))
    rule = Coupled(Noise(CODES, silent=LAWS[law].greedy))
    list(speculative(target, hybrid(target, LAWS[law], 2, 4), shape, rule, IMAGES, LAWS[law]))
    assert len(seen) > 10 and max(tree.nodes for tree in seen) > 12
    for grown in seen:
        for image in range(2):
            nodes = grown.valid[image].nonzero().flatten().tolist()[1:]
            named = [(int(grown.parents[image, n]), int(grown.codes[image, n])) for n in nodes]
            assert len(set(named)) == len(named)
            assert all(int(grown.parents[image, n]) < n for n in nodes)
            above = grown.depths[image][grown.parents[image, nodes]]
            assert torch.equal(above + 1, grown.depths[image, nodes])
