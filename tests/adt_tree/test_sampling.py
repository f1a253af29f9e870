"""Filters on distributions worked out by hand, and the nearest codes of a codebook."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from adt_tree.lantern import nearest_table
from adt_tree.sampling import PassSampling, guide, keep_top_k, keep_top_p, log_probs
from adt_tree.settings import Sampling


def logits_of(*probabilities: float) -> Tensor:
    """Returns logits of a distribution."""
    return torch.tensor(probabilities).log()


def remaining(logits: Tensor) -> list[int]:
    """Returns the codes that the filters leave."""
    return logits.isfinite().nonzero().flatten().tolist()


DISTINCT, EQUAL, HALVED = (0.4, 0.3, 0.2, 0.1), (0.25, 0.25, 0.25, 0.25), (0.5, 0.25, 0.125, 0.125)


@pytest.mark.parametrize(
    ("p", "top_p", "survivors"),
    # The smallest set that reaches top_p remains; a set that reaches it exactly needs no further code. The
    # probabilities are powers of two, for which the softmax is exact. Of equal codes the lower one comes
    # first.
    [(HALVED, 1.0, [0, 1, 2, 3]), (HALVED, 0.875, [0, 1, 2]), (HALVED, 0.8751, [0, 1, 2, 3]),
     (HALVED, 0.75, [0, 1]), (HALVED, 0.7501, [0, 1, 2]), (HALVED, 0.5, [0]), (HALVED, 0.5001, [0, 1]),
     (HALVED, 0.01, [0]), (EQUAL, 0.5, [0, 1]), ((0.125, 0.5, 0.125, 0.25), 0.75, [1, 3])],
)  # fmt: skip
def test_top_p(p: tuple[float, ...], top_p: float, survivors: list[int]) -> None:
    assert remaining(keep_top_p(logits_of(*p), top_p)) == survivors


@pytest.mark.parametrize("top_p", [1e-30, 1e-46])  # the second is 0 in fp32
def test_the_most_probable_code_stays(top_p: float) -> None:
    logits = torch.stack([logits_of(*EQUAL), logits_of(*DISTINCT), logits_of(*reversed(DISTINCT))])
    rows = torch.full((3, 1), top_p)
    for filtered in (keep_top_p(logits, top_p), keep_top_p(logits, rows)):
        assert [remaining(row) for row in filtered] == [[0], [0], [3]]


def test_filters_in_both_orders() -> None:
    logits = logits_of(*DISTINCT)[None]
    # top-k leaves 4/9, 3/9, 2/9, of which two reach 0.75. Of all four codes two reach only 0.7.
    for top_p_first, survivors in ((False, [0, 1]), (True, [0, 1, 2])):
        sampling = Sampling(top_k=3, top_p=0.75, guidance=1.0, top_p_first=top_p_first)
        filtered = log_probs(logits, PassSampling.uniform(sampling, logits.device))
        assert remaining(filtered) == survivors
        assert filtered.exp().sum().item() == pytest.approx(1.0)
    # Both filters bind: two codes by mass, one by number.
    for top_p_first in (False, True):
        sampling = Sampling(top_k=1, top_p=0.6, guidance=1.0, top_p_first=top_p_first)
        assert remaining(log_probs(logits, PassSampling.uniform(sampling, logits.device))) == [0]


def test_greedy_reads_the_unfiltered_guided_distribution() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 0.0], [0.5, 0.0, 2.5, 1.0]])
    sampling = Sampling(temperature=0.0, top_k=1, top_p=0.1, guidance=2.0)
    assert sampling.greedy
    expected = guide(logits, 2.0).log_softmax(-1)
    assert torch.equal(log_probs(logits, PassSampling.uniform(sampling, logits.device)), expected)
    assert int(expected.argmax()) == 1
    assert Sampling(temperature=1e-5).greedy
    assert not Sampling(temperature=1e-4).greedy


@pytest.mark.parametrize("top_k", [0, 1, 7, 40, 299, 2000])
def test_top_k_keeps_what_the_sorted_order_keeps(top_k: int) -> None:
    """Many logits are equal. 0 keeps all, as a number beyond the codes does."""
    logits = torch.randn(50, 300, generator=torch.Generator().manual_seed(top_k)).round(decimals=1)
    least = logits.sort(dim=-1, descending=True).values[:, min(top_k, 300) - 1, None]
    assert torch.equal(keep_top_k(logits, top_k), logits.masked_fill(logits < least, float("-inf")))


def test_distribution_is_fp32_for_bf16_logits() -> None:
    logits = torch.tensor([[0.1, 1.7, -0.3]]).bfloat16()
    assert torch.equal(
        log_probs(logits, PassSampling.uniform(Sampling(guidance=1.0), logits.device)),
        logits.float()[0].log_softmax(-1),
    )


def test_nearest_table() -> None:
    line = torch.tensor([[0.0], [1.0], [3.0], [7.0]])
    for width in range(4):
        table = torch.tensor([[1, 2, 3], [0, 2, 3], [1, 0, 3], [2, 1, 0]])[:, :width]
        assert torch.equal(nearest_table(line, width), table)
    for width in (-1, 4):
        with pytest.raises(ValueError, match="neighbours"):
            nearest_table(line, width)


def test_nearest_table_in_blocks() -> None:
    """There are more codes than one block holds; a code is not its own neighbour, and distances ascend."""
    codebook = torch.randn(1100, 4, generator=torch.Generator().manual_seed(0))
    everything = torch.cdist(codebook.double(), codebook.double()).fill_diagonal_(float("inf"))
    distance = everything.gather(1, nearest_table(codebook, 5))
    torch.testing.assert_close(everything.topk(5, largest=False).values, distance)
