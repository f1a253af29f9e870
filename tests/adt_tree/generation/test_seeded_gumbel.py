"""SeededGumbel: with it transformers samples by greedy decoding, and assisted decoding changes no token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from adt_tree import SeededGumbel
from tests.support.tabular import chi_square

WORDS, SEEDS, SAMPLES = 24, range(8), 8000


class RunningGumbel(SeededGumbel):
    """A wrong variant: one generator runs on from call to call, also for drafts that are rejected."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        uniform = torch.rand(scores.shape, generator=self._generator).to(scores.dtype)
        return scores.log_softmax(dim=-1) - torch.log(-torch.log(uniform))


class OneGumbel(SeededGumbel):
    """A wrong variant: all positions have the same noise."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return super().__call__(input_ids[:, :1], scores)


@torch.no_grad()
def model(seed: int, layers: int) -> Any:
    """Returns a random Qwen2 whose distributions are neither flat nor certain."""
    import transformers as hf

    torch.manual_seed(seed)
    config = hf.Qwen2Config(
        vocab_size=WORDS, hidden_size=32, intermediate_size=48, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    made = hf.Qwen2ForCausalLM(config).eval()
    made.lm_head.weight.mul_(12)
    return made


@pytest.fixture(scope="module")
def models() -> tuple[Any, Any]:
    """Returns a model, and an assistant that is near it: the model's first layer."""
    large = model(0, 2)
    small = model(0, 1)
    small.load_state_dict(large.state_dict(), strict=False)
    return large, small


def tokens(large: Any, processor: SeededGumbel, **how: Any) -> list[int]:
    """Returns the tokens that `generate` puts behind a short prompt."""
    prompt = torch.tensor([[1, 2, 3, 1, 2]])
    call = {"attention_mask": torch.ones_like(prompt), "do_sample": False, "max_new_tokens": 60}
    return large.generate(prompt, logits_processor=[processor], **call, **how)[0].tolist()


@pytest.mark.parametrize("how", ["assistant", "prompt lookup"])
def test_assisted_decoding_returns_the_tokens_of_plain_decoding(models: tuple[Any, Any], how: str) -> None:
    large, small = models
    assisted = {"assistant_model": small} if how == "assistant" else {"prompt_lookup_num_tokens": 4}
    plain = [tokens(large, SeededGumbel(seed)) for seed in SEEDS]
    assert len({tuple(row) for row in plain}) == len(SEEDS)
    assert [tokens(large, SeededGumbel(seed), **assisted) for seed in SEEDS] == plain
    running = [tokens(large, RunningGumbel(seed)) for seed in SEEDS]
    assert [tokens(large, RunningGumbel(seed), **assisted) for seed in SEEDS] != running  # control


def test_two_tokens_have_the_models_joint_distribution(models: tuple[Any, Any]) -> None:
    """One noise for all positions gives the right distribution of each token, but not of the pair."""
    large, start = models[0], torch.tensor([[4, 5]])
    with torch.no_grad():
        first = large(start).logits[:, -1]
        pairs = torch.cat((start.expand(WORDS, -1), torch.arange(WORDS)[:, None]), dim=1)
        second = large(pairs).logits[:, -1]
    joint = first[0].double().softmax(-1)[:, None] * second.double().softmax(-1)
    for kind, is_right in ((SeededGumbel, True), (OneGumbel, False)):
        counts = torch.zeros(WORDS, WORDS)
        for seed in range(SAMPLES):
            noise = kind(seed)
            one = int(noise(start, first).argmax())
            counts[one, int(noise(pairs[one : one + 1], second[one : one + 1]).argmax())] += 1
        z = chi_square(counts.flatten(), SAMPLES * joint.flatten())
        assert (abs(z) < 4) == is_right, (kind, z)


def test_noise_depends_on_seed_and_position_alone() -> None:
    """Rows of a batch have different noise, and what the model forbids stays forbidden."""
    scores = torch.zeros(2, WORDS)
    scores[:, 7] = -torch.inf
    five, six = torch.ones(2, 5, dtype=torch.int64), torch.ones(2, 6, dtype=torch.int64)
    made = SeededGumbel(3)(five, scores)
    assert torch.equal(made, SeededGumbel(3)(2 * five, scores)) and made.dtype == torch.float32
    assert not torch.equal(made[0], made[1])
    others = SeededGumbel(3)(six, scores), SeededGumbel(4)(five, scores)
    assert not any(torch.equal(made, other) for other in others)
    assert bool((made[:, 7] == -torch.inf).all()) and int(made.isfinite().sum()) == 2 * (WORDS - 1)
