"""A student that predicts the next token as its teacher does: the loss and a metric of recipes/teacher_section.yaml."""

import json
from functools import cache
from pathlib import Path

import torch.nn.functional as F
from safetensors import safe_open
from transformers.utils import cached_file

TEACHER = "Qwen/Qwen3-8B"  # `model.teachers.big` of the recipe
TEMPERATURE = 2.0


@cache
def output_layer(device):
    """The teacher's output layer ``[classes, width]`` from its files; some models share it with the embeddings."""
    index = cached_file(TEACHER, "model.safetensors.index.json", _raise_exceptions_for_missing_entries=False)
    if index is None:  # all tensors are in one file
        with safe_open(cached_file(TEACHER, "model.safetensors"), "pt") as tensors:
            files = dict.fromkeys(tensors.keys(), "model.safetensors")
    else:
        files = json.loads(Path(index).read_text())["weight_map"]
    name = "lm_head.weight" if "lm_head.weight" in files else "model.embed_tokens.weight"
    with safe_open(cached_file(TEACHER, files[name]), "pt", device=str(device)) as tensors:
        return tensors.get_tensor(name).float()


def predicted(big, classes):
    """Logits of the teacher ``[n, classes]`` for its last hidden states ``[n, width]``.

    Models with the same tokenizer may have different numbers of unused classes at the end.
    """
    return big @ output_layer(big.device)[:classes].t()


def distilled(logits, labels, big):
    """Half cross entropy, half the divergence of the student from the teacher, for each token."""
    student = (logits / TEMPERATURE).log_softmax(-1)
    teacher = (predicted(big, logits.size(1)) / TEMPERATURE).log_softmax(-1)
    divergence = F.kl_div(student, teacher, reduction="none", log_target=True).sum(-1)
    return 0.5 * F.cross_entropy(logits, labels, reduction="none") + 0.5 * TEMPERATURE**2 * divergence


def agreement(logits, labels, big):
    """1 for each token where both predict the same as most likely, else 0."""
    return (logits.argmax(-1) == predicted(big, logits.size(1)).argmax(-1)).float()
