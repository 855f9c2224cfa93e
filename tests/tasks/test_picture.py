"""The picture of a quickstart run shows a row for each task."""

import json
import sys
from pathlib import Path

import numpy as np
import soundfile
from PIL import Image

QUICKSTART = Path(__file__).parents[2] / "tasks" / "quickstart"
sys.path.insert(0, str(QUICKSTART))
import picture  # noqa: E402


def test_answers_before_and_after_training_are_drawn_beside_their_questions(tmp_path: Path) -> None:
    for folder, step in (("samples/step-00000000", 0), ("samples", 2000)):
        place = tmp_path / "run" / folder
        place.mkdir(parents=True, exist_ok=True)
        Image.new("L", (8, 8), 255 if step else 0).save(place / "drawn.png")
        soundfile.write(place / "said.wav", np.sin(np.arange(4000) / 4), 8000)
        parts = {"prompt": [{"text": "draw a 7"}], "answer": [{"file": "drawn.png"}, {"file": "said.wav"}]}
        saved = [{"source": source} | parts for source in picture.TASKS]
        (place / "samples.json").write_text(json.dumps({"step": step, "samples": saved}))
    picture.main(tmp_path / "run", tmp_path / "picture.png")
    drawn = np.asarray(Image.open(tmp_path / "picture.png"))
    assert drawn.shape == (picture.TOP + picture.ROW * len(picture.TASKS), picture.WIDTH, 3)
    before, after = (drawn[picture.TOP + 20, left + 10].tolist() for left in picture.COLUMNS[2:])
    assert (before, after) == ([0, 0, 0], [255, 255, 255])
