"""Training of drafters: its steps are those of decoding, runs resume exactly, decoding loads the result."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import main
from adt_tree.noise import Noise
from adt_tree.pipeline import Pipeline
from adt_tree.policy import TreeShape
from adt_tree.sampling import PassSampling, guide, log_probs
from adt_tree.settings import Sampling
from adt_tree.tree import root_only_tree
from adt_tree.verify import Coupled
from models.drafter import EagleDrafter
from models.model import Model
from storage.ownership import owned
from tests.conftest import Refused, Run
from tests.support.checkpoints import Checkpoints, Tiny
from training import drafter_data, drafter_states
from training.drafter_loss import Objective, Unrolled, at, code_logits, measure
from training.shards import StoredImage, origin, read_shards, shard_writer

ENTRIES = 9  # pairs (feature at p, token at p + 1) before the tree
GREEDY = Sampling(temperature=0, guidance=3.0)
FAST = "--lr 6e-3 --p_w 1 --coupled --cfg_loss --grad_clip_by norm --ttt_steps 2".split()
Data = Callable[[str], Path]
Words = Callable[..., list[object]]
Train = Callable[..., Path]


@pytest.fixture(scope="module")
def data(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Data:
    """Returns a function that returns a folder of twelve greedy images of a family. The first call for a
    family generates them."""
    root = tmp_path_factory.mktemp("data")
    (root / "prompts.txt").write_text("\n".join(f"thing {'abc'[n % 3] * (1 + n)}" for n in range(12)))

    @cache
    def folder(name: str) -> Path:
        words = [*checkpoints[name].words(), "--temperature", "0", "--cfg", "3"]
        words += ["--prompt", str(root / "prompts.txt"), "--output_dir", str(root / name)]
        assert main.main(["generate_train_data", *words]) == 0
        return root / name

    return folder


@pytest.fixture
def words(checkpoints: Checkpoints, data: Data) -> Words:
    """Returns a function that builds the words of train_drafter for a family."""

    def call(save: Path, name: str = "emoji") -> list[object]:
        fixed = ["train_drafter", *checkpoints[name].words(), "--data_dir", data(name), "--save_dir", save]
        return [*fixed, *"--device cpu --eval_depth 2 --data_noise none".split()]

    return call


@pytest.fixture
def train(run: Run, words: Words) -> Train:
    """Returns a function that runs that command and returns the newest state."""

    def call(save: Path, *more: object, name: str = "emoji") -> Path:
        assert run(*words(save, name), *more)[0] == 0
        return drafter_states.states(save)[-1]

    return call


def loaded(checkpoints: Checkpoints, name: str = "emoji") -> Model:
    """Returns a model that no other test shares, because decoding packs a drafter, which then cannot be
    trained."""
    return checkpoints[name].load()


def images_of(model: Model, root: Path) -> drafter_data.Images:
    return drafter_data.Images(model, read_shards([root], model), 10**9, 4096)


def store_features(images: drafter_data.Images, folder: Path, size: int) -> None:
    """Writes images with their features into shards of `size` images."""
    facts, shards = origin(images.model, generated=True, features=True), images.shards
    with shard_writer(folder, facts, size) as writer:
        for image, (name, text) in enumerate(zip(shards.names, shards.texts, strict=True)):
            codes, features = shards.codes[image].tolist(), images.features(image)
            writer.add(StoredImage(name.partition("/")[2], text, 0, codes, features))


def log(folder: Path) -> list[dict[str, Any]]:
    """Returns the rows of a run's log."""
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


@torch.no_grad()
def test_unrolled_steps_are_the_levels_of_a_tree(checkpoints: Checkpoints) -> None:
    """The tree is a chain that the decoding drafter grows from ENTRIES committed pairs."""
    model = loaded(checkpoints)
    net = model.drafter_net
    torch.manual_seed(1)
    codes = torch.randint(model.num_codes, (1, ENTRIES + 3))
    features = torch.randn(1, ENTRIES + 3, net.config.hidden_size)
    target = model.target(1, Sampling(guidance=1), max_nodes=4, max_prompt=1)
    decoding = EagleDrafter(net, target, 4, 1)
    committed = features[None, :, :ENTRIES], codes[:, :ENTRIES], torch.tensor([ENTRIES]), ENTRIES
    levels = [decoding.extend(*committed)[1][0, 0]]
    for depth, place in enumerate(decoding.places(torch.arange(3), [1] * 3)):
        code = codes[:, ENTRIES + depth : ENTRIES + depth + 1]
        ancestors = torch.arange(3)[None, None] <= depth
        feature = levels[-1][None, None, None]
        levels.append(decoding.expand(code, feature, ancestors, place)[1][0, 0, 0])
    tokens = codes + model.first_code
    steps = [out[0, ENTRIES - 1 + step] for step, out in enumerate(Unrolled(net)(tokens, features, 4))]
    torch.testing.assert_close(torch.stack(steps), torch.stack(levels), atol=1e-5, rtol=1e-5)
    # Control: a step that reads the target's feature instead of the drafter's is another level.
    assert (net.causal(tokens, features)[0, ENTRIES] - levels[1]).abs().max() > 1e-2


@torch.no_grad()
@pytest.mark.parametrize("name", ["emoji", "lumina_mgpt", "llamagen", "liquid"])
def test_batches_and_their_first_step_are_those_of_decoding(
    name: str, checkpoints: Checkpoints, data: Data
) -> None:
    """In batches of greedy images, every code after the first is the mode of the target's guided distribution
    there. Row ends are left out.

    The distributions of training's first step are those of the decoding drafter when an image is committed
    cell by cell.
    """
    model = loaded(checkpoints, name)
    images, head, numbers = images_of(model, data(name)), model.decoder.head, [0, 5, 7]
    batch = images.batch(numbers, None)
    logits = code_logits(at(batch.features, batch.entries + 1), batch, head, GREEDY.guidance)
    assert torch.equal(logits.argmax(dim=-1), images.shards.codes[numbers][:, 1:].long())
    batch = images.batch([3], None)
    (out,), grid = Unrolled(model.drafter_net)(batch.tokens, batch.features, 1), model.grid
    first_step = code_logits(at(out, batch.entries), batch, head, GREEDY.guidance)[0]
    prompt, codes = model.encode(images.shards.texts[3]), images.shards.codes[3].tolist()
    target = model.target(1, GREEDY, 1, prompt.length)
    drafter, rule = model.drafter(target, 1, 1), Coupled(Noise(model.num_codes, silent=True))
    prefix, zero = target.prefill({0: prompt})[0], torch.zeros(1, dtype=torch.int64)
    drafter.prefill(0, prompt, prefix)
    features = torch.stack([branch[-1] for branch in prefix.features])[:, None, None]
    for cell in range(2 * grid.image.stride + 1):
        root = torch.tensor([0 if grid.is_row_end(cell) else codes[grid.number(cell)]])
        logits, _ = drafter.extend(features, root[:, None], zero + 1, cell)
        if not grid.is_row_end(cell + 1):
            expected = first_step[grid.number(cell + 1) - 1]
            torch.testing.assert_close(guide(logits, 3.0)[0], expected, atol=1e-3, rtol=1e-4)
        tree = root_only_tree(root)
        scored = target.forward(tree, [cell])
        features, log_p = (
            scored.features,
            log_probs(scored.logits, PassSampling.uniform(GREEDY, scored.logits.device)),
        )
        target.commit(tree, rule(tree, log_p, log_p, zero, zero + cell + 1))


@torch.no_grad()
def test_the_loss_is_the_published_one(checkpoints: Checkpoints, data: Data) -> None:
    """The loss is SmoothL1, averaged over features, plus cross-entropy; both are averaged over masked
    positions."""
    model = loaded(checkpoints)
    head = model.decoder.head  # before batch() packs the decoder
    batch = images_of(model, data("emoji")).batch([1, 2], None)
    outs = Unrolled(model.drafter_net)(batch.tokens, batch.features, 1)
    outcome = measure(outs, batch, head, Objective(p_w=0.1))
    mask = torch.zeros(batch.tokens.shape, dtype=torch.float64)
    mask.scatter_(1, batch.entries, 1.0)
    target = torch.cat((batch.features[:, 1:], torch.zeros_like(batch.features[:, :1])), dim=1).double()
    out, table = outs[0].double(), head.weight.double()
    p, q = (target @ table.T).softmax(-1), (out @ table.T).log_softmax(-1)
    entropy = -(p * q).sum(-1).mul(mask).sum() / mask.sum()
    distance = (out - target).abs()
    smooth = torch.where(distance < 1, distance**2 / 2, distance - 0.5).mean(-1).mul(mask).sum() / mask.sum()
    assert float(outcome.loss) == pytest.approx(float(smooth + 0.1 * entropy), rel=1e-4)
    common = torch.minimum(p, q.exp()).sum(-1).mul(mask).sum() / mask.sum()
    assert outcome.agreement[0] == pytest.approx(float(common), rel=1e-4)
    guided = measure(outs, batch, head, Objective(p_w=0.1, guidance=3.0))
    assert abs(float(guided.loss) - float(outcome.loss)) > 1e-3  # control


@pytest.mark.parametrize("name", ["lumina_mgpt", "llamagen"])
def test_a_trained_drafter_is_better_and_decoding_loads_it(
    run: Run, train: Train, name: str, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    words = "--bs 4 --num_epochs 6 --eval_freq 3 --train_data_ratio 0.7".split()
    state = train(tmp_path, *words, *FAST, name=name)
    rows = log(tmp_path)
    assert [row["step"] for row in rows] == [6, 12]
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert rows[-1]["val_entropy"] < rows[0]["val_entropy"] and len(rows[-1]["agreement"]) == 2
    assert {path.name for path in state.iterdir()} == {"config.json", "model.safetensors", "trainer.pt"}
    # Only the newest state can be resumed.
    assert not (drafter_states.states(tmp_path)[0] / "trainer.pt").exists()
    decode = ["generate_images", *checkpoints[name].words(), "--drafter_path", state]
    decode += "--method eagle-2 --num_images 1 --heatmaps 0 --prompt thing --output_dir".split()
    assert run(*decode, tmp_path / "images")[0] == 0


def tau(tiny: Tiny) -> float:
    """Returns the codes per target call of greedy EAGLE-2 on prompts that no drafter was trained on."""
    pipe, texts = Pipeline(tiny.load()), [f"another {n}" for n in range(8)]
    greedy, tree = replace(pipe.sampling, temperature=0.0), TreeShape(4, 4, 12)
    return pipe(texts, "eagle-2", sampling=greedy, tree=tree, batch_size=8).stats["tau"]


def test_tau_rises(run: Run, checkpoints: Checkpoints, tmp_path: Path) -> None:
    """Training starts from random weights, because a new drafter, which passes features through, already
    predicts tiny targets well."""
    tiny = checkpoints["janus_pro"].copied(tmp_path / "tiny")
    state = load_file(tiny.drafter / "model.safetensors")
    torch.manual_seed(0)
    for key in ("layers.0.self_attn.o_proj.weight", "layers.0.mlp.down_proj.weight"):
        state[key] = 0.2 * torch.randn(state[key].shape).to(state[key].dtype)
    save_file(state, tiny.drafter / "model.safetensors", {"format": "pt"})
    prompts, images, save = (tmp_path / part for part in ("prompts.txt", "data", "save"))
    prompts.write_text("\n".join(f"thing {n}" for n in range(40)))
    greedy = ["--temperature", "0", "--prompt", prompts, "--output_dir", images, "--batch_size", "8"]
    assert run("generate_train_data", *tiny.words(), *greedy)[0] == 0
    words = ["--data_dir", images, "--save_dir", save, "--drafter_path", tiny.drafter, *FAST]
    words += ["--bs", 8, "--num_epochs", 12, *"--data_noise none --eval_depth 2 --eval_freq 4".split()]
    assert run("train_drafter", *tiny.words(), "--device", "cpu", *words)[0] == 0
    assert tau(replace(tiny, drafter=drafter_states.states(save)[-1])) > 1.15 * tau(tiny)


def weights(state: Path) -> dict[str, torch.Tensor]:
    return torch.load(state / "trainer.pt", weights_only=True)["net"]


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_resumed_run_is_the_uninterrupted_one(train: Train, optimizer: str, tmp_path: Path) -> None:
    """The weights are equal to the bit, with random noise and random branches, and the log has every step
    once."""
    words = "--bs 3 --num_epochs 3 --lr 1e-3 --ema 0.9 --data_noise uniform --optimizer".split()
    words.append(optimizer)
    whole = train(tmp_path / "whole", *words)
    train(tmp_path / "parts", *words, "--max_steps", 4)
    with (tmp_path / "parts" / "log.jsonl").open("a") as stream:
        stream.write('{"step": 99}\n')  # as a killed run may leave it
    parts = train(tmp_path / "parts", *words)
    assert same(weights(whole), weights(parts))
    steps = [[row["step"] for row in log(tmp_path / folder)] for folder in ("whole", "parts")]
    assert steps[0] == [3, 6, 9] and sorted({*steps[1]} - {4}) == steps[0]
    assert not same(weights(whole), weights(train(tmp_path / "other", *words, "--seed", 1)))  # control


def test_accumulated_passes_make_the_step_of_one_large_pass(train: Train, tmp_path: Path) -> None:
    words = "--coupled --max_steps 2 --lr 1e-3 --optimizer muon --grad_clip 0".split()
    states = (train(tmp_path / f"{bs}-{n}", *words, "--bs", bs, "--gradient_accumulation_steps", n)
              for bs, n in ((4, 1), (2, 2), (2, 1)))  # fmt: skip
    whole, halves, half = (weights(state)["block.mlp.down.weight"] for state in states)
    torch.testing.assert_close(halves, whole, atol=1e-4, rtol=1e-3)
    assert (half - whole).abs().max() > 1e-3  # control


def test_steps_zero_save_the_untrained_drafter_and_an_export(train: Train, tmp_path: Path) -> None:
    out, run = tmp_path / "export", tmp_path / "run"
    state = train(run, "--max_steps", 0, "--export", out)
    assert state.name == "state_0"
    for name, tensor in load_file(state / "model.safetensors").items():
        assert torch.equal(tensor, load_file(out / "model.safetensors")[name])
    assert train(run, "--bs", 4, "--max_steps", 1).name == "state_1"


REFUSED = {
    "--cfg_loss": "--coupled",
    "--bs 64": "--bs",
    "--max_len 8": "--max_len 8",
    "--data_dir nowhere": "nowhere",
    "--config_path nowhere.json": "nowhere.json",
}


@pytest.mark.parametrize("more", REFUSED)
def test_refusals_name_the_option(refused: Refused, words: Words, more: str, tmp_path: Path) -> None:
    assert REFUSED[more] in refused(*words(tmp_path / "run"), "--max_steps", 1, *more.split())


def test_a_loss_that_is_not_finite_ends_the_run_and_keeps_the_state(
    run: Run, words: Words, checkpoints: Checkpoints, data: Data, tmp_path: Path
) -> None:
    """A feature of the data becomes NaN between two calls; and a rate that is too large, whose weights are
    still finite after one step, is not saved."""
    model, folder, save = loaded(checkpoints), tmp_path / "data", tmp_path / "run"
    images = images_of(model, data("emoji"))
    store_features(images, folder, 12)
    command = [word if word != data("emoji") else folder for word in words(save)]
    command += "--bs 3 --num_epochs 3 --save_freq 1 --lr".split()
    assert run(*command, "2e-4", "--max_steps", 3)[0] == 0
    (state,), rows = drafter_states.states(save), log(save)
    before = (state / "trainer.pt").read_bytes()
    (shard,) = folder.glob("*.safetensors")
    damaged = load_file(shard)
    damaged["features.0.0"][5], damaged["features.0.1"][5] = torch.nan, torch.nan
    save_file(damaged, shard)
    status, out, err = run(*command, "2e-4")
    assert status == 2 and not out and "the loss of step 6 is nan at learning rate 9.1638e-05" in err
    assert drafter_states.states(save) == [state] and (state / "trainer.pt").read_bytes() == before
    assert log(save) == rows
    other = [word if word != save else tmp_path / "other" for word in command]
    other = [word if word != folder else data("emoji") for word in other]
    status, out, err = run(*other, "1e30", "--no-is_warmup", "--max_steps", 1)
    assert (
        status == 2
        and not out
        and "the norm of the weights after step 1 is inf at learning rate 1e+30" in err
    )
    assert not drafter_states.states(tmp_path / "other")


def test_a_folder_in_use_is_refused(refused: Refused, words: Words, data: Data, tmp_path: Path) -> None:
    for call in (words(tmp_path), ["bench", "--device", "cpu", "--output_dir", tmp_path, "--num_images", 1]):
        with owned(tmp_path):
            assert f"{tmp_path} is in use by process {os.getpid()} on " in refused(*call)
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("again", [Path.symlink_to, lambda copy, folder: shutil.copytree(folder, copy)])
def test_images_given_twice_are_refused(
    refused: Refused, words: Words, data: Data, tmp_path: Path, again: Callable[[Path, Path], object]
) -> None:
    folder, second = data("emoji"), tmp_path / "second"
    again(second, folder)
    line = refused(*words(tmp_path / "run"), "--data_dir", folder, second)
    assert "--data_dir" in line and "again" in line


@pytest.mark.parametrize("name", ["train_drafter", "evaluate", "generate_images"])
def test_advice_for_more_memory_names_options_of_the_command(
    refused: Refused, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def full(options: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(main.module_of(name), "run", full)
    line, offered = refused(name), {f"--{item.name}" for item in fields(main.options_of(name))}
    assert (named := set(re.findall(r"--\w+", line))) and named <= offered
    assert ("--bs" in named) == (name == "train_drafter") != ("--batch_size" in named)


def test_a_run_of_other_options_does_not_resume_a_state(
    refused: Refused, train: Train, words: Words, tmp_path: Path
) -> None:
    again = [*words(tmp_path), "--bs", 4]
    state = train(tmp_path, "--bs", 4, "--max_steps", 2) / "trainer.pt"
    assert "lr = 0.0001" in refused(*again, "--lr", "1e-2")
    assert "bs = 4" in refused(*again, "--bs", 2)
    whole = state.read_bytes()
    state.write_bytes(whole[: len(whole) // 2])
    assert str(state) in refused(*again, "--max_steps", 3)
    assert train(tmp_path, "--bs", 4, "--max_steps", 1, "--restart").name == "state_1"
    assert len(log(tmp_path)) == 1


def test_training_starts_from_a_drafter_of_the_same_shape(
    run: Run, refused: Refused, train: Train, words: Words, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    """state_0 is that drafter in bf16. One of another shape needs its config.json."""
    drafter = checkpoints["emoji"].drafter
    state = train(tmp_path / "run", "--max_steps", 0, "--drafter_path", drafter)
    for name, tensor in load_file(state / "model.safetensors").items():
        assert torch.equal(tensor, load_file(drafter / "model.safetensors")[name].bfloat16())
    drafter = checkpoints["llamagen"].drafter  # without fc.bias
    other = [*words(tmp_path / "other", "llamagen"), "--max_steps", 0, "--drafter_path", drafter]
    assert "--config_path" in refused(*other)
    fields = json.loads((drafter / "config.json").read_text()) | {"bias": False}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert run(*other, "--config_path", tmp_path / "config.json")[0] == 0


def test_stored_features_train_as_recomputed_ones(
    train: Train, checkpoints: Checkpoints, data: Data, tmp_path: Path
) -> None:
    """Stored features are read again for each step; others are computed once and held in memory. The noise on
    features has its published width."""
    model = loaded(checkpoints)
    images = images_of(model, data("emoji"))
    folder = tmp_path / "features"
    store_features(images, folder, 5)
    words = "--bs 4 --max_steps 2 --coupled --lr 1e-3".split()
    stored = weights(train(tmp_path / "a", *words, "--cache_gb", 0, "--data_dir", folder))
    assert same(stored, weights(train(tmp_path / "b", *words)))
    batch = images.batch([0, 1], None)
    perturbed = drafter_data.noised(batch, "uniform", 0.0, 0.2, torch.Generator().manual_seed(0))
    width = 0.2 * 512 / batch.tokens.shape[1] / 2
    assert 0.95 * width < float((perturbed - batch.features).abs().max()) <= width * 1.0001


def test_the_split_does_not_depend_on_the_order_on_disk() -> None:
    names = [f"a/{n}" for n in range(40)]
    train_part, held_out = drafter_data.split(names, 0.9, 3)
    assert len(held_out) == 4 and not {*train_part} & {*held_out}
    backwards = names[::-1]
    again = drafter_data.split(backwards, 0.9, 3)[1]
    assert {backwards[n] for n in again} == {names[n] for n in held_out}
    assert {names[n] for n in drafter_data.split(names, 0.9, 4)[1]} != {names[n] for n in held_out}


def test_a_kill_before_a_state_gets_its_name_leaves_the_older_one_to_resume_from(
    run: Run, train: Train, words: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both states belong to the first epoch. The rename that ends the second save fails, as if the process
    were killed before it; the next run goes on behind the first state, and its weights are those of a whole
    run."""
    more, rename = ("--bs", 2, "--max_steps"), os.replace
    first = train(tmp_path, *more, 1)

    def kill(source: Path, target: Path) -> None:
        if Path(target).name.startswith("state_"):
            raise KeyboardInterrupt
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", kill)
        assert run(*words(tmp_path), *more, 2)[0] == 130
    assert drafter_states.states(tmp_path) == [first]
    second = train(tmp_path, *more, 2)
    assert [row["step"] for row in log(tmp_path)] == [1, 2]  # a run from the beginning would have no row 1
    assert same(weights(second), weights(train(tmp_path / "whole", *more, 2)))
