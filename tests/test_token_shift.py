"""Either token shift of a drafter drafts what the network gives on whole sequences; auto measures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from adt_tree.sampling import Sampling
from models import alignment as agreement
from models.drafter import NextToken, SameToken
from models.model import Model
from models.registry import spec_of
from models.spec import TOKEN_SHIFTS
from tests.checkpoints import Checkpoints, load
from tests.conftest import Refused, Run

SAMPLING = Sampling()


@pytest.fixture(scope="module")
def model(tiny_checkpoint: Path) -> Model:
    """The tiny model with its drafter."""
    return load("emoji", tiny_checkpoint)


def test_tokens_of_a_tree() -> None:
    same = SameToken(2, 4, torch.device("cpu"))
    assert same.prompt(0, [1, 9, 7]) == [1, 9] and same.prompt(1, [1, 6]) == [1]
    codes = torch.tensor([[10, 11, 12], [20, 0, 0]])
    count = torch.tensor([3, 1])
    before = [[7 - 4, 10, 11], [6 - 4, 20, 0]]
    assert same.committed(codes, count).tolist() == before
    eye = torch.eye(2, dtype=torch.bool).expand(2, -1, -1)
    level = torch.tensor([[30, 31], [40, 41]])
    assert same.drafted(level, eye).tolist() == [[12, 12], [20, 20]]  # children of the roots
    under = torch.tensor([[[False, True], [True, False]]]).expand(2, -1, -1)
    seen = torch.cat((under, eye), dim=2)
    below = torch.tensor([[50, 51], [60, 61]])
    assert same.drafted(below, seen).tolist() == [[31, 30], [41, 40]]
    deeper = torch.cat((under, eye, eye), dim=2)
    assert same.drafted(below + 5, deeper).tolist() == [[50, 51], [60, 61]]
    assert same.committed(codes[:, :1], torch.tensor([1, 1]))[:, 0].tolist() == [12, 20]
    assert torch.equal(NextToken().drafted(level, eye), level)


@torch.inference_mode()
@pytest.mark.parametrize("name", TOKEN_SHIFTS)
def test_a_chain_is_the_network_over_the_sequence(model: Model, name: str) -> None:
    """Committed entries, then a drafted chain fed its own features, against one causal pass a length."""
    prompt, codes = model.encode("red heart"), [5, 9, 2, 7, 7, 1]
    target = model.target(1, SAMPLING, 1, prompt.length)
    drafter = replace(model, token_shift=name).drafter(target, 4, 1)
    prefix = target.prefill(0, prompt)
    generator = torch.Generator().manual_seed(0)
    width = prefix.features[0].shape[-1]
    new = torch.randn(2, 1, 3, width, generator=generator)  # features at the codes 5, 9, 2 of both branches
    own = torch.stack([branch[-1] for branch in prefix.features])[:, None, None]
    drafter.prefill(0, prompt, prefix)
    one = torch.ones(1, dtype=torch.int64)
    drafter.extend(own, torch.tensor([codes[:1]]), one, [0])
    _, feature = drafter.extend(new, torch.tensor([codes[1:4]]), 3 * one, [4])
    chain = [feature[:, 0]]
    for depth, code in enumerate(codes[4:]):
        seen = torch.ones(1, 1, depth + 1, dtype=torch.bool)
        _, feature = drafter.expand(torch.tensor([[code]]), feature.view(2, 1, 1, -1), seen, depth)
        chain.append(feature[:, 0, 0])
    for branch in range(2):
        tokens = prompt.tokens(branch) + [code + model.first_code for code in codes]
        features = torch.cat((prefix.features[branch], new[branch, 0]))
        for drafted in chain:
            entries = tokens[1 : len(features) + 1] if name == "published" else tokens[: len(features)]
            whole = drafter.net.causal(torch.tensor([entries]), features[None])[0, -1]
            torch.testing.assert_close(drafted[branch], whole, atol=1e-5, rtol=1e-5)
            features = torch.cat((features, drafted[branch][None]))


@pytest.mark.parametrize("better", TOKEN_SHIFTS)
def test_auto_keeps_the_better(
    model: Model, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], better: str
) -> None:
    shares = {name: 0.2 + (name == better) for name in TOKEN_SHIFTS}
    monkeypatch.setattr(agreement, "agreement", lambda *_: shares)
    assert agreement.settle(model, "auto", 3.0).token_shift == better
    assert f"drafter alignment: {better}" in capsys.readouterr().err
    unknown = replace(model, spec=spec_of("anole"))  # nobody knows that of Anole's drafters
    assert agreement.settle(unknown, None, 3.0).token_shift == better
    assert agreement.settle(model, None, 3.0).token_shift == "published"
    assert agreement.settle(model, "unshifted", 3.0).token_shift == "unshifted"
    assert agreement.settle(replace(unknown, drafter_net=None), None, 3.0).aligned is None


def test_agreement_tells_the_token_shifts_apart(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are led along the same codes, and their distributions are their own."""
    found = agreement.agreement(model, 3.0)
    assert set(found) == set(TOKEN_SHIFTS) and all(0 < share < 1 for share in found.values())
    assert abs(found["published"] - found["unshifted"]) > 1e-3
    assert found == agreement.agreement(model, 3.0)  # no randomness of its own
    led: dict[str, list[Tensor]] = {}

    def told(
        self: object, features: Tensor, codes: Tensor, count: Tensor, committed: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        flat = torch.zeros(features.shape[0], 1, model.num_codes)
        led.setdefault(type(self.token_shift).__name__, []).append(codes)  # type: ignore[attr-defined]
        return flat, features[:, :, 0]

    monkeypatch.setattr("models.drafter.EagleDrafter.extend", told)
    uniform = agreement.agreement(model, 3.0)
    assert uniform["published"] == uniform["unshifted"] and set(led) == {"NextToken", "SameToken"}
    assert all(torch.equal(a, b) for a, b in zip(*led.values(), strict=True))  # led along the same codes


def test_on_the_command_line(run: Run, refused: Refused, checkpoints: Checkpoints, tmp_path: Path) -> None:
    words = ["generate_images", *checkpoints["emoji"].words(), "--prompt", "sun", "--num_images", "1"]
    words += ["--heatmaps", "0", "--output_dir", tmp_path / "o", "--drafter_type", "eagle"]
    pictures = []
    for choice in ("auto", "published", "unshifted"):
        folder = tmp_path / choice
        status, out, err = run(*words, "--drafter_alignment", choice, "--output_dir", folder)
        assert status == 0 and ("drafter alignment:" in err) == (choice == "auto")
        assert choice == "auto" or f'"drafter_alignment": "{choice}"' in out.splitlines()[-1]
        (png,) = (folder / "img").iterdir()
        pictures.append(png.read_bytes())
    assert pictures[0] == pictures[1] == pictures[2]  # the token shift is a matter of speed
    words[-1] = "self-draft"
    assert "--drafter_alignment auto" in refused(*words, "--drafter_alignment", "auto")
