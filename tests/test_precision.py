"""What --precision auto comes to, by device and model."""

from __future__ import annotations

import pytest
import torch

from models.loading import pick_precision
from models.registry import spec_of


@pytest.mark.parametrize("multiplies", [False, True])
def test_auto(multiplies: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": multiplies})
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: multiplies)
    for model in ("emoji", "anole"):
        assert pick_precision("auto", "cuda", spec_of(model)) == ("bf16" if multiplies else "fp16")
    assert pick_precision("auto", "cpu", spec_of("anole")) == ("bf16" if multiplies else "fp32")
    assert pick_precision("auto", "cpu", spec_of("emoji")) == "fp32"


def test_what_is_asked_for_is_taken() -> None:
    assert pick_precision("bf16", "cpu", spec_of("emoji")) == "bf16"
