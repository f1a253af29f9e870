"""Turns a path or a Hugging Face hub id into a folder or file on this disk.

Ids are OWNER/NAME or OWNER/NAME@REVISION, either with /FILE for one file of the repository. Fetched files lie
in the hub's cache (HF_HOME). A download that was interrupted is resumed, and a file that is there is used
without a network (HF_HUB_OFFLINE=1).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

from adt_tree.errors import CheckpointError, reason

HUB_ID = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[\w./-]+?))?(/(?P<file>[\w./-]+\.\w+))?"
)
DESCRIPTIONS = ("*.json", "*.jinja", "*.txt", "*.model", "*.yaml")
# The second formats are fetched only if the repository lacks the first: many repositories have both.
WEIGHTS = (("*.safetensors",), ("*.bin", "*.pt", "*.ckpt"))


@dataclass(frozen=True, slots=True)
class HubId:
    """A repository on the hub, or one of its files."""

    repo: str
    revision: str | None  # None: the default branch
    file: str | None  # None: the whole repository

    @classmethod
    def read(cls, text: str) -> HubId | None:
        """Returns the id that the text writes, or None if it does not have the form of one."""
        match = HUB_ID.fullmatch(text)
        return cls(match["repo"], match["revision"], match["file"]) if match else None

    def __str__(self) -> str:
        at = f"@{self.revision}" if self.revision else ""
        return f"{self.repo}{at}{'/' + self.file if self.file else ''}"


def locate(text: str, revision: str | None = None, parts: tuple[str, ...] = ()) -> Path:
    """Returns the local path `text`, or the path of the hub repository or file of that id, which is fetched.

    revision: a branch, tag or commit that replaces the one in the id. parts: the folders of a repository to
    fetch; (): all of it. Raises CheckpointError if `text` is neither a path nor a hub id, or if it cannot be
    fetched.
    """
    path, hub_id = Path(text), HubId.read(text)
    if path.exists():
        if revision is not None:
            raise CheckpointError(f"revision {revision}: {text} is a path, not a hub id; leave it out")
        return path
    if hub_id is None:
        raise CheckpointError(f"{text} does not exist: give a checkpoint's folder, or a hub id OWNER/NAME")
    hub_id = replace(hub_id, revision=revision or hub_id.revision)
    if hub_id.file is not None:
        return fetch(hub_id, (hub_id.file,)) / hub_id.file
    for weights in WEIGHTS:
        patterns = (*DESCRIPTIONS, *weights)
        if parts:
            patterns = tuple(f"{part}/{pattern}" for part in parts for pattern in patterns)
        folder = fetch(hub_id, patterns)
        inside = folder / parts[0] if parts else folder
        if any(next(inside.glob(pattern), None) for pattern in weights):
            break
    return folder


def fetch(hub_id: HubId, patterns: tuple[str, ...], into: Path | None = None, space: bool = False) -> Path:
    """Returns the folder that holds the repository's files of these patterns; (): all files. It is a snapshot
    in the hub's cache, or `into`. space: the id is that of a space. Raises CheckpointError if they cannot be
    fetched."""
    from huggingface_hub import HfApi, snapshot_download

    kind = "space" if space else "model"
    try:
        if into is not None:  # without the hub snapshot_download is content with whatever is there
            HfApi().repo_info(hub_id.repo, revision=hub_id.revision, repo_type=kind)
        folder = snapshot_download(
            hub_id.repo,
            repo_type=kind,
            revision=hub_id.revision,
            allow_patterns=list(patterns) or None,
            local_dir=into,
        )
    except (OSError, ValueError) as error:  # the hub's HTTP errors are OSErrors, those of bad ids ValueErrors
        raise CheckpointError(f"{hub_id}: {_fault(hub_id, error)}") from error
    return Path(folder)


def _fault(hub_id: HubId, error: Exception) -> str:
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        page = f"https://huggingface.co/{hub_id.repo}"
        return f"accept its licence at {page} and log in (`hf auth login`, or HF_TOKEN)"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "no path here and no repository on the hub: check the spelling (private ones need HF_TOKEN)"
    if isinstance(error, errors.LocalEntryNotFoundError):
        return (
            "no path here, the hub cannot be reached, and its cache does not hold all of it: connect (a "
            "download is resumed), or give a folder (scripts/get_ckpts.sh fetches those of README)"
        )
    return reason(error)
