"""The keyword arguments that models pass to attention: supported, irrelevant or refused.

Models pass on all arguments of their forward. A name on no list could change the result, so we refuse the call.
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
    "max_length_q": "follows from the offsets",
    "max_length_k": "follows from the offsets",
    "position_ids": "queries and keys are rotated already; kernels only guess offsets from it",
    "position_embeddings": "queries and keys are rotated already",
    "cache_position": "queries and keys are rotated already",
    "past_key_values": "keys and values contain it already",
    "cache": "keys and values contain it already",
    "use_cache": "keys and values contain the cache already",
    "cache_params": "for linear-attention layers",
    "seq_idx": "for linear-attention layers",
    "deterministic": "exact either way",
    "training": "dropout depends on it, and is an argument",
    "attention_mask_2d": "padding; a packed sequence has none",
    "labels": "for the loss",
    "num_items_in_batch": "for the loss",
    "logits_to_keep": "for the head",
    "output_hidden_states": "for the outputs",
    "output_router_logits": "for the outputs",
    "return_dict": "for the outputs",
    "token_type_ids": "the mask contains it if it matters",
    "mm_token_type_ids": "positions and mask contain it if it matters",
}


def refuse_unknown(module_name: str, arguments: dict[str, Any]) -> None:
    """Refuse arguments, unless None or False, that could change the result and that packed attention would ignore.

    Raises:
        UserError: names the arguments, and the class of the layer.
    """
    unknown = [
        name
        for name, value in arguments.items()
        if name not in HONOURED and name not in IRRELEVANT and value is not None and value is not False
    ]
    if unknown:
        raise UserError(
            f"{module_name} passes {', '.join(sorted(unknown))} to its attention, which packed attention does not "
            "support"
        )
