"""Alignments: under each, a drafter predicts what its network computes over whole sequences. The measured
acceptance rates are those of decoding."""

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
from models.acceptance_rates import PROMPT, acceptance_rates
from models.alignment import Shifted, Unshifted
from models.family import ALIGNMENTS, LoadOptions
from models.model import Model
from tests.checkpoints import Checkpoints, load
from tests.conftest import Refused, Run

SAMPLING = Sampling()


@pytest.fixture(scope="module")
def model(tiny_checkpoint: Path) -> Model:
    """Returns the tiny model with its drafter."""
    return load("emoji", tiny_checkpoint)


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
@pytest.mark.parametrize("name", ALIGNMENTS)
def test_a_chain_is_the_network_over_the_sequence(model: Model, name: str) -> None:
    """Committing pairs and then drafting a chain gives the features of a causal pass over the whole
    sequence."""
    prompt, codes = model.encode("red heart"), [5, 9, 2, 7, 7, 1]
    target = model.target(1, SAMPLING, 1, prompt.length)
    drafter = replace(model, alignment=name).drafter(target, 4, 1)
    prefix = target.prefill(0, prompt)
    generator = torch.Generator().manual_seed(0)
    width = prefix.features[0].shape[-1]
    new = torch.randn(2, 1, 3, width, generator=generator)  # features at the codes 5, 9, 2 of both branches
    last = torch.stack([branch[-1] for branch in prefix.features])[:, None, None]
    drafter.prefill(0, prompt, prefix)
    one = torch.ones(1, dtype=torch.int64)
    drafter.extend(last, torch.tensor([codes[:1]]), one, 0)
    _, feature = drafter.extend(new, torch.tensor([codes[1:4]]), 3 * one, 4)
    chain = [feature[:, 0]]
    for depth, place in enumerate(drafter.places(torch.arange(2), [1, 1])):
        above, code = torch.tensor([[codes[3 + depth]], [codes[4 + depth]]]).split(1)
        seen = torch.arange(2)[None, None] <= depth
        _, feature = drafter.expand(code, above, feature.view(2, 1, 1, -1), seen, place)
        chain.append(feature[:, 0, 0])
    for branch in range(2):
        tokens = prompt.tokens(branch) + [code + model.first_code for code in codes]
        features = torch.cat((prefix.features[branch], new[branch, 0]))
        for drafted in chain:
            entries = tokens[1 : len(features) + 1] if name == "published" else tokens[: len(features)]
            whole = drafter.net.causal(torch.tensor([entries]), features[None])[0, -1]
            torch.testing.assert_close(drafted[branch], whole, atol=1e-5, rtol=1e-5)
            features = torch.cat((features, drafted[branch][None]))


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
