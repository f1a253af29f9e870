"""Reads a checkpoint's tokenizer and chat template by transformers. A prompt gets the token ids that the
checkpoint's processor would give it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from adt_tree.errors import CheckpointError, reason
from models.cell_tokens import CellIds
from models.checkpoint.config import control_tokens, read_config
from models.checkpoint.files import reading
from models.family import Checkpoint
from models.target import Prompt, PromptEncoder


class ChatTokenizer:
    """Turns texts into token ids. transformers is imported when the first tokenizer is read."""

    def __init__(self, tokenizer: Any, source: str, generation: Mapping[str, Any]) -> None:
        """tokenizer: one of transformers. source: its name in error messages. generation: the fields of
        generation_config.json, empty if there is no such file."""
        self.tokenizer, self.source, self.generation = tokenizer, source, generation

    @classmethod
    def of(cls, checkpoint: Checkpoint, folder: Path | None = None) -> ChatTokenizer:
        """Returns the tokenizer of a checkpoint. Code in its folder is never run. folder: of the tokenizer,
        if it is another one than the target's. CheckpointError names a file that is missing or damaged.

        transformers reads config.json too, and its errors are less clear than those of the layouts, which
        therefore call this once they have checked that file.
        """
        if checkpoint.loaded is not None:
            return checkpoint.loaded.tokenizer
        from transformers import AutoTokenizer

        folder, model = folder or checkpoint.folder, checkpoint.folder
        load: Any = AutoTokenizer.from_pretrained
        with reading(folder / "tokenizer.json", "fetch the checkpoint's text files"):
            tokenizer = load(folder, local_files_only=True, trust_remote_code=False)
        if tokenizer.chat_template is None and (folder / "chat_template.json").is_file():
            tokenizer.chat_template = read_config(folder, "chat_template.json").get("chat_template")
        name = "generation_config.json"
        generation = read_config(model, name) if (model / name).is_file() else {}
        return cls(tokenizer, str(folder), generation)

    @property
    def control(self) -> tuple[str, ...]:
        """The texts that the tokenizer reads as control tokens. Words that a user has added are none."""
        added = self.tokenizer.added_tokens_decoder
        published = self.tokenizer.init_kwargs.get("added_tokens_decoder", added)
        return control_tokens(token for at, token in added.items() if token.special or at in published)

    def ids(self, text: str) -> list[int]:
        """Returns the ids of a text, with the special tokens that the tokenizer adds by itself."""
        return list(self.tokenizer(text).input_ids)

    def token(self, name: str) -> int:
        """Returns the id of a special token. CheckpointError if the vocabulary has no such token."""
        token_id = self.tokenizer.convert_tokens_to_ids(name)
        if token_id is None or token_id == self.tokenizer.unk_token_id:
            raise CheckpointError(
                f"{self.source}: the tokenizer has no {name}: give the tokenizer of this model"
            )
        return int(token_id)

    def special(self, name: str) -> str:
        """Returns a special token by its name in tokenizer_config.json, such as bos_token. CheckpointError if
        the tokenizer does not name it."""
        token = getattr(self.tokenizer, name, None)
        if not isinstance(token, str):
            raise CheckpointError(
                f"{self.source}: the tokenizer names no {name}: give the tokenizer of this model"
            )
        return token

    def prompts(self, before: str, after: str, negative: str, cells: CellIds) -> PromptEncoder:
        """Returns an encoder of texts between two others; the unconditional branch is `negative`."""
        unconditional = self.ids(negative)

        def encode(text: str) -> Prompt:
            return Prompt(self.ids(f"{before}{text}{after}"), unconditional)

        return PromptEncoder(encode, cells, control=self.control)

    def turn(self, text: str, answer: bool = True) -> str:
        """Returns the user's turn, formatted by the chat template, and, if `answer`, the opening of the
        answer. CheckpointError if there is no template or it fails."""
        if self.tokenizer.chat_template is None:
            raise CheckpointError(f"{self.source}: no chat_template.jinja: fetch it too")
        messages = [{"role": "user", "content": [{"type": "text", "text": text}]}]
        try:
            return str(
                self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=answer)
            )
        except Exception as error:  # errors of jinja2, and any that a template raises
            raise CheckpointError(f"{self.source}: its chat template fails ({reason(error)})") from None
