"""Alignments: which token a drafter reads beside a feature. The measured acceptance rates are those of
decoding."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from adt_tree.errors import UserError
from adt_tree.pipeline import Pipeline
from adt_tree.sampling import Sampling, log_probs
from adt_tree.tree import root_only_tree
from adt_tree.verify import Verdict
from cli.acceptance_rates import PROMPT, acceptance_rates
from models.alignment import Shifted, Unshifted
from models.family import ALIGNMENTS, LoadOptions
from tests.conftest import Refused, Run
from tests.support.checkpoints import Checkpoints


def test_tokens_of_a_tree() -> None:
    """Unshifted pairs a feature with its own code, which is that of the node's parent."""
    unshifted = Unshifted(2, 4, torch.device("cpu"))  # token ids of codes begin at 4
    assert unshifted.prompt(0, [1, 9, 7]) == [1, 9] and unshifted.prompt(1, [1, 6]) == [1]
    codes, count = torch.tensor([[10, 11, 12], [20, 0, 0]]), torch.tensor([3, 1])
    assert unshifted.committed(codes, count).tolist() == [[7 - 4, 10, 11], [6 - 4, 20, 0]]
    nodes, above = torch.tensor([[30, 31], [40, 41]]), torch.tensor([[12, 12], [20, 20]])
    assert unshifted.drafted(nodes, above) is above and Shifted().drafted(nodes, above) is nodes
    assert unshifted.committed(codes[:, :1], torch.tensor([1, 1]))[:, 0].tolist() == [12, 20]


@torch.inference_mode()
@pytest.mark.parametrize("family", ["emoji", "lumina_mgpt", "llamagen classes"])
def test_rates_are_those_of_decoding(checkpoints: Checkpoints, family: str) -> None:
    """The measured rates are those of the drafters that decoding uses, fed code by code along the AR
    baseline's image."""
    model = checkpoints[family].load()
    text = "0" if model.prompts.num_classes else PROMPT
    sampling, prompt, cells = Sampling(), model.encode(text), model.grid.width - 1
    (codes,) = Pipeline(model)(text, "ar", sampling=sampling, seed=0).codes
    one, expected = torch.ones(1, dtype=torch.int64), {}
    for name in ALIGNMENTS:
        target = model.target(1, sampling, 1, prompt.length)
        drafter = replace(model, alignment=name).drafter(target, 1, 1)
        prefix, total = target.prefill(0, prompt), 0.0
        drafter.prefill(0, prompt, prefix)
        features = torch.stack([branch[-1] for branch in prefix.features])[:, None, None]
        for cell, code in enumerate(codes[:cells]):
            tree = root_only_tree(torch.tensor([code]))
            logits, _ = drafter.extend(features, tree.codes, one, drafter.context([cell]))
            scored = target.forward(tree, [cell])
            target.commit(tree, Verdict(tree.parents, one, tree.codes))
            settings = sampling.as_tensors(logits)
            p, q = log_probs(scored.logits, settings)[:, 0].exp(), log_probs(logits, settings).exp()
            total, features = total + float(torch.minimum(p, q).sum()), scored.features
        expected[name] = total / cells
    assert acceptance_rates(model) == pytest.approx(expected, abs=1e-5)
    assert family != "emoji" or abs(expected["published"] - expected["unshifted"]) > 1e-3


def test_on_the_command_line(run: Run, refused: Refused, checkpoints: Checkpoints, tmp_path: Path) -> None:
    """The alignment changes no image. Where it is unknown, a line names the command that measures it."""
    emoji, anole = checkpoints["emoji"], checkpoints["anole"]
    words = ["generate_images", "--prompt", "sun", "--num_images", "1", "--heatmaps", "0"]
    words += ["--drafter_type", "eagle", "--output_dir"]
    pictures = []
    for choice in ALIGNMENTS:
        folder = tmp_path / choice
        status, out, err = run(*words, folder, *emoji.words(), "--drafter_alignment", choice)
        assert status == 0 and "alignment" not in err
        assert f'"drafter_alignment": "{choice}"' in out.splitlines()[-1]
        (png,) = (folder / "img").iterdir()
        pictures.append(png.read_bytes())
    assert pictures[0] == pictures[1]
    drafter = ["--drafter_path", anole.drafter]
    _, _, err = run(*words, tmp_path / "anole", *anole.words(), *drafter)
    assert "check_ckpts anole --alignment" in err
    _, out, err = run("check_ckpts", "--model", "anole", "--model_path", anole.path, *drafter, "--alignment")
    rates = json.loads(out.splitlines()[-1])["acceptance_rates"]["anole"]
    assert tuple(rates) == ALIGNMENTS and all(0 < rate < 1 for rate in rates.values()) and not err
    assert "auto" in refused(*words, tmp_path / "auto", *emoji.words(), "--drafter_alignment", "auto")
    with pytest.raises(UserError, match="--drafter_alignment auto"):
        Pipeline.from_pretrained("emoji", options=LoadOptions(drafter_alignment="auto"))
