"""The drafter's training: rows and steps are what decoding does, runs resume exactly, checkpoints load."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import main
from adt_tree.noise import Noise
from adt_tree.sampling import Sampling, guide, log_probs
from adt_tree.tree import root_only_tree
from adt_tree.verify import Coupled
from models.drafter import DrafterNet, EagleDrafter
from models.drafters.new_drafter import new_drafter, own_fields
from models.drafters.shards import ShardWriter, Stored, origin, read_shards
from models.model import Model
from models.spec import LoadOptions
from models.transformer import codes_head
from tests import published, tiny, tiny_emu3, tiny_janus, tiny_llamagen
from tests.checkpoints import load, untrained
from training import drafter_data, drafter_states
from training.drafter_loss import Objective, at, code_logits, measure, unroll

ENTRIES = 9  # pairs (feature at p, token at p + 1) before the tree
FAMILIES = ("emoji", "anole", "lumina_mgpt", "llamagen", "janus_pro", "emu3")
SIDE = {"lumina_mgpt": 12, "emu3": tiny_emu3.SIZE}  # pixels of the images of families with several sizes
SIZED = {name: LoadOptions(target_size=side) for name, side in SIDE.items()}
WORDS = {name: ["--target_size", str(side)] for name, side in SIDE.items()}
GREEDY = Sampling(temperature=0, guidance=3.0)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Targets and drafters by family; do not write into them."""
    emoji = tiny.build(tmp_path_factory.mktemp("tiny") / "emoji")
    made = {"emoji": (emoji, emoji / "drafter")}
    llamagen = tiny_llamagen.build(tmp_path_factory.mktemp("llamagen") / "t2i")
    made["llamagen"] = (llamagen, llamagen / "drafter")
    for name in ("anole", "lumina_mgpt"):
        made[name] = published.build(tmp_path_factory.mktemp(name), lumina=name == "lumina_mgpt")
    for name, build in (("janus_pro", tiny_janus.build), ("emu3", tiny_emu3.build)):
        folder = build(tmp_path_factory.mktemp(name) / "tiny", kv_heads=2)
        made[name] = folder, untrained(name, folder)
    return made


@pytest.fixture(scope="module")
def loaded(folders: dict[str, tuple[Path, Path]]) -> dict[str, Model]:
    return {
        name: load(name, target, drafter, options=SIZED.get(name, LoadOptions()))
        for name, (target, drafter) in folders.items()
    }


@pytest.fixture
def models(loaded: dict[str, Model]) -> dict[str, Model]:
    """Copies for one test: what decodes is packed, and cannot be trained then."""
    return {
        name: replace(
            model, decoder=copy.deepcopy(model.decoder), drafter_net=copy.deepcopy(model.drafter_net)
        )
        for name, model in loaded.items()
    }


@pytest.fixture(scope="module")
def data(folders: dict[str, tuple[Path, Path]], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Twelve greedy images of every family."""
    root = tmp_path_factory.mktemp("data")
    (root / "prompts.txt").write_text("\n".join(f"thing {'abc'[n % 3] * (1 + n)}" for n in range(12)))
    for name, (target, _) in folders.items():
        words = ["--model", name, "--model_path", str(target), "--precision", "fp32", "--temperature", "0"]
        words += [*WORDS.get(name, []), "--cfg", "3"]
        words += ["--prompt", str(root / "prompts.txt"), "--output_dir", str(root / name)]
        assert main.main(["generate_train_data", *words]) == 0
    return {name: root / name for name in folders}


def images_of(model: Model, root: Path) -> drafter_data.Images:
    return drafter_data.Images(model, read_shards([root], model), 10**9, 4096)


@torch.no_grad()
def decoded_levels(
    net: DrafterNet, model: Model, codes: torch.Tensor, features: torch.Tensor
) -> list[torch.Tensor]:
    """Features of a chain grown by the decoding drafter below ENTRIES committed pairs."""
    target = model.target(1, Sampling(guidance=1), max_nodes=4, max_prompt=1)
    decoding = EagleDrafter(net, target, max_depth=4, max_width=1)
    count = torch.tensor([ENTRIES])
    _, feature = decoding.extend(features[None, :, :ENTRIES], codes[None, :ENTRIES], count, [ENTRIES])
    levels = [feature[0, 0]]
    for depth in range(3):
        code = codes[None, ENTRIES + depth, None]
        seen = torch.ones(1, 1, depth + 1, dtype=torch.bool)
        _, grown = decoding.expand(code, levels[-1][None, None, None], seen, depth)
        levels.append(grown[0, 0, 0])
    return levels


@torch.no_grad()
def test_unrolled_steps_are_the_levels_of_a_tree(models: dict[str, Model]) -> None:
    model = models["emoji"]
    net = model.drafter_net
    assert net is not None
    torch.manual_seed(1)
    codes = torch.randint(model.num_codes, (ENTRIES + 3,))
    features = torch.randn(1, ENTRIES + 3, net.config.hidden_size)
    levels = decoded_levels(copy.deepcopy(net), model, codes, features)  # decoding packs its network
    steps = list(unroll(net, codes[None] + model.first_code, features, steps=4))
    for step, (out, level) in enumerate(zip(steps, levels, strict=True)):
        torch.testing.assert_close(out[0, ENTRIES - 1 + step], level, atol=1e-5, rtol=1e-5)
    # The control: a step that read the target's feature instead of its own would not be that level.
    wrong = net.causal(codes[None] + model.first_code, features)[0, ENTRIES]
    assert (wrong - levels[1]).abs().max() > 1e-2


@torch.no_grad()
@pytest.mark.parametrize("name", FAMILIES)
def test_the_laws_of_a_batch_are_those_the_images_were_drawn_from(
    name: str, models: dict[str, Model], data: dict[str, Path]
) -> None:
    """Greedy images: the guided law at every position has its mode at the code drawn there, and of row ends
    there is none."""
    model = models[name]
    images = images_of(model, data[name])
    chosen = [0, 5, 7]
    batch = images.batch(chosen, None)
    head = codes_head(model.decoder.head, model.first_code, model.num_codes)
    law = code_logits(at(batch.features, batch.where + 1), batch, head, GREEDY.guidance)
    assert torch.equal(law.argmax(dim=-1), images.shards.codes[chosen][:, 1:].long())


@torch.no_grad()
@pytest.mark.parametrize("name", FAMILIES)
def test_the_first_step_drafts_as_decoding_does(
    name: str, models: dict[str, Model], data: dict[str, Path]
) -> None:
    """Laws of the unrolled network along an image are those of the drafter led along it code by code.

    Behind a row's last code decoding drafts the row end on the drafter's own feature: the second step.
    """
    model = replace(models[name], token_shift="published")
    images = images_of(model, data[name])
    batch = images.batch([3], None)
    head = codes_head(model.decoder.head, model.first_code, model.num_codes)
    assert model.drafter_net is not None
    law = [
        code_logits(at(out, batch.where), batch, head, GREEDY.guidance)[0]
        for out in unroll(model.drafter_net, batch.tokens, batch.features, 2)
    ]
    opening, codes = model.encode(images.shards.texts[3]), images.shards.codes[3].tolist()
    target = model.target(1, GREEDY, 1, opening.length)
    drafter, rule = model.drafter(target, 1, 1), Coupled(Noise(model.num_codes, silent=True))
    prefix, zero = target.prefill(0, opening), torch.zeros(1, dtype=torch.int64)
    drafter.prefill(0, opening, prefix)
    features = torch.stack([branch[-1] for branch in prefix.features])[:, None, None]
    for cell, code in enumerate(codes[: 2 * model.grid.width + 1]):
        root = torch.tensor([code])
        logits, _ = drafter.extend(features, root[:, None], zero + 1, [cell])
        step = int(model.row_end is not None and cell % model.grid.width == model.grid.width - 1)
        torch.testing.assert_close(guide(logits, 3.0)[0], law[step][cell], atol=1e-3, rtol=1e-4)
        tree = root_only_tree(root)
        scored = target.forward(tree, [cell])
        features, log_p = scored.features, log_probs(scored.logits, GREEDY)
        target.commit(tree, rule(tree, log_p, log_p, zero, zero + cell + 1))


@torch.no_grad()
def test_the_loss_is_the_published_one(models: dict[str, Model], data: dict[str, Path]) -> None:
    """SmoothL1 summed over features' mean, and cross-entropy of each row's own law, over masked positions."""
    model = models["emoji"]
    images = images_of(model, data["emoji"])
    batch = images.batch([1, 2], None)
    head = codes_head(model.decoder.head, model.first_code, model.num_codes)
    outs = list(unroll(model.drafter_net, batch.tokens, batch.features, 1))
    got = measure(outs, batch, head, Objective(p_w=0.1))
    mask = torch.zeros(batch.tokens.shape, dtype=torch.float64)
    mask.scatter_(1, batch.where, 1.0)
    wanted = torch.cat((batch.features[:, 1:], torch.zeros_like(batch.features[:, :1])), dim=1).double()
    out, own = outs[0].double(), head.weight.double()
    p, q = (wanted @ own.T).softmax(-1), (out @ own.T).log_softmax(-1)
    entropy = -(p * q).sum(-1).mul(mask).sum() / mask.sum()
    distance = (out - wanted).abs()
    smooth = torch.where(distance < 1, distance**2 / 2, distance - 0.5).mean(-1).mul(mask).sum() / mask.sum()
    assert float(got.loss) == pytest.approx(float(smooth + 0.1 * entropy), rel=1e-4)
    assert got.agreement[0] == pytest.approx(
        float(torch.minimum(p, q.exp()).sum(-1).mul(mask).sum() / mask.sum()), rel=1e-4
    )
    guided = measure(outs, batch, head, Objective(p_w=0.1, guidance=3.0))
    assert abs(float(guided.loss) - float(got.loss)) > 1e-3  # the control
    varied = measure(outs, batch, head, Objective(p_w=0.1, distance="total_variation"))
    assert float(varied.loss) == pytest.approx(float(smooth) + 0.1 * (1 - got.agreement[0]), rel=1e-4)


def train(folder: Path, data: Path, save: Path, *words: str, name: str = "emoji") -> Path:
    """Run train_drafter; the newest state."""
    size = WORDS.get(name, [])
    fixed = ["--model", name, "--model_path", str(folder), "--data_dir", str(data), "--save_dir", str(save)]
    fixed += [*size, "--device", "cpu", "--eval_depth", "2", "--data_noise", "none"]
    assert main.main(["train_drafter", *fixed, *words]) == 0
    return drafter_states.states(save)[-1]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_trained_drafter_is_better_and_decoding_loads_it(
    name: str, folders: dict[str, tuple[Path, Path]], data: dict[str, Path], tmp_path: Path
) -> None:
    words = ["--bs", "4", "--lr", "6e-3", "--p_w", "1", "--coupled", "--cfg_loss", "--grad_clip_by", "norm"]
    words += ["--num_epochs", "6", "--eval_freq", "3", "--train_data_ratio", "0.7", "--ttt_steps", "2"]
    state = train(folders[name][0], data[name], tmp_path, *words, name=name)
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [6, 12]
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert rows[-1]["val_entropy"] < rows[0]["val_entropy"] and len(rows[-1]["agreement"]) == 2
    target, size = folders[name][0], SIZED.get(name)
    model = load(name, target, state, options=size or LoadOptions())
    assert model.drafter_net is not None
    assert {path.name for path in state.iterdir()} == {"config.json", "model.safetensors", "trainer.pt"}
    assert not (drafter_states.states(tmp_path)[0] / "trainer.pt").exists()  # only the newest resumes
    drawn = ["generate_images", "--model", name, "--model_path", str(target), "--drafter_path", str(state)]
    drawn += WORDS.get(name, [])
    drawn += ["--drafter_type", "eagle", "--prompt", "thing a", "--num_images", "1", "--heatmaps", "0"]
    assert main.main([*drawn, "--output_dir", str(tmp_path / "drawn")]) == 0


def weights(state: Path) -> dict[str, torch.Tensor]:
    return torch.load(state / "trainer.pt", weights_only=True)["net"]


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_resumed_run_is_the_uninterrupted_one(
    optimizer: str, folders: dict[str, tuple[Path, Path]], data: dict[str, Path], tmp_path: Path
) -> None:
    """To the bit, with noise and branches drawn at random; the log has every step once."""
    folder, _ = folders["emoji"]
    words = ["--bs", "3", "--num_epochs", "3", "--lr", "1e-3", "--optimizer", optimizer, "--ema", "0.9"]
    words += ["--data_noise", "uniform"]
    whole = train(folder, data["emoji"], tmp_path / "whole", *words)
    train(folder, data["emoji"], tmp_path / "parts", *words, "--max_steps", "4")
    with (tmp_path / "parts" / "log.jsonl").open("a") as stream:
        stream.write('{"step": 99}\n{"st')  # what a killed run may leave
    parts = train(folder, data["emoji"], tmp_path / "parts", *words)
    assert same(weights(whole), weights(parts))
    steps = [
        [json.loads(line)["step"] for line in (tmp_path / run / "log.jsonl").read_text().splitlines()]
        for run in ("whole", "parts")
    ]
    assert steps[0] == [3, 6, 9] and sorted({*steps[1]} - {4}) == steps[0]
    other = train(folder, data["emoji"], tmp_path / "other", *words, "--seed", "1")
    assert not same(weights(whole), weights(other))  # the control


def test_accumulated_passes_make_the_step_of_one_large_pass(
    folders: dict[str, tuple[Path, Path]], data: dict[str, Path], tmp_path: Path
) -> None:
    folder, _ = folders["emoji"]
    words = ["--coupled", "--max_steps", "2", "--lr", "1e-3", "--optimizer", "muon", "--grad_clip", "0"]
    found = {
        (size, passes): weights(
            train(
                folder, data["emoji"], tmp_path / f"{size}-{passes}", *words, "--bs", str(size),
                "--gradient_accumulation_steps", str(passes),
            )
        )
        for size, passes in ((4, 1), (2, 2), (2, 1))
    }  # fmt: skip
    key = "block.mlp.down.weight"
    torch.testing.assert_close(found[2, 2][key], found[4, 1][key], atol=1e-4, rtol=1e-3)
    assert (found[2, 1][key] - found[4, 1][key]).abs().max() > 1e-3  # the control


def test_steps_zero_save_the_untrained_drafter_and_an_export(
    folders: dict[str, tuple[Path, Path]], data: dict[str, Path], tmp_path: Path
) -> None:
    out = tmp_path / "export"
    state = train(
        folders["emoji"][0], data["emoji"], tmp_path / "run", "--max_steps", "0", "--export", str(out)
    )
    assert state.name == "state_0"
    for name, tensor in load_file(state / "model.safetensors").items():
        assert torch.equal(tensor, load_file(out / "model.safetensors")[name])
    model = load("emoji", folders["emoji"][0], need_drafter=False)  # packed by no decoding yet
    net = new_drafter(own_fields(model), model)
    features = torch.randn(1, 5, net.config.hidden_size)
    passed = F.linear(torch.cat((torch.zeros_like(features), features), dim=-1), net.fc.weight)
    torch.testing.assert_close(passed, features)  # a new drafter passes the feature through
    state = train(folders["emoji"][0], data["emoji"], tmp_path / "run", "--bs", "4", "--max_steps", "1")
    assert state.name == "state_1"


REFUSED = [
    (["--wandb"], "--wandb"),
    (["--embed_upscale", "2"], "--embed_upscale 2"),
    (["--cfg_loss"], "--coupled"),
    (["--bs", "64"], "smaller --bs"),
    (["--max_len", "8"], "--max_len 8"),
    (["--data_dir", "nowhere"], "generate_train_data"),
    (["--config_path", "nowhere.json"], "nowhere.json"),
    (["--device", "cuda"], "--device cuda"),
    (["--bs", "0"], "--bs"),
]


@pytest.mark.parametrize("words, part", REFUSED, ids=lambda value: str(value)[:24])
def test_what_cannot_be_done_is_refused_in_a_line(
    words: list[str], part: str, folders: dict[str, tuple[Path, Path]], data: dict[str, Path], tmp_path: Path,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    fixed = ["--model_path", str(folders["emoji"][0]), "--data_dir", str(data["emoji"])]
    fixed += ["--save_dir", str(tmp_path / "run"), "--max_steps", "1"]
    assert main.main(["train_drafter", *fixed, *words]) == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert part in line and "Traceback" not in line


def test_another_course_does_not_go_on_from_a_state(
    folders: dict[str, tuple[Path, Path]], data: dict[str, Path], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    folder, run = folders["emoji"][0], tmp_path / "run"
    train(folder, data["emoji"], run, "--bs", "4", "--max_steps", "2")
    words = ["train_drafter", "--model_path", str(folder), "--data_dir", str(data["emoji"])]
    words += ["--save_dir", str(run), "--device", "cpu", "--data_noise", "none", "--bs", "4"]
    for more, part in ((["--lr", "1e-2"], "lr = 0.0001, now it is 0.01"), (["--bs", "2"], "bs = 4")):
        assert main.main([*words, *more]) == 2
        assert part in capsys.readouterr().err
    state = drafter_states.states(run)[-1] / "trainer.pt"
    whole = state.read_bytes()
    state.write_bytes(whole[: len(whole) // 2])
    assert main.main([*words, "--max_steps", "3"]) == 2
    assert str(state) in capsys.readouterr().err
    again = train(folder, data["emoji"], run, "--bs", "4", "--max_steps", "1", "--restart")
    assert again.name == "state_1" and len((run / "log.jsonl").read_text().splitlines()) == 1


def test_training_goes_on_from_a_drafter_of_the_same_shape(
    folders: dict[str, tuple[Path, Path]], data: dict[str, Path], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """state_0 of --drafter_path is that drafter, in bf16; one of another shape is refused, or described."""
    target, drafter = folders["emoji"]
    words = ["--max_steps", "0", "--drafter_path", str(drafter)]
    state = train(target, data["emoji"], tmp_path / "run", *words)
    for name, tensor in load_file(state / "model.safetensors").items():
        assert torch.equal(tensor, load_file(drafter / "model.safetensors")[name].bfloat16())
    target, drafter = folders["llamagen"]  # without fc.bias
    fixed = ["train_drafter", "--model", "llamagen", "--model_path", str(target), "--device", "cpu"]
    fixed += ["--data_dir", str(data["llamagen"]), "--save_dir", str(tmp_path / "other"), "--max_steps", "0"]
    fixed += ["--drafter_path", str(drafter)]
    assert main.main(fixed) == 2 and "config.json as --config_path" in capsys.readouterr().err
    fields = json.loads((drafter / "config.json").read_text()) | {"bias": False}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert main.main([*fixed, "--config_path", str(tmp_path / "config.json")]) == 0


def test_stored_features_train_as_recomputed_ones(
    folders: dict[str, tuple[Path, Path]], models: dict[str, Model], data: dict[str, Path], tmp_path: Path
) -> None:
    """Of two folders with one image each by name; noise has its published width."""
    model, shards = models["emoji"], read_shards([data["emoji"]], models["emoji"])
    images = images_of(model, data["emoji"])
    writer = ShardWriter(tmp_path / "kept", origin(model, drawn=True, features=True), 5)
    for image in range(len(shards)):
        parts = images._features([image])[image]
        codes = shards.codes[image].tolist()
        writer.add(Stored(str(image), shards.texts[image], 0, codes, parts))
    writer.flush()
    words = ["--bs", "4", "--max_steps", "2", "--coupled", "--lr", "1e-3"]
    kept = weights(train(folders["emoji"][0], tmp_path / "kept", tmp_path / "a", *words, "--cache_gb", "0"))
    folder = folders["emoji"][0]
    again = weights(train(folder, tmp_path / "kept", tmp_path / "b", *words))
    assert same(kept, again)
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
