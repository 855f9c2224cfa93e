from pathlib import Path

from omnitrain.data.sources.rows import Row
from omnitrain.models.omni.generate import Answer
from omnitrain.train.evaluate.evaluate import Answered
from omnitrain.train.evaluate.media_files import save_samples


def test_the_page_shows_what_was_asked_with_and_without_a_reference(tmp_path: Path) -> None:
    asked, said = {"role": "user", "content": "why?"}, {"role": "assistant", "content": "so"}
    rows = [Row("open", "web", [asked], {}, {}), Row("known", "web", [asked, said], {}, {})]
    page = save_samples([Answered(row, Answer(["because"])) for row in rows], tmp_path, per_source=2).read_text()
    assert "Asked (`open`): why?" in page and "Asked (`known`): why?" in page
    assert page.count("Answered: because") == 2 and page.count("Reference: so") == 1
