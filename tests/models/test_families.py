"""Every family, from files in its published layout: one seed gives one image under every exact method."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest

from adt_tree.pipeline import Pipeline
from adt_tree.settings import Sampling
from tests.support.checkpoints import BUILD, Checkpoints
from tests.support.methods import TREES, check_exact

# The embedded model and GLM-Image, which has no guidance, have such tests of their own. The checkpoints of
# LlamaGen here differ from the tested ones only in their layout (test_llamagen) or in the size of images.
ELSEWHERE = ("emoji", "llamagen file", "llamagen2", "glm_image")
FAMILIES = [name for name in BUILD if name not in ELSEWHERE]
TEXTS = ["a red heart", "a very long caption of a blue cat face with a red hat on the sea", "x", "sun"]
LABELS = ["0", "3", "6", "2"]


@pytest.mark.parametrize("name", FAMILIES)
def test_every_exact_method_makes_the_images_of_the_ar_baseline(checkpoints: Checkpoints, name: str) -> None:
    """All codes are equal in fp32 under guidance, three at a time, for prompts of several lengths. EAGLE-2
    reads the drafter of every family; the other methods are tried with row ends and with padded prompts."""
    texts = LABELS if name == "llamagen classes" else TEXTS
    methods = tuple(TREES) if name in ("lumina_mgpt", "llamagen") else ("eagle-2",)
    check_exact(checkpoints[name].load(), texts, Sampling(guidance=3.0), methods)


@pytest.mark.parametrize("name", ["anole", "lumina_mgpt"])
def test_self_drafting_accepts_what_repeats(checkpoints: Checkpoints, name: str) -> None:
    """If all codes of an image are the same, copies of neighbouring codes are right drafts, with row
    separators and without."""
    model = checkpoints[name].load(need_drafter=False)
    decoder = copy.deepcopy(model.decoder)
    decoder.head.weight.zero_()
    pipe = Pipeline(replace(model, decoder=decoder))
    greedy = Sampling(temperature=0.0, guidance=3.0)
    out = pipe("sun", "self-draft", sampling=greedy, tree=TREES["self-draft"])
    assert len(set(out.codes[0])) == 1 and out.stats["target_calls"] < model.grid.size // 2
