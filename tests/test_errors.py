"""Every class of error ends the command with its exit status and one line that names what the exception
names."""

from __future__ import annotations

import pytest
import torch

import main
from adt_tree.errors import CheckpointError, UserError


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (UserError("--cfg 7"), 2),
        (CheckpointError("model.safetensors"), 2),
        (OSError(28, "No space left on device", "img/1.png"), 2),
        (MemoryError("8 GiB"), 2),
        (FloatingPointError("image 3"), 2),
        (torch.OutOfMemoryError("CUDA out of memory"), 2),
        (ValueError("a fault of ours"), 1),
        (RuntimeError("a fault of ours"), 1),
        (KeyboardInterrupt(), 130),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else str(value),
)
def test_exit_status(
    error: BaseException, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(argv: object) -> None:
        raise error

    monkeypatch.setattr(main, "dispatch", fail)
    with pytest.raises(type(error)):
        main.main(["bench", "--debug"])
    assert main.main(["bench"]) == status
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and str(error.args[-1] if error.args else "") in line
    assert line.startswith("internal error: ") == (status == 1)
