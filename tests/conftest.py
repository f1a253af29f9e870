"""Fixtures shared by the tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny random checkpoint with a drafter; do not write into it."""
    from tests import tiny

    return tiny.build(tmp_path_factory.mktemp("tiny") / "emoji")
