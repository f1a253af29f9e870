"""Helpers of the tests of decoding: a model of two networks, draft trees from lists, verdicts, codes by
name."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from adt_tree.grid import Grid
from adt_tree.policy import TreeShape
from adt_tree.proposers.eagle import StaticGrowth
from adt_tree.records import Decoded
from adt_tree.roles import Target, run_directly
from adt_tree.static_trees import STATIC_TREES
from adt_tree.tree import DraftTree, Topology, ancestor_mask
from adt_tree.verify import Verdict
from models.cell_tokens import CellIds
from models.codecs.vq import VQConfig
from models.decoder.transformer import Decoder
from models.drafter import DrafterNet
from models.model import Model

CPU = torch.device("cpu")


def model_of(
    decoder: Decoder,
    net: DrafterNet,
    grid: Grid,
    first_code: int,
    codebook: Tensor,
    row_end: int | None = None,
    graphs: bool = False,
) -> Model:
    """Returns two networks as a model, which can neither read texts nor decode pixels."""
    # Stands for both the prompt encoder and the codec.
    stand_in: Any = SimpleNamespace(
        cells=CellIds(range(first_code, first_code + len(codebook)), row_end),
        guided=True,
        codebook=codebook,
        config=VQConfig(num_embeddings=len(codebook)),
    )
    nothing: Any = None
    return Model(nothing, grid, stand_in, decoder, stand_in, net, "", None, nothing, graphs=graphs)


def target_of(grid: Grid, num_codes: int) -> Any:
    """Returns the part of a target with one slot that a proposer without a network reads."""
    return SimpleNamespace(grid=grid, slots=1, num_codes=num_codes, device=CPU, run=run_directly)


def codes_of(images: Iterable[Decoded]) -> dict[str, list[int]]:
    """Returns the codes of images by their names."""
    return {image.name: image.codes for image in images}


def tree_of(codes: Tensor, parents: Tensor, q: Tensor | None = None) -> DraftTree:
    """Returns trees of codes [B, N] whose nodes are all valid; depths and ancestors follow from parents [B,
    N]."""
    depths = torch.zeros_like(parents)
    for node in range(1, parents.shape[1]):
        depths[:, node] = depths.gather(1, parents[:, node : node + 1])[:, 0] + 1
    depth = int(depths.max())
    width = int(torch.nn.functional.one_hot(parents[:, 1:], parents.shape[1]).sum(dim=1).max())
    valid = torch.ones_like(parents, dtype=torch.bool)
    return DraftTree(codes, parents, depths, ancestor_mask(parents, depth), valid, depth, width, q)


def chain(codes: Tensor) -> DraftTree:
    """Returns chains of codes [B, N] as trees."""
    return tree_of(codes, (torch.arange(codes.shape[1]) - 1).clamp_min(0).expand_as(codes))


def random_tree(slots: int, nodes: int, num_codes: int, seed: int) -> DraftTree:
    """Returns trees of random topology with random codes."""
    generator = torch.Generator().manual_seed(seed)
    parents = torch.zeros(slots, nodes, dtype=torch.int64)
    for node in range(1, nodes):
        parents[:, node] = (torch.rand(slots, generator=generator) * node).long()
    return tree_of(torch.randint(0, num_codes, (slots, nodes), generator=generator), parents)


def path_to(tree: DraftTree, slot: int, node: int) -> list[int]:
    """Returns the nodes from the root to a node."""
    path = [node]
    while path[0]:
        path.insert(0, int(tree.parents[slot, path[0]]))
    return path


def accept(paths: list[list[int]]) -> Verdict:
    """Returns the verdict that accepts these paths, one per slot, root first. Its codes are meaningless,
    because commits do not read them."""
    longest = max(map(len, paths))
    index = torch.tensor([path + [0] * (longest - len(path)) for path in paths])
    return Verdict(index, torch.tensor([len(path) for path in paths]), index)


def commit_two_paths(target: Target, seed: int) -> list[list[int]]:
    """Commits two random paths of different lengths in every slot. Returns the committed codes by slot."""
    taken: list[list[int]] = [[] for _ in range(target.slots)]
    for turn in range(2):
        tree = random_tree(target.slots, 9, target.num_codes, seed + turn)
        target.forward(tree, [*map(len, taken)])
        paths = [path_to(tree, slot, (3 * slot + 5 * turn + 2) % 9) for slot in range(target.slots)]
        target.commit(tree, accept(paths))
        for slot, path in enumerate(paths):
            taken[slot] += tree.codes[slot, path].tolist()
    return taken


def static_growth(name: str, keep_q: bool = False) -> tuple[StaticGrowth, TreeShape]:
    """Returns the growth of one of STATIC_TREES, and its shape."""
    tree = Topology(STATIC_TREES[name])
    return StaticGrowth(tree, keep_q, CPU), TreeShape(tree.depth, tree.width, len(tree.parents) - 1)
