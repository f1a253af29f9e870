"""A new way of drafting takes one module, one row of METHODS and one test. The module here copies the codes
of the row above. It is fit for copying: it runs on all devices, and a GPU can record its steps."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.checkpoints import Checkpoints
from tests.support.runs import python

MODULE = '''
import torch

from adt_tree.proposers.candidates import Candidates, grow_chains
from adt_tree.proposers.neighbours import Neighbours


def make(setup):
    return CopyAbove(setup.batch), setup.rule()


class CopyAbove:
    """A chain of the codes that stand above."""

    def __init__(self, batch):
        self.run = batch.run
        self.neighbours = Neighbours(batch, "above")

    def calls(self, shape):
        return 0

    def prefill(self, slot, prompt, prefix, code):
        self.neighbours.begin(slot, code)

    def release(self, slot): ...

    def propose(self, start):
        return self.run(self.draft, start.shapes.all_levels, start.last_codes, start.positions)

    def draft(self, shapes, last_codes, positions):
        at = self.neighbours.ahead(positions, torch.arange(shapes.depth, device=last_codes.device))
        unknown = torch.ones_like(at, dtype=torch.bool)
        codes, _ = self.neighbours.fill(at, torch.zeros_like(at), unknown)
        confidence = torch.zeros(*codes.shape, 1, device=codes.device)
        return grow_chains(Candidates(codes[..., None], confidence), shapes, last_codes)

    def observe(self, tree, perturbed, features, verdict, positions):
        self.run(self.advance, verdict, positions)

    def advance(self, verdict, positions):
        self.neighbours.commit(positions, verdict.codes, verdict.count)
'''
ROW = """
MethodSpec(
    "copy-above",
    "drafts copy the row above",
    module="adt_tree.proposers.copy_above",
    tree=TreeShape(3, 1, 3),
    verify=("coupled",),
)
"""
SCRIPT = """
import sys

import adt_tree.proposers
from adt_tree.method import METHODS, MethodSpec
from adt_tree.policy import TreeShape

adt_tree.proposers.__path__.append(sys.argv[1])
METHODS["copy-above"] = {row}

import main

sys.exit(main.main(sys.argv[2:]))
"""


def test_a_row_and_a_module_are_a_method_everywhere(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """bench measures the method, its images are the AR baseline's, drafts are accepted, and --depth has an
    effect."""
    words = ["bench", *checkpoints["emoji"].words(), "--output_dir", str(tmp_path / "o")]
    words += "--methods copy-above --vary depth=1,3 --num_images 3 --warmup 0".split()
    (tmp_path / "copy_above.py").write_text(MODULE)
    done = python("-c", SCRIPT.format(row=ROW.strip()), tmp_path, *words)
    assert done.returncode == 0, done.stderr
    rows = [row for row in json.loads(done.stdout.splitlines()[-1])["rows"] if row["method"] == "copy-above"]
    assert [row["varied"] for row in rows] == 2 * [{"depth": 1}, {"depth": 3}]
    assert all(row["exact"] and row["same_image"] == 1 and row["drafter_calls"] == 0 for row in rows)
    assert max(row["tau"] for row in rows) > 1
