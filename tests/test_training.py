"""The embedded model's pipeline on seconds-long runs: data rules, token layout, packing, Muon, export."""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from training import bpe, data, export, loop, prompts, target, tokenizer
from training.errors import StageError
from training.muon import orthogonalise

STYLES = ["noto", "twemoji", "fluent"]
NUM_CODES = 16
SIDE = 4


def parse(module: object, *words: str) -> argparse.Namespace:
    """Arguments of a stage."""
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    return parser.parse_args(words)


@pytest.fixture()
def work(tmp_path: Path) -> Path:
    """A work folder with random 16 px images, captions, a text vocabulary and codes."""
    rows = []
    for name in ("red heart", "pizza", "cat face", "sun", "red apple"):
        for style in STYLES:
            split = "held_out" if (style, name) in (("noto", "sun"), ("fluent", "pizza")) else "train"
            rows.append({"index": len(rows), "style": style, "name": name, "keywords": ["warm", "nice thing"],
                         "subgroup": "x", "split": split})  # fmt: skip
    (tmp_path / "captions.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    rng = np.random.default_rng(0)
    np.save(tmp_path / "codes.npy", rng.integers(0, NUM_CODES, (len(rows), SIDE * SIDE)).astype(np.int16))
    np.save(tmp_path / "images.npy", rng.integers(0, 256, (len(rows), 16, 16, 3)).astype(np.uint8))
    (tmp_path / "licences.json").write_text("[]")
    (tmp_path / "checksums.json").write_text("{}")
    bpe.run(
        parse(bpe, "--work_dir", str(tmp_path), "--num_embeddings", str(NUM_CODES), "--vocab_size", "320")
    )
    return tmp_path


def train(work: Path, *words: str) -> dict:
    """Run the target stage for about a second; the checkpoint."""
    shape = "--hidden_size 32 --num_layers 2 --num_heads 2 --intermediate_size 64"
    shape += " --max_positions 64 --batch_size 4"
    target.run(
        parse(target, "--work_dir", str(work), "--num_embeddings", str(NUM_CODES), *shape.split(), *words)
    )
    return torch.load(work / "target.pt", weights_only=True)


def test_held_out_names_stay_seen_in_other_styles_and_pins_stay_in_training() -> None:
    """One style a name at most, the same for the same seed, never a pinned pair."""
    names = ["red heart", "pizza", "cat face", *(f"thing {i}" for i in range(30))]
    pairs = data.held_out_pairs(names, STYLES, 20, seed=3)
    assert pairs == data.held_out_pairs(names, STYLES, 20, seed=3)
    assert len(pairs) == 20 and len({name for _, name in pairs}) == 20
    for seed in range(50):
        assert not data.held_out_pairs(names, STYLES, 33, seed) & set(data.PINNED)


def test_prompts_mix_two_names_and_keep_to_training_pairs(work: Path) -> None:
    """Half are mixtures, none of them a thing's own name; none names a held-out pair; the seed decides."""
    rows = data.read_captions(work)
    names = {row["name"] for row in rows}
    held_out = {bpe.caption(row["style"], row["name"], []) for row in rows if row["split"] != "train"}
    found = prompts.compose(rows, 40, 0.5, seed=1)
    assert found == prompts.compose(rows, 40, 0.5, seed=1) != prompts.compose(rows, 40, 0.5, seed=2)
    bare = [text.split(",")[0] for text in found]
    mixed = [text for text in bare if text.partition(" emoji of ")[2] not in names]
    assert len(set(found)) == 40 and not held_out & set(bare) and 10 <= len(mixed) <= 30
    assert prompts.mix("cat face", "red heart") == "cat heart"
    with pytest.raises(StageError, match="--num_prompts 100000"):
        prompts.compose(rows, 100_000, 0.0, seed=1)
    prompts.run(parse(prompts, "--work_dir", str(work), "--num_prompts", "12"))
    assert len((work / "drafter_prompts.txt").read_text().splitlines()) == 12


def test_rasteriser_paints_on_white_and_averages() -> None:
    """A black square over the left half: black, white, and the mean on no pixel between."""
    pytest.importorskip("resvg_py")
    svg = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 8 8"><rect width="4" height="8"/></svg>'
    image = data.rasterise(svg, 16)
    assert image.shape == (16, 16, 3) and image.dtype == np.uint8
    assert (image[:, :8] == 0).all() and (image[:, 8:] == 255).all()


def test_vocabulary_has_the_chameleon_layout(work: Path) -> None:
    """Ids of special, image and text tokens; text survives the round trip; image names spell their code."""
    prompts = target.Prompts(work / "text_tokenizer.json", NUM_CODES)
    vocab = prompts.tokenizer.get_vocab()
    layout = bpe.Layout(NUM_CODES)
    assert [vocab[name] for name in bpe.SPECIAL] == [0, 1, 2, 3]
    assert vocab["IMGIMGAZ"] == 4 and vocab["IMGIMGBFZ"] == 4 + 15
    assert [vocab[name] for name in bpe.AFTER_IMAGE] == list(range(4 + NUM_CODES, layout.text_first))
    ids = prompts.tokenizer.encode("noto emoji of red heart, warm!").ids
    assert min(ids) >= layout.text_first
    assert prompts.tokenizer.decode(ids) == "noto emoji of red heart, warm!"
    assert prompts.prefix("") == [0, layout.image_begin]
    assert prompts.prefix("sun")[-2:] == [layout.separator, layout.image_begin]
    assert len(vocab) == 320


def test_captions_carry_at_most_three_keywords() -> None:
    """Half of the samples are the bare caption."""
    row = {"style": "noto", "name": "sun", "keywords": ["a", "b", "c", "d"]}
    rng = random.Random(0)
    texts = [bpe.random_caption(row, rng) for _ in range(2000)]
    assert 0.45 < sum(text == "noto emoji of sun" for text in texts) / 2000 < 0.55
    assert max(text.count(",") for text in texts) == 3


def test_packing_points_every_code_at_the_feature_before_it() -> None:
    """The token at where[r, j] + 1 is code j, for all codes that are inputs."""
    codes = torch.randint(0, NUM_CODES, (2, 5))
    tokens, where = target.pack([[0, 30, 31, 22, 21], [0, 21]], codes)
    assert tokens.shape == (2, 9)
    after = tokens.gather(1, where[:, :-1] + 1)
    assert torch.equal(after, codes[:, :-1] + bpe.IMAGE_FIRST)
    assert where[0, 0] == 4 and where[1, 0] == 1


def test_padding_does_not_change_the_loss(work: Path) -> None:
    """A short prompt scores the same alone and beside a long one."""
    trainer = target.Trainer(parse(target, "--work_dir", str(work), "--num_embeddings", str(NUM_CODES),
                                   "--hidden_size", "32", "--num_layers", "2",
                                   "--num_heads", "2"), work, torch.device("cpu"))  # fmt: skip
    texts, codes = ["noto emoji of red heart, warm", ""], trainer.codes[:2]

    def loss(texts: list[str], codes: torch.Tensor) -> torch.Tensor:
        batch = target.make_batch(trainer.prompts, texts, codes, codes, trainer.device)
        return sum(target.training_loss(trainer.decoder, trainer.heads, batch, trainer.args, 0.0))

    with torch.no_grad():
        both = loss(texts, codes)
        alone = [loss([t], c[None]) for t, c in zip(texts, codes, strict=True)]
    torch.testing.assert_close(both, (alone[0] + alone[1]) / 2)


def test_the_guided_law_is_fitted_with_the_unconditional_one_held(work: Path) -> None:
    """u + 3 (c - u) from separate passes, c alone in a row without a prompt; no gradient but through c."""
    trainer = target.Trainer(parse(target, "--work_dir", str(work), "--num_embeddings", str(NUM_CODES),
                                   "--hidden_size", "32", "--num_layers", "2",
                                   "--num_heads", "2"), work, torch.device("cpu"))  # fmt: skip
    decoder, codes = trainer.decoder, trainer.codes[:2]
    batch = target.make_batch(trainer.prompts, ["noto emoji of red heart", ""], codes, codes, trainer.device)
    head = decoder.head.weight[bpe.IMAGE_FIRST : bpe.IMAGE_FIRST + NUM_CODES]
    features = target.code_features(decoder, *batch.prompted)
    guided = target.guided_logits(decoder, features.detach(), batch.unprompted, trainer.args)
    with torch.no_grad():
        c = features @ head.T
        u = target.code_features(decoder, *batch.unprompted) @ head.T
        torch.testing.assert_close(guided, u + 3 * (c - u), atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(guided[1], c[1], atol=1e-5, rtol=1e-4)
        assert (guided[0] - c[0]).abs().max() > 1e-3
    guided.sum().backward()
    assert decoder.head.weight.grad is not None
    assert all(param.grad is None for param in decoder.blocks.parameters())


def test_ahead_heads_are_taught_the_codes_after_the_next() -> None:
    """One-hot features and heads that shift by k have no loss; heads that shift by another number have."""
    codes = torch.randperm(12)[None]
    features = torch.eye(12) * 50.0  # the feature that predicts code p is the unit vector p
    heads = torch.nn.ModuleList(torch.nn.Linear(12, 12, bias=False) for _ in range(2))
    with torch.no_grad():
        for k, head in enumerate(heads, 1):
            head.weight.zero_()
            for p in range(12 - k):
                head.weight[codes[0, p + k], p] = 1.0
    assert target.ahead_loss(heads, features[None], codes).item() < 1e-6
    assert target.ahead_loss(heads[::-1], features[None], codes).item() > 1.0


@pytest.mark.parametrize("shape", [(3, 12, 12), (2, 8, 20), (2, 20, 8)])
def test_orthogonalise_flattens_singular_values(shape: tuple[int, int, int]) -> None:
    """Singular values end near one and the singular vectors stay."""
    torch.manual_seed(0)
    matrices = torch.randn(shape)
    result = orthogonalise(matrices, 5)
    values = torch.linalg.svdvals(result)
    assert values.min() > 0.3 and values.max() < 1.3
    u, _, v = torch.linalg.svd(matrices, full_matrices=False)
    assert (u.mT @ result @ v.mT).diagonal(dim1=1, dim2=2).min() > 0.3


def test_budget_counts_time_before_a_resume() -> None:
    """Half spent before means fraction one half; the schedules end at (nearly) zero."""
    assert loop.Budget(1.0, spent_s=30.0).fraction() == pytest.approx(0.5, abs=0.01)
    assert loop.Budget(1.0, spent_s=60.0).done()
    assert target.schedule(1.0, 1000) == pytest.approx(0.02)
    assert target.schedule(0.1, 1000) == 1.0
    assert loop.cosine(1.0) == pytest.approx(0.0, abs=1e-6)
    with pytest.raises(ValueError, match="minutes"):
        loop.Budget(0)


def test_target_learns_resumes_and_exports(work: Path) -> None:
    """The loss falls; a resume continues the step count; the export equals transformers' logits."""
    first = train(work, "--max_steps", "5")
    second = train(work, "--max_steps", "40")
    assert (first["step"], second["step"]) == (5, 40)
    lines = [json.loads(line) for line in (work / "losses_target.jsonl").read_text().splitlines()]
    assert lines[-1]["train"] < lines[0]["train"] - 0.05
    check_export(work, second)


def test_a_restart_discards_the_earlier_run_and_its_losses(work: Path) -> None:
    """Steps and log begin anew; without --restart the same call goes on (the control)."""
    assert train(work, "--max_steps", "3")["step"] == 3
    assert train(work, "--max_steps", "4")["step"] == 4
    for law in (("--cfg", "1"), ("--ahead", "1")):
        with pytest.raises(StageError, match="target --restart"):
            train(work, "--max_steps", "5", *law)
    assert train(work, "--max_steps", "2", "--restart")["step"] == 2
    lines = (work / "losses_target.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [2]


@pytest.mark.parametrize("module", [tokenizer, target])
def test_stages_choose_their_device(module: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """auto takes cuda where there is one; cuda without one is refused; every such stage has --restart too."""
    auto, cpu, cuda = (parse(module, *words) for words in ((), ("--device", "cpu"), ("--device", "cuda")))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert [loop.use_device(args).type for args in (auto, cpu, cuda)] == ["cuda", "cpu", "cuda"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert [loop.use_device(args).type for args in (auto, cpu)] == ["cpu", "cpu"]
    with pytest.raises(StageError, match="--device cuda: no CUDA device"):
        loop.use_device(cuda)
    assert parse(module, "--restart").restart and not auto.restart


def check_export(work: Path, trained: dict) -> None:
    """Write a checkpoint with a random VQGAN and compare with ChameleonForConditionalGeneration."""
    transformers = pytest.importorskip("transformers")
    from models.vq import VQConfig, VQModel

    shape = {"base_channels": 32, "channel_multiplier": (1, 1, 1), "num_res_blocks": 1, "embed_dim": 4,
             "latent_channels": 4, "num_embeddings": NUM_CODES, "resolution": 16, "attn_resolutions": (),
             "attn_type": "vanilla", "in_channels": 3}  # fmt: skip
    torch.save({"model": VQModel(VQConfig(**shape)).state_dict(), "config": shape}, work / "tokenizer.pt")
    figures = {"train_psnr_db": 1.0, "train_l1_levels": 1.0, "held_out_psnr_db": 1.0,
               "held_out_l1_levels": 1.0, "codes_used": 3, "steps": 1, "spent_s": 60.0}  # fmt: skip
    (work / "tokenizer_report.json").write_text(json.dumps(figures))
    export.run(parse(export, "--work_dir", str(work), "--out", str(work / "ckpt")))
    theirs = transformers.ChameleonForConditionalGeneration.from_pretrained(
        work / "ckpt", dtype=torch.float32
    ).eval()
    ours = target.Decoder(target.DecoderConfig(**trained["config"]))
    average = {name: tensor.to(torch.bfloat16).float() for name, tensor in trained["average"].items()}
    ours.load_state_dict(average)
    tokens = torch.randint(4, 300, (2, 20))
    with torch.no_grad():
        expected = theirs.lm_head(theirs.model(input_ids=tokens).last_hidden_state)
        torch.testing.assert_close(ours.head(ours.causal(tokens)), expected, atol=1e-4, rtol=1e-4)
    assert "## Data and licences" in (work / "ckpt" / "README.md").read_text()


def test_the_model_card_tells_how_the_drafter_was_trained(tmp_path: Path) -> None:
    assert "not trained yet" in export.drafter_lines(tmp_path)
    for folder in ("drafter", "drafter_data"):
        (tmp_path / folder).mkdir()
    row = {"step": 40, "spent_s": 120.0, "agreement": [0.5, 0.25]}
    (tmp_path / "drafter" / "log.jsonl").write_text('{"step": 1}\n' + json.dumps(row) + "\n")
    index = {"shards": [{"images": [{}] * 64}, {"images": [{}] * 3}]}
    (tmp_path / "drafter_data" / "index.json").write_text(json.dumps(index))
    line = export.drafter_lines(tmp_path)
    assert "levels 1 to 2 | 0.500, 0.250 |" in line and "(67 images, 40 steps, 2 min)" in line


def test_large_checkpoints_are_sharded(tmp_path: Path) -> None:
    """No shard above 16 MB; the index names every tensor; stale files go."""
    state = {f"t{i}": torch.zeros(3_000_000, dtype=torch.bfloat16) for i in range(4)}
    export.write_shards({"old": torch.zeros(2)}, tmp_path)
    paths = export.write_shards(state, tmp_path)
    assert len(paths) == 2 and all(path.stat().st_size <= 16_100_000 for path in paths)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(state)
    assert not (tmp_path / "model.safetensors").exists()


def test_rate_zero_is_the_nearest_code_and_a_rate_shrinks_the_entropy() -> None:
    """Clustering noise around two points: a rate ends with fewer codes in use; without it all stay in use."""
    rng = torch.Generator().manual_seed(0)
    vectors = torch.randn(2000, 4, generator=rng) * 0.3
    vectors[:300] += 8
    used = []
    for rate in (0.0, 2.0):
        book = tokenizer.Codebook(vectors[:16].clone())
        book.cluster(vectors, 6, rate, rng)
        codes = book.assign(vectors, rate)
        used.append(len(codes.unique()))
        if rate == 0.0:
            assert torch.equal(codes, torch.cdist(vectors, book.weight).argmin(1))
    assert used[0] == 16 and 2 <= used[1] < 8


def test_pixels_beyond_white_and_black_are_free() -> None:
    """Overshoot where decoding clamps costs nothing; undershoot does."""
    targets = torch.tensor([1.0, 1.0, -1.0, 0.0])
    assert tokenizer.pixel_error(torch.tensor([1.7, 1.0, -3.0, 0.0]), targets) == 0
    assert tokenizer.pixel_error(torch.tensor([0.7, 1.0, -1.0, 0.0]), targets) > 0
