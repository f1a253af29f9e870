"""Reads the settings of a call of transformers' `generate`; refuses those that this engine cannot follow."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from adt_tree.errors import UserError
from adt_tree.settings import Sampling

# Tensors that a caller may give: some are read here, the others do not change the tokens.
ACCEPTED = {"attention_mask", "image_grid_thw", "image_sizes", "images_per_sample", "position_ids"}


def refuse(reason: str) -> NoReturn:
    """Raises UserError with this reason."""
    raise UserError(f"custom_generate: {reason}")


def check(input_ids: Tensor, arguments: Mapping[str, Any]) -> None:
    """Refuses arguments that change the result or its form in a way that this engine does not follow.

    `generate` adds arguments of its own, a later release perhaps more of them. So an unknown one is refused
    if it is a tensor, as the inputs of models are, or a cache that holds tokens. A streamer and an
    assistant_model never come here: transformers does not pass them on.
    """
    config = arguments["generation_config"]
    mode = config.get_generation_mode().value
    if mode not in ("greedy_search", "sample"):
        refuse(f"{mode}: leave out num_beams, penalty_alpha, prompt_lookup_num_tokens and dola_layers")
    if config.num_return_sequences not in (None, 1):
        refuse(f"num_return_sequences {config.num_return_sequences}: repeat the prompts instead")
    for name in ("output_scores", "output_logits", "output_attentions", "output_hidden_states"):
        if config.return_dict_in_generate and getattr(config, name):
            refuse(f"{name}: the result has sequences alone; leave it out")
    for name, value in arguments.items():
        if hasattr(value, "get_seq_length") and value.get_seq_length() > 0:
            refuse(f"{name}: a prompt is read from its first token; leave it out")
    if refused := sorted({name for name, value in arguments.items() if torch.is_tensor(value)} - ACCEPTED):
        refuse(f"{', '.join(refused)}: not supported; leave it out")
    positions, mask = arguments.get("position_ids"), arguments.get("attention_mask")
    if positions is not None:
        counted = (torch.ones_like(input_ids) if mask is None else mask.long()).cumsum(-1) - 1
        if positions.shape[-1] != counted.shape[-1] or not (positions == counted.clamp(min=0)).all():
            refuse("position_ids: they follow from attention_mask here; leave them out")


@dataclass(frozen=True, slots=True)
class CallSettings:
    """The settings in the logits processors and stopping criteria that `generate` prepared."""

    sampling: Sampling
    max_length: int  # tokens of prompt and result together
    stops: frozenset[int]  # token ids after which a sequence ends
    negative: Tensor | None = None  # [B, T'] ids of the unconditional branch; None: the prompt's last token
    negative_mask: Tensor | None = None
    allowed: Callable[[int, Tensor], Any] | None = None  # prefix_allowed_tokens_fn

    @classmethod
    def read(cls, arguments: Mapping[str, Any]) -> CallSettings:
        """Returns the settings in the arguments of a decoding method.

        Processors may be guidance, allowed tokens, temperature, top-k and top-p, in the order of `generate`;
        criteria may be length and end of sequence. UserError for any other.
        """
        from transformers.generation import logits_process, stopping_criteria

        order = (
            logits_process.UnbatchedClassifierFreeGuidanceLogitsProcessor,
            logits_process.PrefixConstrainedLogitsProcessor,
            logits_process.TemperatureLogitsWarper,
            logits_process.TopKLogitsWarper,
            logits_process.TopPLogitsWarper,
        )
        processors = {type(processor): processor for processor in arguments["logits_processor"]}
        criteria = {type(criterion): criterion for criterion in arguments["stopping_criteria"]}
        ends = (stopping_criteria.MaxLengthCriteria, stopping_criteria.EosTokenCriteria)
        for kind in (*processors, *criteria):
            if kind not in (*order, *ends):
                refuse(f"{kind.__name__}: this processor or criterion is not supported; leave it out")
        if list(map(type, arguments["logits_processor"])) != [kind for kind in order if kind in processors]:
            refuse("logits_processor: temperature, top-k and top-p belong to the arguments of generate")
        guidance, prefix, temperature, top_k, top_p = (processors.get(kind) for kind in order)
        length, end = (criteria.get(kind) for kind in ends)
        scale = guidance.guidance_scale if guidance else 1.0
        sampling = Sampling(0.0, guidance=scale)
        if arguments["generation_config"].do_sample:
            sampling = Sampling(
                temperature=temperature.temperature if temperature else 1.0,
                top_k=top_k.top_k if top_k else 0,
                top_p=top_p.top_p if top_p else 1.0,
                guidance=scale,
            )
        context = guidance.unconditional_context if guidance else {}
        return cls(
            sampling=sampling,
            max_length=length.max_length if length else 0,
            stops=frozenset(end.eos_token_id.tolist() if end else ()),
            negative=context.get("input_ids"),
            negative_mask=context.get("attention_mask"),
            allowed=prefix._prefix_allowed_tokens_fn if prefix else None,
        )


def unpadded(name: str, ids: Tensor, mask: Tensor | None) -> list[list[int]]:
    """Returns the token ids of every row [B, T] without its left padding. UserError for other padding."""
    if mask is None:
        return ids.tolist()
    real = mask.bool()
    if (real[:, :-1] & ~real[:, 1:]).any() or not real[:, -1].all():
        refuse(f"{name}: padding behind or inside a prompt; pad on the left (tokenizer.padding_side)")
    return [row[keep].tolist() for row, keep in zip(ids, real, strict=True)]


def check_allowed(allowed: Callable[[int, Tensor], Any], sequences: Tensor, start: int, codes: range) -> None:
    """Refuses a prefix_allowed_tokens_fn that forbids images of this engine or allows others.

    The function is called for every prefix of the sequences [B, T] that ends at index `start` or later. If
    the next token is a code, it must allow exactly all codes; otherwise it must allow that token alone.
    """
    all_codes, previous, tokens, allows_codes = set(codes), None, set[int](), False
    for row, ids in enumerate(sequences):
        for at, token in enumerate(ids[start:].tolist(), start):
            answer = allowed(row, ids[:at])
            if answer is not previous:  # most functions return one and the same list of all codes
                previous, tokens = answer, set(map(int, answer))
                allows_codes = tokens == all_codes
            if not (allows_codes if token in codes else tokens == {token}):
                refuse(
                    f"prefix_allowed_tokens_fn: at token {at - start} of image {row} it allows other tokens "
                    f"than {'the codes' if token in codes else token}; leave it out"
                )
