"""The keyword arguments that models hand to attention: honoured, without a bearing on it, or refused.

Models pass on whatever their forward was called with, so most names that arrive have nothing to do with attention.
Those are listed with the reason. A name on no list could change the result, so its call is refused rather than computed
without it.
"""

from __future__ import annotations

from typing import Any

from omnitrain.errors import UserError

HONOURED = {
    "scaling",
    "dropout",
    "is_causal",
    "sliding_window",
    "softcap",
    "s_aux",
    "position_bias",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
}

IRRELEVANT = {
    "max_length_q": "follows from the borders",
    "max_length_k": "follows from the borders",
    "position_ids": "queries and keys are rotated already; kernels only guess borders from it",
    "position_embeddings": "queries and keys are rotated already",
    "cache_position": "queries and keys are rotated already",
    "past_key_values": "what it holds is in keys and values already",
    "use_cache": "what a cache holds is in keys and values already",
    "cache_params": "of linear-attention layers",
    "seq_idx": "of linear-attention layers",
    "deterministic": "exact either way",
    "training": "dropout says it",
    "attention_mask_2d": "padding, of which a packed row has none",
    "labels": "of the loss",
    "num_items_in_batch": "of the loss",
    "logits_to_keep": "of the head",
    "output_hidden_states": "of the outputs",
    "output_router_logits": "of the outputs",
    "return_dict": "of the outputs",
    "token_type_ids": "in the mask, where it matters",
    "mm_token_type_ids": "in positions and mask, where it matters",
}


def refuse_unknown(module_name: str, arguments: dict[str, Any]) -> None:
    """Accept ``arguments`` only if none could change the result unheard.

    Args:
        module_name: class of the attention layer.
        arguments: keyword arguments of a call; what is None or False asks for nothing.

    Raises:
        UserError: names those that packed attention would leave out.
    """
    unknown = [
        name
        for name, value in arguments.items()
        if name not in HONOURED and name not in IRRELEVANT and value is not None and value is not False
    ]
    if unknown:
        raise UserError(
            f"{module_name} hands {', '.join(sorted(unknown))} to its attention, which packed attention does not honour"
        )
