"""The drafter's training: its unrolled steps are what decoding does, and a short run learns and exports."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from adt_tree.sampling import Sampling
from main import main
from models.drafter import DrafterNet, EagleDrafter
from models.model import Model
from models.registry import load
from training import distil, drafter
from training.errors import StageError
from training.loop import append_jsonl

ENTRIES = 9  # pairs (feature at p, token at p + 1) before the tree


@pytest.fixture(scope="module")
def model(tiny_checkpoint: Path) -> Model:
    return load("emoji", str(tiny_checkpoint), None, "fp32", "cpu", need_drafter=True)


def write_captions(folder: Path) -> None:
    """Twelve training captions."""
    for index, word in enumerate(["a cat", "dog", "the sun", "pie"] * 3):
        row = {"index": index, "style": "noto", "name": word, "keywords": ["k"], "split": "train"}
        append_jsonl(folder / "captions.jsonl", row)


def copy_target(checkpoint: Path, folder: Path, scale: float = 1.0) -> Path:
    """The target alone, its final norm scaled: 1 leaves the weights what they are."""
    folder.mkdir()
    for name in ("config.json", "text_tokenizer.json"):
        (folder / name).write_bytes((checkpoint / name).read_bytes())
    state = load_file(checkpoint / "model.safetensors")
    state["model.norm.weight"] = state["model.norm.weight"] * scale
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def draw(work: Path, checkpoint: Path, number: int, *words: str) -> list[dict]:
    """Run distil; the file's rows by name."""
    place = ("--work_dir", str(work), "--model_path", str(checkpoint), "--threads", "1", "--batch_size", "3")
    distil.run(arguments(distil, *place, "--num_images", str(number), *words))
    rows = [json.loads(line) for line in (work / "distilled.jsonl").read_text().splitlines()]
    return sorted(rows, key=lambda row: int(row["name"]))


def train(work: Path, checkpoint: Path, *words: str) -> argparse.Namespace:
    """Run drafter; its arguments."""
    place = ("--work_dir", str(work), "--model_path", str(checkpoint), "--threads", "1", "--batch_size", "4")
    args = arguments(drafter, *place, *words)
    drafter.run(args)
    return args


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
    steps = list(drafter.unroll(net, codes[None] + model.first_code, features, steps=4))
    for step, (out, level) in enumerate(zip(steps, levels, strict=True)):
        torch.testing.assert_close(out[0, ENTRIES - 1 + step], level, atol=1e-5, rtol=1e-5)
    # The control: a step that read the target's feature instead of its own would not be that level.
    wrong = net.causal(codes[None] + model.first_code, features)[0, ENTRIES]
    assert (wrong - levels[1]).abs().max() > 1e-2


def test_distilled_images_train_a_drafter_that_decoding_loads(
    tiny_checkpoint: Path, model: Model, tmp_path: Path
) -> None:
    write_captions(tmp_path)
    for number in (5, 12):  # the second call resumes the first
        draw(tmp_path, tiny_checkpoint, number)
    rows = distil.read_distilled(tmp_path, model.weights_sha)
    assert sorted(int(row["name"]) for row in rows) == list(range(12))
    assert all(len(row["codes"]) == model.grid.size for row in rows)

    copy = copy_target(tiny_checkpoint, tmp_path / "checkpoint")
    train(tmp_path, copy, "--minutes", "0.06", "--checkpoint_minutes", "0.02")
    losses = [json.loads(line) for line in (tmp_path / "losses_drafter.jsonl").read_text().splitlines()]
    assert len(losses) >= 2 and losses[-1]["loss"] < losses[0]["loss"]
    again = load("emoji", str(copy), None, "fp32", "cpu", need_drafter=True)
    assert again.drafter_net is not None and not again.drafter_net.fc.weight.equal(
        model.drafter_net.fc.weight
    )


def test_too_few_images_are_refused(tiny_checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(StageError, match="run `distil`"):
        drafter.run(arguments(drafter, "--work_dir", str(tmp_path), "--model_path", str(tiny_checkpoint)))


def test_a_torn_line_is_dropped_and_its_image_made_again(
    tiny_checkpoint: Path, model: Model, tmp_path: Path
) -> None:
    write_captions(tmp_path)
    whole = draw(tmp_path, tiny_checkpoint, 4)
    path = tmp_path / "distilled.jsonl"
    for cut in (1, 30):  # the line end alone, or half of the line
        path.write_bytes(path.read_bytes()[:-cut])
        assert len(distil.read_distilled(tmp_path, model.weights_sha)) == 3
        assert draw(tmp_path, tiny_checkpoint, 4) == whole
    path.write_text(path.read_text().replace("{", "", 1))  # the control: a line inside is not dropped
    with pytest.raises(StageError, match="line 1: damaged"):
        draw(tmp_path, tiny_checkpoint, 4)


def test_images_of_another_target_are_refused(
    tiny_checkpoint: Path, model: Model, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_captions(tmp_path)
    first = draw(tmp_path, copy_target(tiny_checkpoint, tmp_path / "same"), 2)
    assert draw(tmp_path, tiny_checkpoint, 3)[:2] == first  # equal weights from another folder go on
    other = copy_target(tiny_checkpoint, tmp_path / "other", scale=1.5)
    words = ["--work_dir", str(tmp_path), "--model_path", str(other), "--threads", "1"]
    for stage in ("distil", "drafter"):
        capsys.readouterr()
        assert main(["train_emoji", stage, *words]) == 2
        line = capsys.readouterr().err
        assert line.count("\n") == 1 and str(tmp_path / "distilled.jsonl") in line
        assert model.weights_sha in line and "`distil --restart`" in line
    anew = draw(tmp_path, other, 2, "--restart")
    assert len(anew) == 2 and {row["target"] for row in anew}.isdisjoint({model.weights_sha})
    del anew[0]["target"]
    (tmp_path / "distilled.jsonl").write_text(json.dumps(anew[0]) + "\n")
    with pytest.raises(StageError, match="target weights it does not name"):
        draw(tmp_path, other, 2)


def test_a_drafter_of_another_target_is_refused(tiny_checkpoint: Path, tmp_path: Path) -> None:
    write_captions(tmp_path)
    copy = copy_target(tiny_checkpoint, tmp_path / "checkpoint")
    draw(tmp_path, copy, 8)
    train(tmp_path, copy, "--max_steps", "2")
    train(tmp_path, copy, "--max_steps", "3")  # the control: the same target goes on
    path = tmp_path / "drafter.pt"
    saved = torch.load(path, weights_only=True)
    assert saved["step"] == 3
    torch.save(saved | {"target": "0" * 16}, path)
    with pytest.raises(StageError, match=r"drafter\.pt was made with .* 0{16}, .*`drafter --restart`"):
        train(tmp_path, copy, "--max_steps", "4")
    train(tmp_path, copy, "--max_steps", "1", "--restart")
    assert torch.load(path, weights_only=True)["step"] == 1
    assert len((tmp_path / "losses_drafter.jsonl").read_text().splitlines()) == 1


def test_agreement_is_that_of_the_exported_average(tiny_checkpoint: Path, tmp_path: Path) -> None:
    write_captions(tmp_path)
    copy = copy_target(tiny_checkpoint, tmp_path / "checkpoint")
    draw(tmp_path, copy, 8)
    args = train(tmp_path, copy, "--max_steps", "12")
    written = json.loads((tmp_path / "losses_drafter.jsonl").read_text().splitlines()[-1])
    target = load("emoji", str(copy), None, "fp32", "cpu", need_drafter=True)
    trainer = drafter.Trainer(args, target, distil.read_distilled(tmp_path, target.weights_sha))
    agreement = {}
    saved = torch.load(tmp_path / "drafter.pt", weights_only=True)
    for label, weights in (("average", saved["average"]), ("current", saved["model"])):
        trainer.averaged.load_state_dict(weights)
        agreement[label] = trainer.validation()
    assert agreement["average"] == {name: written[name] for name in agreement["average"]}
    assert agreement["current"] != agreement["average"]
    trainer.averaged.load_state_dict(target.drafter_net.state_dict())  # what was exported, in bf16
    assert trainer.validation() == pytest.approx(agreement["average"], abs=2e-3)
