"""A path or a Hugging Face hub id -> a folder or file on this disk.

Ids are OWNER/NAME, OWNER/NAME@REVISION, or either with /FILE for one file of a repository. What is fetched
lies in the hub's own cache (HF_HOME), is resumed after an interruption and used without a
network (HF_HUB_OFFLINE=1).
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from adt_tree.errors import CheckpointError, reason

HUB_ID = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[\w./-]+?))?(/(?P<file>[\w./-]+\.\w+))?"
)
DESCRIPTIONS = ("*.json", "*.txt", "*.model", "*.yaml")
# The second only of a repository that has none of the first: many hold the same weights in both.
WEIGHTS = (("*.safetensors",), ("*.bin", "*.pt", "*.ckpt"))
SPARE = 1 << 28  # bytes of a disk that stay free


@dataclass(frozen=True, slots=True)
class HubId:
    """A repository, a revision of it (None: its default branch) and, if only that is wanted, a file."""

    repo: str
    revision: str | None
    file: str | None

    @classmethod
    def read(cls, text: str) -> HubId | None:
        """None if the text has not the form of an id."""
        match = HUB_ID.fullmatch(text)
        return cls(match["repo"], match["revision"], match["file"]) if match else None

    def __str__(self) -> str:
        at = f"@{self.revision}" if self.revision else ""
        return f"{self.repo}{at}{'/' + self.file if self.file else ''}"


def locate(text: str, revision: str | None = None) -> Path:
    """The local path that text names, fetched from the hub if text is an id and no such path exists.

    revision: a branch, tag or commit, in place of the id's own. CheckpointError for what cannot be had.
    """
    path = Path(text)
    if path.exists():
        if revision is not None:
            raise CheckpointError(
                f"{text} is a folder here: a revision ({revision}) is of hub ids; leave it out"
            )
        return path
    wanted = HubId.read(text)
    if wanted is None:
        raise CheckpointError(f"{text} does not exist: give a checkpoint's folder, or a hub id OWNER/NAME")
    wanted = HubId(wanted.repo, revision or wanted.revision, wanted.file)
    if wanted.file is not None:
        return _fetch(wanted, (wanted.file,)) / wanted.file
    for weights in WEIGHTS:
        folder = _fetch(wanted, (*DESCRIPTIONS, *weights))
        if any(next(folder.glob(pattern), None) for pattern in weights):
            break
    return folder


def _fetch(wanted: HubId, patterns: tuple[str, ...]) -> Path:
    """The folder of a snapshot that holds the files of these patterns."""
    from huggingface_hub import errors, snapshot_download

    try:
        _check_room(wanted, patterns)
        found = snapshot_download(wanted.repo, revision=wanted.revision, allow_patterns=list(patterns))
        return Path(str(found))
    except errors.GatedRepoError:
        what = (
            f"is gated: accept its licence at https://huggingface.co/{wanted.repo} and log in "
            "(`hf auth login`, or HF_TOKEN)"
        )
    except errors.RevisionNotFoundError:
        what = f"has no revision {wanted.revision}: give a branch, tag or commit of it"
    except errors.RepositoryNotFoundError:
        what = "is no path here and no repository on the hub: check the spelling (private ones need HF_TOKEN)"
    except errors.LocalEntryNotFoundError:
        what = (
            "is not whole in the local cache and the hub cannot be reached: connect (the download goes on "
            "where it stopped), or give a folder"
        )
    except CheckpointError:
        raise
    except (OSError, ValueError) as error:  # HTTP errors of the hub are OSErrors, bad ids ValueErrors
        full = getattr(error, "errno", None) == 28
        what = (
            "needs more room: free some, or point HF_HOME to another disk"
            if full
            else f"failed: {reason(error)}"
        )
    raise CheckpointError(f"{wanted} {what}")


def _check_room(wanted: HubId, patterns: tuple[str, ...]) -> None:
    """CheckpointError if the disk of the cache is too small for what would be fetched."""
    from huggingface_hub import constants, errors, snapshot_download

    try:
        plan = snapshot_download(
            wanted.repo, revision=wanted.revision, allow_patterns=list(patterns), dry_run=True
        )
    except errors.DryRunError:  # no way to the repository: fetching says why, or finds it in the cache
        return
    need = sum(file.file_size or 0 for file in plan if file.will_download)
    cache = Path(constants.HF_HUB_CACHE)
    disk = next(place for place in (cache, *cache.parents) if place.exists())
    free = shutil.disk_usage(disk).free - SPARE
    if need > free:
        raise CheckpointError(
            f"{wanted} needs {need / 1e9:.1f} GB at {cache}, where {max(free, 0) / 1e9:.1f} GB are free: "
            "free some, or point HF_HOME to another disk"
        )
