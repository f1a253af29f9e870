"""replay --rules: what other lossless rules would have accepted on a run's sampled trees.

The trees are those of the run, at the roots that its rejection rule reached, each drafted from q by draws
that no earlier decision looked at; so every rule's expectation over them is that of a cycle begun there. The
coupled rule needs drafts of its own: it decodes the prompts once more, with the same topology.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from adt_tree.tree import STATIC_TREES, StaticTree
from eval import arms
from eval.dumped import DumpedImage, Trees, requests
from eval.errors import UserError
from eval.method import Method
from eval.traversal import Sampled, accepted, rejection, traversal
from models.model import Model

CHAIN = "chain"


def check(run: Path, recorded: Method, dumps: Sequence[DumpedImage]) -> None:
    """UserError if the run has no sampled trees."""
    if any(dump.trees is None for dump in dumps):
        how = "static" if recorded.static else "dynamic"
        raise UserError(
            f"{run}: --rules needs sampled trees, this run has {how} ones under {recorded.verify} "
            "verification; dump one with --verify rejection --static_tree at a temperature above 0"
        )


def compare(model: Model, recorded: Method, dumps: Sequence[DumpedImage], slots: int) -> list[dict[str, Any]]:
    """A row a rule: on the run's trees, and on their first draws alone where a coupled chain of that length
    exists."""
    tree = StaticTree(STATIC_TREES[recorded.static])
    found: dict[tuple[str, str], list[Tensor]] = {}
    for dump in tqdm(dumps, unit="image", disable=None):
        drafts = sampled(tree, dump.trees)
        found.setdefault((recorded.static, "as run"), []).append(dump.trees.accepted.double())
        for name, on in {recorded.static: drafts, CHAIN: drafts.first_path()}.items():
            for rule in (rejection, traversal):
                found.setdefault((name, rule.__name__), []).append(accepted(on, rule(on)))
    for name in dict.fromkeys((recorded.static, CHAIN)):
        if StaticTree(STATIC_TREES[name]).depth == tree.depth:
            method = replace(recorded, static=name, verify="coupled", rules="fixed")
            found[name, "coupled"] = list(coupled(model, method, dumps, slots))
    rows = [_row(name, rule, torch.cat(lengths)) for (name, rule), lengths in found.items()]
    taus = {row["tree"]: row["tau"] for row in rows if row["rule"] == "coupled"}
    for row in rows:
        row["over_coupled"] = round(row["tau"] / taus[row["tree"]] - 1, 4) if row["tree"] in taus else None
    return sorted(rows, key=lambda row: row["tree"] == CHAIN)


def sampled(tree: StaticTree, trees: Trees) -> Sampled:
    """Recorded trees as drafts."""
    return Sampled(tree, trees.codes, trees.valid, trees.log_p.double().exp(), trees.q.double())


def coupled(model: Model, method: Method, dumps: Sequence[DumpedImage], slots: int) -> Iterator[Tensor]:
    """Accepted codes of every cycle, an image at a time, of the coupled rule on the recorded prompts."""
    longest = max(dump.length for dump in dumps)
    arm = arms.build(model, method, slots, longest)
    for image in arm.decode(requests(dumps)):
        yield torch.tensor([step.accepted for step in image.steps], dtype=torch.float64)


def _row(tree: str, rule: str, lengths: Tensor) -> dict[str, Any]:
    """lengths: expected or counted accepted codes of every cycle."""
    named = "block" if (tree, rule) == (CHAIN, "traversal") else rule
    error = float(lengths.std()) / len(lengths) ** 0.5 if len(lengths) > 1 else 0.0
    tau = round(1 + float(lengths.mean()), 4)
    return {"tree": tree, "rule": named, "tau": tau, "tau_se": round(error, 4), "cycles": len(lengths)}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Rows for a reader."""
    head = f"{'tree':<16} {'rule':<10} {'tau':>6} {'+-':>6} {'over coupled':>13} {'cycles':>7}"
    lines = [head, "-" * len(head)]
    for r in rows:
        over = "-" if r["over_coupled"] is None else f"{r['over_coupled']:+.1%}"
        lines.append(
            f"{r['tree']:<16} {r['rule']:<10} {r['tau']:>6.3f} {r['tau_se']:>6.3f} {over:>13} "
            f"{r['cycles']:>7}"
        )
    lines += [
        "",
        "tau: codes a target call; +-: its standard error over cycles. rejection, traversal and block",
        "(traversal on a chain) are exact expectations on the run's trees, as chain on their first draws;",
        "as run: what the run counted; coupled: counted on the same prompts and seeds with its own drafts.",
    ]
    return "\n".join(lines)
