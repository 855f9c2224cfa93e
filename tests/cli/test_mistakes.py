"""Mistakes of users: the exit code and the words of each, walked in one process; five of them in a shell."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from omnitrain.cli.main import app
from omnitrain.parallel.state import leave_process_groups
from tests.tiny import FOUNDATION, tiny_recipe, tiny_row, write_parquet

ROOT = Path(__file__).parents[2]

# A mistake per paragraph: the command, its exit code, and words of its message (`...` stands for anything). `R` is a
# recipe of a small language model over text; `deep.yaml` has more of its blocks.
MISTAKES = """
run nowhere.yaml
    2  no recipe `nowhere.yaml`: looked for the file
check recipes.yaml
    2  no recipe `recipes.yaml`...did you mean `recipe.yaml`?
check nowhere
    2  no recipe `nowhere`...there is no model folder of that name either
show quikstart
    2  no recipe `quikstart`...did you mean `quickstart`?
cp quickstart recipe.yaml
    2  recipe.yaml exists
run empty.yaml
    2  empty.yaml: found an empty file; expected keys such as `model:`
run broken.yaml
    2  broken.yaml:3:1: not valid YAML

run R train.stpes=20
    2  1 problem in recipe.yaml:...train.stpes: unknown key, found 20; did you mean `steps`?
run R train.steps=many train.log_every=0 model.freze=[foundation]
    2  3 problems in recipe.yaml:...model.freze...train.steps: found 'many'; expected an integer...train.log_every
run R train.steps
    2  override `train.steps`: expected key.sub=value, such as train.steps=20
run R --train.steps=20
    2  --train.steps: keys of a recipe have no dashes; write `train.steps=20`
run R --train.stepss=20
    2  --train.stepss: keys...no dashes, and none is called `train.stepss`; did you mean `train.steps=20`?
run R --stepss=20
    2  --stepss: keys...no dashes, and none is called `stepss`; did you mean `train.steps=20`?
run R --resum
    2  No such option: --resum...--resume
check R --train.log-every 5 --trian.optimizer.learning-rate 1e-3
    2  and none is called `train.log-every`; did you mean `train.log_every=5`?
run R --train.banana=20
    2  and none is called `train.banana`; `omnitrain show --schema` prints all
check R --pack-tokens 64
    2  --pack-tokens: keys of a recipe have no dashes; write `data.pack_tokens=64`
run R --learning_rate=1e-4
    2  --learning_rate: use `train.optimizer.learning_rate`
run R max_steps=20 lr=1e-4 bf16=true
    2  3 problems...max_steps...`train.steps`...lr...`train.optimizer.learning_rate`...`train.precision=bf16`
run R train.batch_size=8 train.gradient_accumulation_steps=4
    2  2 problems...`train.samples_per_step` (samples of a step, over all ranks...`train.packs_per_step` (packs in a
run R steps=20
    2  steps: unknown key, found 20; use `train.steps`
run R train.optimizer.schedule=cosin
    2  train.optimizer.schedule: found 'cosin'; expected...did you mean `cosine`?
run R data.cutoff_len=64 data.image_max_pixels=100 template=qwen data.packing=true
    2  4 problems...cutoff_len...`data.pack_tokens`...image_max_pixels...packing...remove it...`data.processor`
run R --data.max_seq_len 64
    2  --data.max_seq_len: use `data.pack_tokens`
run R train.metrics.right=my.py train.losses.text=torch.nn.functional.cross_entropy
    2  losses.text: found 'torch...such as torch.nn.functional:cross_entropy...right: found 'my.py'...as my.py:FUNCTION
run R data.heldout={path: train.parquet}
    2  data.heldout: set, but nothing is evaluated; add `evaluation: {}`, or remove it
show begun
    2  begun is the folder of a run, and no recipe: `omnitrain run begun` continues
run R evaluation={}
    2  `evaluation` needs `data.heldout`
run R --resume
    2  no checkpoint

check R parallel.default.ulysses=3
    2  parallel.default.ulysses: found 3, but 3 ranks cannot share 4 heads equally; 1, 2, 4 can
check R --nproc 3 parallel.default.ulysses=2
    2  parallel: ulysses=2 needs a multiple of 2 ranks, found 3...start it with --nproc 4
run R parallel.default.ulysses=2
    2  1 problem in recipe.yaml:...ulysses=2 needs a multiple of 2 ranks, found 1...start it with --nproc 2
run R --nproc 2 parallel.default.ulysses=3
    2  2 problems...start it with --nproc 3...parallel.default.ulysses: found 3, but 3 ranks cannot share 4 heads
check R parallel.default.ep=2
    2  parallel.default.ep: found 2, but no component has experts
run R parallel.default.dp_shard=4
    2  dp_shard=4 must divide dp...start it with --nproc 4
check R parallel.default.pp=2
    2  parallel.default.pp: found 2, but Qwen3ForCausalLM cannot be cut into stages: it has 1 block; use 1
check deep.yaml --nproc 4 parallel.components.foundation.pp=4 parallel.components.foundation.schedule.chunks=2
    2  parallel.components.foundation.pp: found 4: 8 stages need at least 8 blocks, but the model has 4; use fewer
check deep.yaml --nproc 2 parallel.default.pp=2 parallel.default.schedule.split=[1,2]
    2  parallel.default.pp: found 2: split [1, 2] adds up to 3 blocks, but the model has 4; change the numbers
check deep.yaml --nproc 2 parallel.default.pp=2 parallel.default.schedule.split=[4]
    2  split [4] has 1 numbers, but the pipeline has 2 stages
check deep.yaml --nproc 2 parallel.default.pp=2 parallel.default.schedule.kind=zbv train.packs_per_step=2
    2  parallel.default.schedule: zbv on 2 pipeline ranks needs 3 micro-batches per rank and step...2 gives 2; set
check deep.yaml --nproc 2 parallel.default.pp=2 parallel.default.schedule.kind=zbv parallel.default.compile=true
    2  parallel.default.compile: found true with `schedule: {kind: zbv}`, but compiled blocks cannot delay...remove one
run deep.yaml --nproc 4 parallel.default.pp=2 parallel.default.schedule.chunks=2 train.packs_per_step=2
    2  interleaved on 2 pipeline ranks needs 2...2 gives 1 on 2 data-parallel ranks; set train.packs_per_step to 4 or
check deep.yaml --nproc 2 parallel.default.pp=2 parallel.components.image_encoder.pp=2
    2  parallel.components.image_encoder: unknown component; choose from foundation
check R --nproc 2 parallel.default.schedule.kind=gpipe
    2  parallel.default.schedule: found with pp 1, where all but `overlap`...does nothing; set pp above 1, or remove it
check R --nproc 2 parallel.default.schedule.overlap=true
    2  parallel.default.schedule.overlap: found true with ep 1, where no all-to-all...can be hidden; set ep above 1
check R --nproc 2 parallel.default.pp=2 parallel.default.schedule={kind: zbv, overlap: true}
    2  parallel.default.schedule.overlap: found true with `kind: zbv`; it is for `1f1b` and `interleaved`
show R --schedule
    2  this recipe has no pipeline (pp is 1)...set parallel.components.foundation.pp=2
show deep.yaml --schedule --nproc 3 parallel.default.pp=2
    2  pp=2 needs a multiple of 2 ranks, found 3
show deep.yaml --schedule parallel.default.pp=2 --forward=-1
    2  --forward: found -1; expected a number of seconds above 0
check R parallel.default.precision.param=bfloat16
    2  trainable tensors are not float32...leave precision.param of the plan unset, or set `memory.offload
check R parallel.components.foundation.lora.r=4
    2  parallel.components.foundation.lora.r: unknown key, found 4; use `parallel.components.foundation.lora.rank`
check R parallel.components.fundation.mode=replicate
    2  parallel.components.fundation: unknown component; did you mean `foundation`?

check R model.freeze=[foundation]
    2  no parameter is trainable
run R model.freeze=[foundation] train.device=tpu
    2  2 problems in recipe.yaml:...'tpu' is not a device...no parameter is trainable
check R data.train=[{path: questions.parquet}]
    2  data.train: row 'text/0': nothing of the row is trained: no message of the assistant
run R data.train=[{path: nothing.parquet}]
    2  nothing.parquet
run R data.train=[{path: empty.jsonl}]
    2  data: 'empty.jsonl' holds no rows
run R data.train=[{path: image.parquet}]
    2  asks the model to read image
check R data.pack_tokens=3
    2  tokens, but a pack holds at most 3 (data.pack_tokens
run R train.device=cuda:7
    2  train.device is 'cuda:7', but torch...finds no CUDA device
run R output_dir=taken
    2  output_dir: 'taken' has files but no run (no recipe.yaml); use a new folder
check R train.experts.loss=sample
    2  Qwen3ForCausalLM has no experts; remove it
run R train.optimizer.learning_rates={layers.9: 1e-3}
    2  train.optimizer.learning_rates...layers.9
run R train.optimizer.learning_rate=1e38
    1  step 2: the loss is nan...a lower train.optimizer.learning_rate (it is 1e+38)

verify R --layouts dp8
    1  dp8 was not verified: needs 8 ranks, but nproc is 4; use --nproc 8
verify R --layouts dpp2
    2  `dpp2`: not understood; did you mean a word like `dp2`?
generate nowhere --prompt hi
    2  nowhere is neither a saved omni model (config.json) nor a run folder with checkpoints
generate nowhere --prompt hi --image none.png --audio none.wav
    2  no image at 'none.png'...no audio at 'none.wav'
export nowhere out
    2  nowhere is neither a saved omni model
export nowhere taken
    2  'taken' already has files; use a new folder
export nowhere out --dtype int8
    2  dtype: found 'int8'; expected one of float32, bfloat16, float16
check taken
    2  no HF model at 'taken': the folder has no config.json
check taken train.steps=20
    2  taken: this is a model; overrides such as `train.steps=20` apply only to recipes
doctor R
    2  unexpected extra argument
"""

# A message that does not stop the run.
TOLD = """
run R train.steps=2 train.optimizer.warmup_steps=100
    0  warmup_steps is 100, but the run has 2 steps: the learning rate only reaches 2% of its peak
"""

IN_A_SHELL = ("show quikstart", "cp quickstart", "run broken.yaml", "run R --train.steps=", "check R --pack-tokens")


def mistakes(table: str) -> list[tuple[str, int, str]]:
    """The command, the exit code and a regular expression for the words of each paragraph of a table."""
    found = re.findall(r"^(\S.*)\n +(\d)  (.*)$", table, re.MULTILINE)
    return [(command, int(code), ".*".join(map(re.escape, words.split("...")))) for command, code, words in found]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The working folder of all commands, with `recipe.yaml` and what the mistakes name."""
    folder = tmp_path_factory.mktemp("mistakes")
    recipe = yaml.safe_load(tiny_recipe(folder).read_text())
    config = FOUNDATION | {"num_hidden_layers": 1}
    recipe["model"] = {"foundation": {"config": config}, "tokenizer": recipe["model"]["tokenizer"]}
    write_parquet(folder / "train.parquet", [tiny_row("text", seed) for seed in range(8)])
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
    recipe["model"]["foundation"] = {"config": config | {"num_hidden_layers": 4}}
    (folder / "deep.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
    write_parquet(folder / "image.parquet", [tiny_row("image_to_text", 0)])
    asked = [tiny_row("text", seed) for seed in range(3)]
    for row in asked:
        row.messages[1]["role"] = "user"
    write_parquet(folder / "questions.parquet", asked)
    (folder / "empty.yaml").touch()
    (folder / "empty.jsonl").touch()
    (folder / "broken.yaml").write_text("model:\n  foundation: [\n")
    (folder / "begun").mkdir()
    shutil.copy(folder / "recipe.yaml", folder / "begun")
    (folder / "taken").mkdir()
    (folder / "taken" / "notes.txt").touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield folder


def arguments(command: str) -> list[str]:
    return ["recipe.yaml" if word == "R" else word for word in re.findall(r"\S*[\[{].*[\]}]|\S+", command)]


@pytest.mark.parametrize(("command", "code", "words"), mistakes(MISTAKES) + mistakes(TOLD))
def test_a_mistake_ends_with_its_code_and_says_what_to_do(folder: Path, command: str, code: int, words: str) -> None:
    done = CliRunner().invoke(app, arguments(command))
    leave_process_groups()
    assert done.exit_code == code, done.output
    assert re.search(words, done.stderr, re.DOTALL), done.stderr
    assert "Traceback" not in done.output


def test_a_shell_gets_the_same_codes_and_words(folder: Path) -> None:
    chosen = [row for row in mistakes(MISTAKES) if row[0].startswith(IN_A_SHELL)]
    assert len(chosen) == 5
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMNITRAIN": f"{sys.executable} -m omnitrain"}
    for command, code, words in chosen:
        script = f"$OMNITRAIN {shlex.join(arguments(command))}"
        done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, cwd=folder, env=environment)
        assert (done.returncode, done.stdout) == (code, ""), done.stdout
        assert re.search(words, done.stderr, re.DOTALL) and "Traceback" not in done.stderr, done.stderr
