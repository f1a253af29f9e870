"""A drafter trained on a target's own images drafts more of the next ones: Janus-Pro and Emu3."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from adt_tree.pipeline import Pipeline
from adt_tree.policy import TreeShape
from adt_tree.sampling import Sampling
from models.spec import LoadOptions
from tests.checkpoints import SIDE, Checkpoints, Tiny
from tests.conftest import Run
from training import drafter_states


def scramble(drafter: Path) -> None:
    """Random weights where a new drafter adds nothing: passing features through is a good draft of targets as
    tiny as these, which repeat themselves."""
    state = load_file(drafter / "model.safetensors")
    torch.manual_seed(0)
    for key in ("layers.0.self_attn.o_proj.weight", "layers.0.mlp.down_proj.weight"):
        state[key] = 0.2 * torch.randn(state[key].shape).to(state[key].dtype)
    save_file(state, drafter / "model.safetensors", {"format": "pt"})


def tau(tiny: Tiny, drafter: Path) -> float:
    """Codes per target call of greedy EAGLE-2 on prompts that nobody trained on."""
    options = LoadOptions(model_path=str(tiny.path), target_size=SIDE.get(tiny.family))
    pipe = Pipeline.from_pretrained(
        tiny.family, drafter=str(drafter), device="cpu", precision="fp32", options=options
    )
    sampling = Sampling(temperature=0.0, guidance=pipe.model.spec.guidance)
    method = pipe.method("eagle-2", sampling=sampling, tree=TreeShape(4, 4, 12))
    return pipe([f"another {n}" for n in range(8)], method, batch_size=8).stats["tau"]


@pytest.mark.parametrize("name, epochs", [("janus_pro", "4"), ("emu3", "12")])
def test_tau_rises(run: Run, checkpoints: Checkpoints, name: str, epochs: str, tmp_path: Path) -> None:
    tiny = checkpoints[name].copied(tmp_path / "tiny")
    scramble(tiny.drafter)
    before = tau(tiny, tiny.drafter)
    prompts, data, save = (tmp_path / part for part in ("prompts.txt", "data", "save"))
    prompts.write_text("\n".join(f"thing {n}" for n in range(40)))
    fixed = [*tiny.words(), "--device", "cpu"]
    drawn = ["--temperature", "0", "--prompt", prompts, "--output_dir", data, "--batch_size", "8"]
    assert run("generate_train_data", *fixed, *drawn)[0] == 0
    words = ["--data_dir", data, "--save_dir", save, "--drafter_path", tiny.drafter, "--num_epochs", epochs]
    words += "--bs 8 --lr 6e-3 --p_w 1 --coupled --cfg_loss --grad_clip_by norm --ttt_steps 2".split()
    words += "--data_noise none --eval_depth 2 --eval_freq 4".split()
    assert run("train_drafter", *fixed, *words)[0] == 0
    assert tau(tiny, drafter_states.states(save)[-1]) > 1.15 * before
