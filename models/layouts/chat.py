"""A checkpoint's own tokenizer and chat template, through transformers: ids as its processor makes them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from adt_tree.errors import CheckpointError, reason
from models.checkpoint.config import read_config


class ChatTokenizer:
    """Texts -> token ids by the files of a folder. transformers is imported when the first one is opened."""

    def __init__(self, tokenizer: Any, source: str, generation: Mapping[str, Any]) -> None:
        """tokenizer: of transformers. source: what error messages call it. generation: the fields of
        generation_config.json, if there is one."""
        self.tokenizer, self.source, self.generation = tokenizer, source, generation

    @classmethod
    def read(cls, folder: Path) -> ChatTokenizer:
        """The tokenizer in a folder; code that a checkpoint brings is never run. CheckpointError names what
        is missing or damaged."""
        from transformers import AutoTokenizer

        if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
            raise CheckpointError(f"{folder} holds no tokenizer.json: fetch the checkpoint's text files too")
        load: Any = AutoTokenizer.from_pretrained
        try:
            tokenizer = load(folder, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # tokenizers raises bare Exception, transformers what it meets
            raise CheckpointError(f"{folder}: its tokenizer cannot be read ({reason(error)})") from None
        if tokenizer.chat_template is None and (folder / "chat_template.json").is_file():
            tokenizer.chat_template = read_config(folder, "chat_template.json").get("chat_template")
        name = "generation_config.json"
        generation = read_config(folder, name) if (folder / name).is_file() else {}
        return cls(tokenizer, str(folder), generation)

    def ids(self, text: str) -> list[int]:
        """Ids of a text, with the special tokens that the tokenizer adds by itself."""
        return list(self.tokenizer(text).input_ids)

    def token(self, name: str) -> int:
        """The id of a special token. CheckpointError if the vocabulary has none of that name."""
        found = self.tokenizer.convert_tokens_to_ids(name)
        if found is None or found == self.tokenizer.unk_token_id:
            raise CheckpointError(f"{self.source}: the tokenizer has no {name}: it is of another model")
        return int(found)

    def turn(self, text: str) -> str:
        """The user's turn and the opening of the answer, by the chat template. CheckpointError if there is
        none or it fails."""
        if self.tokenizer.chat_template is None:
            raise CheckpointError(
                f"{self.source}: no chat template (chat_template.jinja or chat_template.json): fetch it too"
            )
        messages = [{"role": "user", "content": [{"type": "text", "text": text}]}]
        try:
            return str(
                self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            )
        except Exception as error:  # jinja2's errors, and whatever a template may raise
            raise CheckpointError(f"{self.source}: its chat template fails ({reason(error)})") from None
