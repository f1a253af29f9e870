"""Trains a byte-level BPE on the captions and writes it in the Chameleon token layout, text_tokenizer.json.

Ids: <s> 0, <pad> 1, </s> 2, <unk> 3, K image codes from 4, then <eoss> (image end), <racm3:break> (image
begin), separator, image placeholder, newline, then text. The names are those of the published vocabulary.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from recipes.emoji.data import read_captions
from recipes.emoji.stage import StageOptions, main
from storage.command_line import declare, option

IMAGE_FIRST = 4
SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")
AFTER_IMAGE = ("<eoss>", "<racm3:break>", "<reserved08706>", "<reserved08707>", "<reserved08799>")


@declare("text vocabulary")
class Options(StageOptions):
    """Options of the text vocabulary."""

    num_embeddings: int = option("number of image codes", 1024)
    vocab_size: int = option("size of the vocabulary, image codes included", 2816)


class Layout:
    """The token ids after the image codes, in the order of AFTER_IMAGE, for a number of codes."""

    def __init__(self, num_codes: int) -> None:
        first = IMAGE_FIRST + num_codes
        self.image_end, self.image_begin = first, first + 1
        self.separator = first + 2  # end of the prompt
        self.placeholder = first + 3  # `<image>` in config.json
        self.text_first = first + len(AFTER_IMAGE)


def image_token(code: int) -> str:
    """Returns the name of an image code: its decimal digits as letters A-J."""
    return "IMGIMG" + "".join(chr(ord("A") + int(digit)) for digit in str(code)) + "Z"


def caption(style: str, name: str, keywords: list[str]) -> str:
    """Returns the prompt of one image."""
    return ", ".join([f"{style} emoji of {name}", *keywords])


def random_caption(row: dict, rng: random.Random) -> str:
    """Returns a row's caption, half of the time with one to three of its keywords in random order."""
    keywords = row["keywords"]
    count = min(rng.randint(1, 3), len(keywords)) if rng.random() < 0.5 else 0
    return caption(row["style"], row["name"], rng.sample(keywords, count))


def train_text(texts: list[str], size: int) -> dict:
    """Returns a byte-level BPE of `size` tokens, none of them special, in its JSON form."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return json.loads(tokenizer.to_str())


def chameleon_layout(trained: dict, num_codes: int, vocab_size: int) -> dict:
    """Returns the trained tokenizer with its ids moved after the special and image tokens.

    Ids that are left over up to vocab_size are named <extraN>.
    """
    layout = Layout(num_codes)
    names = [*SPECIAL, *(image_token(code) for code in range(num_codes)), *AFTER_IMAGE]
    text = sorted(trained["model"]["vocab"], key=trained["model"]["vocab"].__getitem__)
    names += text
    names += [f"<extra{index}>" for index in range(len(names), vocab_size)]
    if len(names) != vocab_size:
        raise ValueError(f"vocab_size {vocab_size} is less than the {len(names)} tokens of layout and text")
    special = [*range(IMAGE_FIRST), *range(layout.image_end, layout.text_first)]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    trained["added_tokens"] = [{"id": index, "content": names[index], **flags} for index in special]
    trained["model"]["vocab"] = {name: index for index, name in enumerate(names)}
    return trained


def run(options: Options) -> None:
    """Trains on all captions and writes text_tokenizer.json."""
    work = Path(options.work_dir)
    rows = read_captions(work)
    texts = [caption(row["style"], row["name"], row["keywords"]) for row in rows]
    # Names weigh more than keywords, and follow a space here as they do in captions.
    texts += [f" {row['name']}" for row in rows for _ in range(3)]
    text_size = options.vocab_size - Layout(options.num_embeddings).text_first
    trained = chameleon_layout(train_text(texts, text_size), options.num_embeddings, options.vocab_size)
    (work / "text_tokenizer.json").write_text(json.dumps(trained, ensure_ascii=False) + "\n")
    tokenizer = Tokenizer.from_file(str(work / "text_tokenizer.json"))
    lengths = [len(tokenizer.encode(caption(row["style"], row["name"], []))) for row in rows]
    print(json.dumps({"vocab_size": options.vocab_size, "mean_caption_tokens": sum(lengths) / len(lengths),
                      "max_caption_tokens": max(lengths)}))  # fmt: skip


if __name__ == "__main__":
    main(Options, run, __doc__)
