"""The stages that build the embedded model: data, tokenizer, target and export. Each runs for about a
second."""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
import tarfile
from importlib import import_module
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from adt_tree.errors import UserError
from models.codecs.vq import VQConfig
from recipes.emoji import bpe, data, pictures, target, tokenizer
from recipes.emoji.codebook import Codebook
from training.muon import orthogonalise

STYLES = ["noto", "twemoji", "fluent"]
NUM_CODES = 16


def stage(name: str, work: Path, *words: object) -> None:
    """Runs a stage in a work folder."""
    module = import_module(f"recipes.emoji.{name}")
    module.run(module.Options.parse(["--work_dir", str(work), *map(str, words)]))


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns a work folder with random originals, captions, a text vocabulary and a random tokenizer of 16
    px."""
    monkeypatch.setattr("recipes.emoji.codes.CHUNK", 16)
    monkeypatch.setattr(target, "WARMUP", 4)
    monkeypatch.setattr("recipes.emoji.recognise.VIEWS", 1)
    rows = []
    for name, style in product(("red heart", "pizza", "cat face", "sun", "red apple"), STYLES):
        split = "held_out" if (style, name) in (("noto", "sun"), ("fluent", "pizza")) else "train"
        rows.append({"index": len(rows), "style": style, "name": name, "keywords": ["warm", "nice thing"],
                     "subgroup": "x", "split": split})  # fmt: skip
    (tmp_path / "captions.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    rng = np.random.default_rng(0)
    coarse = rng.integers(0, 256, (len(rows), 4, 4, 3)).astype(np.uint8)
    np.save(tmp_path / "originals.npy", coarse.repeat(16, axis=1).repeat(16, axis=2))
    (tmp_path / "licences.json").write_text("[]")
    (tmp_path / "checksums.json").write_text("{}")
    stage("bpe", tmp_path, "--num_embeddings", NUM_CODES, "--vocab_size", 320)
    shape = VQConfig(base_channels=32, channel_multiplier=(1, 1, 1), num_res_blocks=1, embed_dim=4,
                     latent_channels=4, num_embeddings=NUM_CODES, resolution=16)  # fmt: skip
    torch.manual_seed(0)
    untrained = tokenizer.Tokenizer(shape, 1.0, torch.device("cpu"))
    saved = {"model": untrained.model.state_dict(), "config": dataclasses.asdict(shape),
             "rate": untrained.rate, "book": untrained.book.state_dict(), "step": 1, "drawn": 0,
             "spent_s": 60.0}  # fmt: skip
    torch.save(saved, tmp_path / "tokenizer.pt")
    return tmp_path


SHAPE = (
    "--hidden_size 32 --num_layers 2 --num_heads 2 --intermediate_size 64 --max_positions 64 --batch_size 4"
).split()
VQGAN = (
    "--threads 1 --channel_multiplier 1 1 1 --embed_dim 4 --num_embeddings 16 --batch_size 2"
    " --warmup_steps 2 --rate_steps 2"
).split()


def log(work: Path, name: str) -> list[dict]:
    """Returns the rows of a stage's log."""
    return [json.loads(line) for line in (work / f"losses_{name}.jsonl").read_text().splitlines()]


def train(work: Path, *words: str) -> dict:
    """Runs the target stage and returns its checkpoint."""
    stage("target", work, "--threads", 1, *SHAPE, *words)
    return torch.load(work / "target.pt", weights_only=True)


def test_held_out_pairs_leave_every_name_in_other_styles_and_pinned_pairs_in_training() -> None:
    names = ["red heart", "pizza", "cat face", *(f"thing {i}" for i in range(30))]
    pairs, again = (data.held_out_pairs(names, 20, seed=3) for _ in range(2))
    assert pairs == again and len(pairs) == 20 and len({name for _, name in pairs}) == 20
    for seed in range(50):
        assert not data.held_out_pairs(names, 33, seed) & set(data.PINNED)


def test_prompt_files(work: Path) -> None:
    """No drafter prompt shows a held-out pair, and bench and development prompts have none in common. All
    prompts are the same every time."""
    held_out = {bpe.caption(row["style"], row["name"], []) for row in data.read_captions(work)
                if row["split"] == "held_out"}  # fmt: skip
    texts, names = [], ("drafter_prompts", "emoji_bench", "emoji_development")
    for _ in range(2):
        stage("prompts", work, "--out_dir", work, "--num_prompts", 60)
        texts.append([(work / f"{name}.txt").read_text().splitlines() for name in names])
    drafter, bench, development = map(set, texts[0])
    assert texts[0] == texts[1] and len(texts[0][0]) == 60
    assert not held_out & {text.split(",")[0] for text in drafter}
    assert bench & held_out and development & held_out and not bench & development


def test_a_picture_is_a_function_of_stream_and_number_and_none_comes_twice(work: Path) -> None:
    """The held-out stream shows only held-out pairs, and every other stream only the others."""
    streams = pictures.Pictures(work)
    planned = streams.plan("train", range(300))
    assert planned[100:110] == pictures.Pictures(work).plan("train", range(100, 110))
    places = [{item.jitter for item in part} for part in (planned, streams.plan("validation", range(300)))]
    assert len(places[0]) == 300 and not places[0] & places[1]
    for stream, split in (("train0", "train"), ("held_out", "held_out")):
        assert {item.row["split"] for item in streams.plan(stream, range(60))} == {split}
    assert streams.render(planned[:5]).shape == (5, 16, 16, 3)
    assert not any(pictures.sample_jitter("pool 8 ball", random.Random(i)).mirrored for i in range(20))


def test_a_damaged_tarball_is_named(tmp_path: Path) -> None:
    """One archive is cut off, and one file is no archive."""
    path, member = tmp_path / "cut.tgz", tmp_path / "x.json"
    member.write_text(json.dumps(list(range(5000))))
    with tarfile.open(path, "w:gz") as archive:
        archive.add(member, "package/x.json")
    assert data.read_member(path, "x.json") == list(range(5000))
    for content in (path.read_bytes()[:900], b"nothing"):
        path.write_bytes(content)
        with pytest.raises(UserError, match=r"cut\.tgz"):
            data.read_member(path, "x.json")


def test_vocabulary_has_the_chameleon_layout(work: Path) -> None:
    """Special, image and text tokens have their ids, and text survives the round trip."""
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


def test_packing_labels_every_code_once(work: Path) -> None:
    """Each code is the label of the token before it; prefix and padding have no labels."""
    prompts = target.Prompts(work / "text_tokenizer.json", NUM_CODES)
    codes = torch.randint(0, NUM_CODES, (2, 5))
    tokens, labels = prompts.pack(["noto emoji of red heart", ""], codes)
    labelled = labels != target.IGNORED
    assert tokens.shape == labels.shape and torch.equal(labels[labelled].view(2, 5), codes)
    for row in range(2):
        first = labelled[row].nonzero()[0].item()
        assert torch.equal(tokens[row, first + 1 : first + 5], codes[row, :-1] + bpe.IMAGE_FIRST)
        assert tokens[row, first] == prompts.layout.image_begin


def test_padding_does_not_change_the_loss(work: Path) -> None:
    """A short prompt has the same loss alone and beside a long one."""
    options = target.Options.parse(["--work_dir", str(work), *SHAPE])
    trainer = target.Trainer(options, torch.device("cpu"))
    _, codes = trainer.codes.sample("validation", 2)
    texts = ["noto emoji of red heart, warm", ""]
    alone = [trainer.mean_loss([text], row[None]) for text, row in zip(texts, codes, strict=True)]
    assert trainer.mean_loss(texts, codes) == pytest.approx(sum(alone) / 2, abs=1e-5)


def test_target_learns_resumes_decays_and_exports(work: Path) -> None:
    """The loss falls, a resumed run continues with the next pictures, the learning rates fall to 0, and the
    exported checkpoint has the same logits in transformers."""
    assert train(work, "--max_pictures", "20")["step"] == 5
    trained = train(work, "--max_pictures", "160", "--decay_pictures", "16")
    assert (trained["step"], trained["drawn"], trained["pictures"]) == (40, 160, 160)
    assert [*(work / "codes").rglob("train0-00009.npy")]  # the name of a stream decides its pictures
    lines = log(work, "target")
    assert [line["factor"] for line in lines] == [1.0, 0.0]
    assert lines[-1]["train"] < lines[0]["train"] - 0.05
    stage("measure", work, "--num_pictures", 8, *SHAPE)
    check_export(work, trained)


def test_an_exported_checkpoint_can_be_trained_further(work: Path) -> None:
    """A restored checkpoint has the same weights in bfloat16, and its counters continue."""
    first = train(work, "--max_pictures", "12")
    stage("export", work, "--out", work / "export")
    restored = work / "elsewhere"
    stage("restore", restored, "--start", work / "export")
    again = torch.load(restored / "target.pt", weights_only=True)
    assert again["model"].keys() == first["model"].keys()
    for name, tensor in first["model"].items():
        torch.testing.assert_close(again["model"][name], tensor.bfloat16().float())
    books = [torch.load(part / "tokenizer.pt", weights_only=True)["book"] for part in (work, restored)]
    assert books[0]["count"].equal(books[1]["count"])
    for name in ("originals.npy", "captions.jsonl", "text_tokenizer.json"):
        shutil.copy(work / name, restored / name)
    after = train(restored, "--max_pictures", "24", "--precision", "bf16")
    assert (after["step"], after["pictures"], after["fresh_from"]) == (6, 24, 3)
    with pytest.raises(UserError, match=r"tokenizer.pt"):
        stage("restore", restored, "--start", work / "export")


def test_a_restart_discards_the_earlier_run_and_its_losses(work: Path) -> None:
    """Without it, a state of another shape or of another tokenizer's codes is refused."""
    state = train(work, "--max_pictures", "12")
    assert state["step"] == 3
    torch.save({**state, "config": {**state["config"], "num_layers": 9}}, work / "target.pt")
    with pytest.raises(UserError, match="num_layers"):
        train(work, "--max_pictures", "20")
    saved = torch.load(work / "tokenizer.pt", weights_only=True)
    torch.save({**saved, "rate": 2.0}, work / "tokenizer.pt")
    with pytest.raises(UserError, match="--restart"):
        train(work, "--max_pictures", "20")
    assert train(work, "--max_pictures", "8", "--restart")["step"] == 2
    assert [line["step"] for line in log(work, "target")] == [2]


def check_export(work: Path, trained: dict) -> None:
    """Writes a checkpoint and compares it with ChameleonForConditionalGeneration."""
    transformers = pytest.importorskip("transformers")
    stage("export", work, "--out", work / "ckpt")
    kind = transformers.ChameleonForConditionalGeneration
    theirs = kind.from_pretrained(work / "ckpt", dtype=torch.float32).eval()
    ours = target.Decoder(target.DecoderConfig(**trained["config"]))
    ours.load_state_dict({name: tensor.bfloat16().float() for name, tensor in trained["model"].items()})
    tokens = torch.randint(4, 300, (2, 20))
    with torch.no_grad():
        expected = theirs.lm_head(theirs.model(input_ids=tokens).last_hidden_state)
        torch.testing.assert_close(ours.head(ours.causal(tokens)), expected, atol=1e-4, rtol=1e-4)


def test_tokenizer_trains_and_resumes(work: Path) -> None:
    """Training passes through the warm-up, the first codebook and the rising rate of random codes."""
    pytest.importorskip("efficientnet_lite_pytorch")
    (work / "tokenizer.pt").unlink()
    for steps in (1, 4):
        stage("tokenizer", work, *VQGAN, "--steps", steps)
    saved = torch.load(work / "tokenizer.pt", weights_only=True)
    assert saved["step"] == 4 and saved["drawn"] == 2 * 4 + 64 + 256
    rows = log(work, "tokenizer")
    assert [row["rate"] for row in rows] == [0.0, 8.0] and rows[-1]["white_nats"] >= 0


def test_a_rate_uses_fewer_codes_and_rate_zero_the_nearest() -> None:
    """The vectors lie around two points. At rate 0 all codes are in use, at rate 2 fewer."""
    rng = torch.Generator().manual_seed(0)
    vectors = torch.randn(2000, 4, generator=rng) * 0.3
    vectors[:300] += 8
    book = Codebook(vectors[:16].clone())
    book.cluster(vectors, 6, rng)
    nearest, rated = book.assign(vectors, 0.0), book.assign(vectors, 2.0)
    assert torch.equal(nearest, torch.cdist(vectors, book.weight).argmin(1))
    assert len(nearest.unique()) == 16 and 2 <= len(rated.unique()) < 16


@pytest.mark.parametrize("shape", [(3, 12, 12), (2, 8, 20), (2, 20, 8)])
def test_orthogonalise_sets_singular_values_to_about_one(shape: tuple[int, int, int]) -> None:
    """It leaves the singular vectors as they are."""
    torch.manual_seed(0)
    matrices = torch.randn(shape)
    result = orthogonalise(matrices, rounds=5)
    values = torch.linalg.svdvals(result)
    assert values.min() > 0.3 and values.max() < 1.3
    u, _, v = torch.linalg.svd(matrices, full_matrices=False)
    assert (u.mT @ result @ v.mT).diagonal(dim1=1, dim2=2).min() > 0.3
