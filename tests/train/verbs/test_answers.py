"""Answers to a file of prompts, and a conversation in a terminal."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

from omnitrain.cli.main import app
from omnitrain.errors import DataError, UserError
from omnitrain.models.omni.generate import Answer
from omnitrain.train.verbs import answer as answers_of_one
from omnitrain.train.verbs.answer import Answerer, answer_file, prompts_of
from omnitrain.train.verbs.chat import Conversation, chat
from tests.tiny import png, tiny_model, tiny_processor, tiny_row, wav

LIMITS = {"max_new_tokens": 6, "temperature": 0.9, "seed": 3}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of all modalities, and two images and a sound beside it."""
    folder = tmp_path_factory.mktemp("saved")
    model = tiny_model()
    model.save_pretrained(folder / "model")
    tiny_processor(model).save_pretrained(folder / "model")
    for number in range(2):
        (folder / f"{number}.png").write_bytes(png(number))
    (folder / "tone.wav").write_bytes(wav(0))
    return folder


def write_lines(path: Path, records: list[dict]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_prompts_in_batches_have_the_answers_of_single_ones(saved: Path, tmp_path: Path) -> None:
    """Prompts of different lengths and media; an answer is drawn from the seed and its number."""
    media = [{}, {"images": [str(saved / "0.png")]}, {"audios": str(saved / "tone.wav")}]
    media += [{"images": [str(saved / "0.png"), str(saved / "1.png")]}]
    records = [{"id": f"q{i}", "prompt": f"what is {'x' * (i % 7)}{i}", **media[i % 4]} for i in range(36)]
    file, done = write_lines(tmp_path / "prompts.jsonl", records), []
    answerer = Answerer(saved / "model", output_dir=tmp_path / "out", **LIMITS)
    number = answer_file(answerer, file, tmp_path / "answers.jsonl", 16, lambda *counts: done.append(counts))
    assert number == 0 and done == [(16, 36), (32, 36), (36, 36)]
    lines = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    singles = [single for i, row in enumerate(prompts_of(file)) for single in answerer.answers([row], i)]
    assert [line["answer"] for line in lines] == [single.text for single in singles]
    assert [line["is_finished"] for line in lines] == [single.is_finished for single in singles]
    assert [line["id"] for line in lines] == [record["id"] for record in records]
    assert len({line["answer"] for line in lines}) > 18
    files = [
        (part, made)
        for line, single in zip(lines, singles, strict=True)
        for part, made in zip(line["parts"], single.parts, strict=True)
        if not isinstance(made, str)
    ]
    assert all(Path(part).is_file() for part, _ in files)
    alone, _ = answerer.answer(records[0]["prompt"], {})
    assert alone.text == lines[0]["answer"]


def test_rows_of_a_data_set_are_prompts_too_and_one_that_cannot_be_read_has_an_error(
    saved: Path, tmp_path: Path
) -> None:
    (tmp_path / "broken.png").write_bytes(b"no image")
    image = [{"type": "image"}, {"type": "text", "text": "what?"}]
    records = [
        {"messages": [{"role": "user", "content": image}], "images": [str(path)]}
        for path in (saved / "0.png", tmp_path / "broken.png")
    ]
    file = write_lines(tmp_path / "rows.jsonl", records)
    arguments = ["generate", str(saved / "model"), "--prompts", str(file), "--output", str(tmp_path / "out")]
    done = CliRunner().invoke(app, [*arguments, "--max-new-tokens", "3"])
    assert done.exit_code == 2 and "1 prompts have no answer" in done.stderr, done.output
    first, second = map(json.loads, (tmp_path / "out" / "answers.jsonl").read_text().splitlines())
    assert "answer" in first and "broken.png" in second["error"]
    with pytest.raises(DataError, match="prompt 1: expected an object with a text `prompt`"):
        prompts_of(write_lines(tmp_path / "wrong.jsonl", [{"question": "?"}]))
    for words in ([], ["--prompt", "a", "--prompts", str(file)], ["--prompts", str(file), "--image", "a.png"]):
        refused = CliRunner().invoke(app, ["generate", str(saved / "model"), *words])
        assert refused.exit_code == 2 and "generate needs one of --prompt TEXT" in refused.stderr


def test_a_conversation_keeps_its_media_in_order_and_can_begin_anew(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model's own images are part of it; a question that is refused or stopped is not."""
    asked: list[list[tuple[str, str]]] = []
    made = iter(
        [Answer(["see", Image.new("RGB", (8, 8))], is_finished=True), KeyboardInterrupt(), UserError("too long")]
    )
    rest = Answer(["ok"], is_finished=False)

    def generate(model: object, processor: object, prompts: list, **settings: object) -> list[Answer]:
        asked.append([(span.component, "target" if span.is_target else "read") for span in prompts[0].spans])
        answered = next(made, rest)
        if isinstance(answered, BaseException):
            raise answered
        return [answered]

    monkeypatch.setattr(answers_of_one, "generate", generate)
    typed = [
        f"/image {saved / '0.png'}",
        f"/audio {saved / 'tone.wav'} ",
        "what?",
        "stop",
        "long",
        f"/image '{saved / '1.png'}'",
        "and?",
    ]
    typed += ["/new", "hi", "/imag x", f"/exit {saved / '0.png'}", "/image nothing.png", "/image", "/help", ""]
    lines, said = iter(typed), []

    def read(prompt: str) -> str:
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    chat(Answerer(saved / "model", output_dir=tmp_path, max_new_tokens=6), read, lambda line: said.append(str(line)))
    seen = [("image_encoder", "read"), ("audio_encoder", "read")]
    drawn = [*seen, ("image_decoder", "target")]
    assert asked == [seen, drawn, drawn, [*drawn, ("image_encoder", "read")], []]
    text = "\n".join(said)
    assert "stopped; your message is forgotten" in text and "too long" in text and "did you mean `/image`" in text
    assert "0.png; did you mean `/exit`?" in text
    assert "no image at 'nothing.png'" in text and text.count("--max-new-tokens 6 was reached") == 2
    assert str(tmp_path / "answer_1.png") in said


def test_messages_of_a_conversation_are_those_of_a_row() -> None:
    row = tiny_row("image_to_speech", 0)
    conversation = Conversation().asked("hear", {"image": ["a.png"], "audio": [], "video": []})
    conversation = conversation.answered(["well", Path("b.wav")])
    assert [part["type"] for part in conversation.messages[1]["content"]] == ["text", "audio"]
    assert conversation.row().media == {"image": ["a.png"], "audio": ["b.wav"], "video": []}
    assert conversation.row().question == conversation.messages[:1] and row.media.keys() == conversation.media.keys()


class Terminal:
    """A program in a pseudo-terminal."""

    def __init__(self, *words: str) -> None:
        self.fd, slave = pty.openpty()
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TERM": "dumb"}
        self.process = subprocess.Popen(
            words, stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True
        )
        os.close(slave)
        self.shown = ""

    def read_until(self, text: str, seconds: float = 120.0) -> str:
        """What it shows up to ``text``."""
        limit = time.monotonic() + seconds
        while text not in self.shown:
            assert time.monotonic() < limit, self.shown
            if select.select([self.fd], [], [], 1.0)[0]:
                try:
                    self.shown += os.read(self.fd, 4096).decode()
                except OSError:  # it has ended
                    break
        shown, found, self.shown = self.shown.partition(text)
        assert found, shown
        return shown

    def type(self, line: str) -> None:
        os.write(self.fd, line.encode() + b"\n")

    def end(self) -> int:
        code = self.process.wait(60)
        os.close(self.fd)
        return code


def test_the_command_talks_about_an_image(saved: Path, tmp_path: Path) -> None:
    typed = f"/image {saved / '0.png'}\nwhat is it?\n"
    arguments = ["generate", str(saved / "model"), "--chat", "--output", str(tmp_path), "--max-new-tokens", "4"]
    talked = CliRunner().invoke(app, arguments, input=typed)
    assert talked.exit_code == 0 and "/image FILE" in talked.output, talked.output
    alone = Answerer(saved / "model", output_dir=tmp_path / "one", max_new_tokens=4)
    one, parts = alone.answer("what is it?", {"image": [str(saved / "0.png")]})
    assert one.tokens and all(str(part) in talked.output for part in parts if isinstance(part, str))


@pytest.mark.slow
def test_chat_talks_in_a_terminal_about_an_image_until_ctrl_d(saved: Path, tmp_path: Path) -> None:
    arguments = ("generate", str(saved / "model"), "--chat", "--output", str(tmp_path), "--max-new-tokens", "4")
    terminal = Terminal(sys.executable, "-m", "omnitrain", *arguments)
    assert "/image FILE" in terminal.read_until("\n> ")
    terminal.type(f"/image {saved / '0.png'}")
    assert "your next message shows" in terminal.read_until("\n> ")
    terminal.type("what is it?")
    answered = terminal.read_until("\n> ")
    alone = Answerer(saved / "model", output_dir=tmp_path / "one", max_new_tokens=4)
    one, parts = alone.answer("what is it?", {"image": [str(saved / "0.png")]})
    assert one.tokens and all(str(part) in answered for part in parts if isinstance(part, str))
    os.write(terminal.fd, b"\x04")
    assert terminal.end() == 0
