"""The flags of the library's arguments, by which a command shows the library's messages."""

from __future__ import annotations

import re
from dataclasses import fields

from adt_tree.method import MethodSpec
from adt_tree.policy import AdaptiveTree
from storage.command_line import CommandOptions

ADAPTIVE = tuple(item.name for item in fields(AdaptiveTree) if item.name != "budget")
# Arguments of the library whose flag has another name; model_type is a key of config.json there.
ARGUMENTS = {
    "guidance": "cfg", "seed": "random_seed", "budget": "total_token", "lantern.delta": "lantern_delta",
    "lantern.k": "lantern_k", "tree": "total_token", "tree.budget": "total_token", "tree.depth": "depth",
    "tree.width": "draft_top_k", "tree.name": "tree_choices",
    **{f"tree.{name}": f"adt_{name}" for name in ADAPTIVE},
}  # fmt: skip


def read_by(spec: MethodSpec) -> tuple[str, ...]:
    """Returns the options that a method reads and some other method does not."""
    return tuple(sorted(ARGUMENTS.get(name, name) for name in spec.settings))


def with_flags(line: str, cls: type[CommandOptions]) -> str:
    """Returns a message of the library with flags in place of the names of its arguments.

    A message begins with the argument and its value, as in "target_size 700: ..."; elsewhere in the line a
    name is recognised by its underscore or point.
    """
    names = {item.name: item.name for item in fields(cls) if item.name != "model_type"}
    names |= {argument: name for argument, name in ARGUMENTS.items() if name in names}
    flags = {argument: f"--{name}" for argument, name in names.items()}
    name, _, rest = line.partition(" ")
    if ":" in rest or name.endswith(":"):
        bare = name.removesuffix(":")
        line = flags.get(bare, bare) + line.removeprefix(bare)
    return re.sub(r"(?<![\w./-])\w+[_.]\w+(?![\w./=-])", lambda word: flags.get(word[0], word[0]), line)
