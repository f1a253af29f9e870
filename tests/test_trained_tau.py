"""A drafter trained on a target's own images drafts more of the next ones: Janus-Pro and Emu3."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import main
from adt_tree.pipeline import Pipeline
from adt_tree.policy import TreeShape
from adt_tree.sampling import Sampling
from models.spec import LoadOptions
from tests import tiny_emu3, tiny_janus
from tests.checkpoints import untrained
from training import drafter_states

BUILD = {"janus_pro": tiny_janus.build, "emu3": tiny_emu3.build}
SIDE = {"emu3": tiny_emu3.SIZE}
EPOCHS = {"janus_pro": "4", "emu3": "12"}


def scrambled(drafter: Path) -> Path:
    """The drafter with random weights where a new one adds nothing: passing features through is a good draft
    of targets as tiny as these, which repeat themselves."""
    state = load_file(drafter / "model.safetensors")
    torch.manual_seed(0)
    for key in ("layers.0.self_attn.o_proj.weight", "layers.0.mlp.down_proj.weight"):
        state[key] = 0.2 * torch.randn(state[key].shape).to(state[key].dtype)
    save_file(state, drafter / "model.safetensors", {"format": "pt"})
    return drafter


def tau(name: str, folder: Path, drafter: Path) -> float:
    """Codes per target call of greedy EAGLE-2 on prompts that nobody trained on."""
    options = LoadOptions(model_path=str(folder), target_size=SIDE.get(name))
    pipe = Pipeline.from_pretrained(
        name, drafter=str(drafter), device="cpu", precision="fp32", options=options
    )
    sampling = Sampling(temperature=0.0, guidance=pipe.model.spec.guidance)
    method = pipe.method("eagle-2", sampling=sampling, tree=TreeShape(4, 4, 12))
    return pipe([f"another {n}" for n in range(8)], method, batch_size=8).stats["tau"]


@pytest.mark.parametrize("name", BUILD)
def test_tau_rises(name: str, tmp_path: Path) -> None:
    folder = BUILD[name](tmp_path / "tiny", kv_heads=2)
    random = scrambled(untrained(name, folder))
    before = tau(name, folder, random)
    prompts, data, save = (tmp_path / part for part in ("prompts.txt", "data", "save"))
    prompts.write_text("\n".join(f"thing {n}" for n in range(40)))
    fixed = ["--model", name, "--model_path", str(folder), "--precision", "fp32", "--device", "cpu"]
    fixed += ["--target_size", str(SIDE[name])] if name in SIDE else []
    drawn = ["--temperature", "0", "--prompt", str(prompts), "--output_dir", str(data), "--batch_size", "8"]
    assert main.main(["generate_train_data", *fixed, *drawn]) == 0
    words = ["--data_dir", str(data), "--save_dir", str(save), "--num_epochs", EPOCHS[name], "--bs", "8"]
    words += ["--lr", "6e-3", "--p_w", "1", "--coupled", "--cfg_loss", "--grad_clip_by", "norm"]
    words += ["--ttt_steps", "2", "--data_noise", "none", "--eval_depth", "2", "--eval_freq", "4"]
    assert main.main(["train_drafter", *fixed, *words, "--drafter_path", str(random)]) == 0
    assert tau(name, folder, drafter_states.states(save)[-1]) > 1.15 * before
