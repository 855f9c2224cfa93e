import json
from pathlib import Path

from PIL import Image

from omnitrain.data.sources.rows import Row
from omnitrain.models.omni.generate import Answer
from omnitrain.train.evaluate.evaluate import Answered
from omnitrain.train.evaluate.media_files import free_stem, save_samples, write_parts
from omnitrain.train.verbs.answer import what_was_cut


def test_an_answer_never_overwrites_an_earlier_picture(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    pictures = [Image.new("RGB", (2, 2), color) for color in ("red", "blue", "green")]
    files = [write_parts(["see", one], tmp_path, free_stem(tmp_path, "answer"))[1] for one in pictures]
    assert [Path(file).name for file in files] == ["answer_1.png", "answer2_1.png", "answer3_1.png"]
    assert [Image.open(file).getpixel((0, 0)) for file in files] == [(255, 0, 0), (0, 0, 255), (0, 128, 0)]


def test_an_answer_says_what_was_cut_short() -> None:
    assert what_was_cut(Answer(["7"], is_finished=True), 24) is None
    assert what_was_cut(Answer(["7"]), 24) == "the answer has no end: --max-new-tokens 24 was reached; raise it"
    assert what_was_cut(Answer(unfinished_item="image_decoder"), 24) == (
        "image_decoder did not finish its last item, which is left out: --max-new-tokens 24 was reached; raise it"
    )


def test_the_page_shows_what_was_asked_with_and_without_a_reference(tmp_path: Path) -> None:
    asked, said = {"role": "user", "content": "why?"}, {"role": "assistant", "content": "so"}
    rows = [Row("open", "web", [asked], {}, {}), Row("known", "web", [asked, said], {}, {})]
    answers = [Answered(row, Answer(["because"])) for row in rows]
    page = save_samples(answers, tmp_path, per_source=2, step=4)[0].read_text()
    assert "Asked (`open`): why?" in page and "Asked (`known`): why?" in page
    assert page.count("Answered: because") == 2 and page.count("Reference: so") == 1


def test_answers_of_an_earlier_evaluation_stay_beside_the_new_ones(tmp_path: Path) -> None:
    row = Row("one", "web", [{"role": "user", "content": "why?"}], {}, {})
    for step, said in ((4, "because"), (8, "so"), (8, "well")):
        save_samples([Answered(row, Answer([said, Image.new("RGB", (2, 2))]))], tmp_path, per_source=2, step=step)
    lists = [json.loads((tmp_path / name / "samples.json").read_text()) for name in ("step-00000004", ".")]
    assert [(one["step"], one["samples"][0]["answer"][0]["text"]) for one in lists] == [(4, "because"), (8, "well")]
    assert lists[0]["samples"][0]["answer"][1] == {"file": "web_1_1.png"}
    assert (tmp_path / "step-00000004" / "web_1_1.png").is_file() and (tmp_path / "web_1_1.png").is_file()
    assert not (tmp_path / "step-00000008").exists()
