"""Text tokenizers load whole, and texts write no control tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config

from omnitrain.data.chat.text_tokenizer import load_hf_processor, load_tokenizer, require_vocabulary, require_whole
from omnitrain.data.packing.sample import Rejected, Sample
from omnitrain.data.render.processor import OmniProcessor
from omnitrain.data.render.renderer import ChatRenderer
from omnitrain.data.sources.rows import Row
from omnitrain.errors import UserError
from omnitrain.recipe import ChatFormat, Recipe
from omnitrain.train.build_from_recipe import build_from_recipe
from tests.tiny import CHAT, FOUNDATION, SPECIAL, tiny_tokenizer
from tests.tiny_processors import byte_tokenizer


def words(*vocabulary: str) -> PreTrainedTokenizerFast:
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(("<unk>", *vocabulary))}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>")


def test_a_model_folder_without_tokenizer_files_is_refused_however_it_is_named(tmp_path: Path) -> None:
    model, data = {"foundation": {"config": FOUNDATION}}, {"train": [{"path": "rows.jsonl"}]}
    folder = str(tmp_path)
    Qwen3Config(**{k: v for k, v in FOUNDATION.items() if k != "model_type"}).save_pretrained(folder)
    named = r"'.*' has no complete text tokenizer: its Qwen2Tokenizer has 1 tokens and encodes a text as no token"
    advice = r".*Add tokenizer\.json .*\(`model\.tokenizer`, or `data\.processor`"
    for key, part in (("model.tokenizer", {"model": model | {"tokenizer": folder}, "data": data}),
                      ("data.processor", {"model": model, "data": data | {"processor": folder}})):  # fmt: skip
        with pytest.raises(UserError, match=f"^{key}: {named}{advice}"):
            build_from_recipe(Recipe(**part, train={"steps": 1}), "meta")
    for load in (load_hf_processor, lambda path: load_tokenizer(path, "checkpoint")):
        with pytest.raises(UserError, match=named):
            load(folder)


def test_a_checkpoint_that_lost_its_tokenizer_is_refused(tmp_path: Path) -> None:
    processor = OmniProcessor(ChatRenderer(tiny_tokenizer(), ChatFormat(**CHAT)), {}, {})
    processor.save_pretrained(tmp_path)
    OmniProcessor.from_pretrained(tmp_path, {}, {})
    file = tmp_path / "tokenizer.json"
    stored = json.loads(file.read_text())
    stored["model"] |= {"vocab": {token: i for i, token in enumerate(SPECIAL)}, "merges": []}
    file.write_text(json.dumps(stored))
    with pytest.raises(
        UserError, match=r"^checkpoint: '.*' has no complete text tokenizer: .* has 8 tokens and encodes a text as no"
    ):
        OmniProcessor.from_pretrained(tmp_path, {}, {})


def test_small_and_strange_tokenizers_are_whole() -> None:
    for tokenizer in (tiny_tokenizer(), byte_tokenizer(["<s>"]), words("rouge", "bleu"), words("7")):
        require_whole(tokenizer, "there", "model.tokenizer")
    with pytest.raises(UserError, match=r"has 1 tokens and encodes a text as \[0, 0, 0, 0\]"):
        require_whole(words(), "there", "model.tokenizer")


@pytest.mark.parametrize(("tokens", "rows"), [(151669, 151936), (50295, 51200), (50305, 58498), (264, 264)])
def test_padded_embeddings_are_no_missing_vocabulary(tokens: int, rows: int) -> None:
    class Counted:
        name_or_path = "there"

        def __len__(self) -> int:
            return tokens

    require_vocabulary(Counted(), rows, "model")  # type: ignore[arg-type]
    with pytest.raises(UserError, match=f"'there' has {tokens} tokens, but .* 'model' has {3 * rows} embeddings"):
        require_vocabulary(Counted(), 3 * rows, "model")  # type: ignore[arg-type]


@pytest.mark.parametrize("role", ["system", "user", "assistant"])
@pytest.mark.parametrize("ordinary", [[], ["<|user|>", "<|end|>"]])
def test_control_tokens_that_a_text_spells_stay_text(role: str, ordinary: list[str]) -> None:
    """Special ones, and ``ordinary`` ones, which the tokenizer has as added tokens like those of its vocabulary."""
    tokenizer = byte_tokenizer([token for token in SPECIAL if token not in ordinary])
    tokenizer.add_tokens([*ordinary, "<think>"])
    processor = OmniProcessor(ChatRenderer(tokenizer, ChatFormat(**CHAT)), {}, {})
    text = "a<|end|><|user|>b<|image|>c"
    sample = processor.sample(Row("r", "s", [{"role": role, "content": f"{text}<think>"}], {}, {}), may_ask=True)
    assert isinstance(sample, Sample)
    opening, *spelled, think, end = tokenizer.convert_ids_to_tokens(sample.input_ids.tolist())
    assert (opening, think, end) == (f"<|{role}|>", "<think>", "<|end|>")
    assert spelled == list(text)
    assert tokenizer("<|end|>", add_special_tokens=False)["input_ids"] == [processor.end_token]


def test_a_text_that_can_only_be_a_control_token_costs_its_row() -> None:
    scores = [("<unk>", 0.0), ("</s>", 0.0), *((one, -5.0) for one in "▁abc<>/s")]
    made = Tokenizer(models.Unigram(scores, unk_id=0))
    made.add_special_tokens(["</s>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>", unk_token="<unk>")
    processor = OmniProcessor(ChatRenderer(tokenizer, ChatFormat(user="a", end="</s>", separator="")), {}, {})
    rejected = processor.sample(Row("r", "s", [{"role": "user", "content": "a</s>b"}], {}, {}))
    assert isinstance(rejected, Rejected)
    assert rejected.reason == "the text spells control tokens, which the tokenizer cannot write as text: ['</s>']"
    asked = Row("r", "s", [{"role": "user", "content": "abc"}], {}, {})
    assert isinstance(processor.sample(asked, may_ask=True), Sample)
