"""The drafter's training: its unrolled steps are what decoding does, and a short run learns and exports."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import torch

from adt_tree.sampling import Sampling
from models.drafter import DrafterNet, EagleDrafter
from models.registry import Model, load
from training import distil, drafter
from training.loop import append_jsonl

ENTRIES = 9  # pairs (feature at p, token at p + 1) before the tree


@pytest.fixture(scope="module")
def model(tiny_checkpoint: Path) -> Model:
    return load("emoji", str(tiny_checkpoint), None, "fp32", "cpu", need_drafter=True)


def arguments(module: object, *words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    return parser.parse_args(words)


@torch.no_grad()
def decoded_levels(
    net: DrafterNet, model: Model, codes: torch.Tensor, features: torch.Tensor
) -> list[torch.Tensor]:
    """Features of a chain grown by the decoding drafter below ENTRIES committed pairs."""
    target = model.target(1, Sampling(guidance=1), max_nodes=4, max_prompt=1)
    decoding = EagleDrafter(net, target, max_depth=4, max_width=1)
    count = torch.tensor([ENTRIES])
    _, feature = decoding.extend(features[None, :, :ENTRIES], codes[None, :ENTRIES], count, reach=ENTRIES)
    levels = [feature[0, 0]]
    for depth in range(3):
        code = codes[None, ENTRIES + depth, None]
        seen = torch.ones(1, 1, depth + 1, dtype=torch.bool)
        _, grown = decoding.expand(code, levels[-1][None, None, None], seen, depth, reach=ENTRIES)
        levels.append(grown[0, 0, 0])
    return levels


@torch.no_grad()
def test_unrolled_steps_are_the_levels_of_a_tree(model: Model) -> None:
    net = model.drafter_net
    torch.manual_seed(1)
    codes = torch.randint(model.num_codes, (ENTRIES + 3,))
    features = torch.randn(1, ENTRIES + 3, net.config.hidden_size)
    levels = decoded_levels(net, model, codes, features)
    steps = list(drafter.unroll(net, codes[None] + model.layout.first_code, features, steps=4))
    for step, (out, level) in enumerate(zip(steps, levels, strict=True)):
        torch.testing.assert_close(out[0, ENTRIES - 1 + step], level, atol=1e-5, rtol=1e-5)
    # The control: a step that read the target's feature instead of its own would not be that level.
    wrong = net.causal(codes[None] + model.layout.first_code, features)[0, ENTRIES]
    assert (wrong - levels[1]).abs().max() > 1e-2


def test_distilled_images_train_a_drafter_that_decoding_loads(
    tiny_checkpoint: Path, model: Model, tmp_path: Path
) -> None:
    words = ["a cat", "dog", "the sun", "pie"] * 3
    for index, word in enumerate(words):
        row = {"index": index, "style": "noto", "name": word, "keywords": ["k"], "split": "train"}
        append_jsonl(tmp_path / "captions.jsonl", row)
    place = ("--work_dir", str(tmp_path), "--model_path", str(tiny_checkpoint), "--threads", "1")
    for number in (5, 12):  # the second call resumes the first
        distil.run(arguments(distil, *place, "--num_images", str(number), "--batch_size", "3"))
    rows = distil.read_distilled(tmp_path)
    assert sorted(int(row["name"]) for row in rows) == list(range(12))
    assert all(len(row["codes"]) == model.grid.size for row in rows)

    copy = tmp_path / "checkpoint"
    copy.mkdir()
    for file in tiny_checkpoint.iterdir():
        if file.is_file():
            (copy / file.name).write_bytes(file.read_bytes())
    options = ("--batch_size", "4", "--minutes", "0.06", "--checkpoint_minutes", "0.02")
    drafter.run(
        arguments(drafter, "--work_dir", str(tmp_path), "--model_path", str(copy), "--threads", "1", *options)
    )
    losses = [json.loads(line) for line in (tmp_path / "losses_drafter.jsonl").read_text().splitlines()]
    assert len(losses) >= 2 and losses[-1]["loss"] < losses[0]["loss"]
    again = load("emoji", str(copy), None, "fp32", "cpu", need_drafter=True)
    assert again.drafter_net is not None and not again.drafter_net.fc.weight.equal(
        model.drafter_net.fc.weight
    )


def test_too_few_images_are_refused(tiny_checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="run `distil`"):
        drafter.run(arguments(drafter, "--work_dir", str(tmp_path), "--model_path", str(tiny_checkpoint)))
