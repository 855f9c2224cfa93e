"""For every key of a recipe, a case in which it has no effect and is refused, or the reason why it always has one."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import pytest
import torch
import yaml

from omnitrain.data.sources.rows import open_sources
from omnitrain.errors import UserError
from omnitrain.parallel.resolve import resolve_without_ranks
from omnitrain.recipe import Recipe, list_recipes, save_recipe
from omnitrain.recipe.strict import Strict
from omnitrain.train.build_from_recipe import build_from_recipe, require_ops
from omnitrain.train.lr_groups import decays_of, peaks_of
from omnitrain.train.useless_keys import require_effect
from tests.tiny import CHAT, FOUNDATION, tiny_recipe

GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 264, "n_positions": 64}
TEXT_RATES = "train.optimizer.learning_rates={foundation: 0.001}"

Base = Literal["any", "text", "gpt2"]


@dataclass(frozen=True)
class Always:
    """Whatever the rest of a recipe is, the key has an effect, or says nothing that could be without one."""

    why: str


@dataclass(frozen=True)
class Idle:
    """Overrides of a base recipe, of which the last is the key's own, are refused with a message that matches."""

    message: str
    overrides: tuple[str, ...]
    base: Base = "any"


def idle(message: str, *overrides: str, base: Base = "any") -> Idle:
    return Idle(message, overrides, base)


def plan(field: str, message: str, component: str = "image_encoder", *others: str, base: Base = "any") -> Idle:
    place = f"parallel.components.{component}"
    return idle(message, *(f"{place}.{other}" for other in others), f"{place}.{field}", base=base)


def section(field: str, message: str, *others: str) -> Idle:
    apart = ("parallel.sections.vision={components: [image_encoder], ranks: 1}", *others)
    return idle(message, *apart, f"parallel.sections.vision.{field}")


FROZEN = "model.freeze=[image_encoder]"
PERIOD = Always("a period or a limit; a run that ends earlier is a short run")
SIZE = Always("a size, a rate or a seed of what every run does")
DEVICE = Always("depends on the machine or on --nproc, which a recipe does not say")
STANDS: dict[str, Always | Idle] = {
    "Recipe.plugins": Always("modules are imported"),
    "Recipe.output_dir": Always("a run writes"),
    "Model.checkpoint": Always("it is the model"),
    "Model.tokenizer": idle(
        "`data.processor` contains a tokenizer", "data.chat=null", "data.processor=ORG/NAME", "model.tokenizer=ORG/NAME"
    ),
    "TeacherSource.path": idle("no `train.losses.text` or `train.metrics` to read", "model.teachers={big: ORG/NAME}"),
    "TeacherSource.divergence": Always("each kind is another loss"),
    **{
        f"TeacherSource.{field}": idle(
            "there is no `divergence`, which reads it", f"model.teachers={{big: {{path: ORG/NAME, {field}: {value}}}}}"
        )
        for field, value in (("temperature", 2), ("top_k", 2), ("weight", 2), ("sources", "[train]"))
    },
    "Model.freeze": idle("did you mean 'foundation'", "model.freeze=[foundatoin]", base="text"),
    "HFSource.path": Always("it is the part"),
    "HFSource.config": Always("it is the part; unknown keys are refused"),
    "Projector.kind": Always("each kind is another module"),
    "Projector.factor": idle(
        "`kind: mlp` merges nothing",
        "model.encoders.image_encoder.projector.kind=mlp",
        "model.encoders.image_encoder.projector.factor=3",
    ),
    "Encoder.max_frames": idle("reads no video", "model.encoders.audio_encoder.max_frames=8"),
    "Encoder.fps": idle("reads no video", "model.encoders.audio_encoder.fps=1"),
    "Encoder.min_pixels": idle("a sound has no pixels", "model.encoders.audio_encoder.min_pixels=64"),
    "Encoder.max_pixels": idle("a sound has no pixels", "model.encoders.audio_encoder.max_pixels=64"),
    "Encoder.processor": Always("its settings are taken; unknown ones are refused"),
    "Decoder.image_size": idle("MelVQ does not use it", "model.decoders.audio_decoder.image_size=8"),
    "Decoder.image_sizes": idle("MelVQ does not use it", "model.decoders.audio_decoder.image_sizes=[8x8]"),
    "Decoder.num_frames": idle("MelVQ does not use it", "model.decoders.audio_decoder.num_frames=2"),
    "Decoder.fps": idle("without `num_frames` the decoder writes no films", "model.decoders.image_decoder.fps=4"),
    "Decoder.num_codebooks": idle("JanusVQVAE does not use it", "model.decoders.image_decoder.num_codebooks=2"),
    "Decoder.max_tokens": idle("JanusVQVAE does not use it", "model.decoders.image_decoder.max_tokens=9"),
    "Flow.kind": idle("JanusVQVAE does not use it", "model.decoders.image_decoder.flow.kind=in_context"),
    "Flow.patch_size": idle("JanusVQVAE does not use it", "model.decoders.image_decoder.flow.patch_size=2"),
    "Flow.width": idle("JanusVQVAE does not use it", "model.decoders.image_decoder.flow.width=8"),
    "Flow.depth": idle("JanusVQVAE does not use it", "model.decoders.image_decoder.flow.depth=2"),
    "Flow.num_steps": idle("JanusVQVAE does not use it", "model.decoders.image_decoder.flow.num_steps=2"),
    "Ops.attention": idle("uses its own attention code", "model.ops.attention=sdpa", base="gpt2"),
    "Ops.rms_norm": idle("no module of the model computes", "model.ops.rms_norm=torch", base="gpt2"),
    "Ops.swiglu": idle("no module of the model computes", "model.ops.swiglu=torch", base="gpt2"),
    "Ops.rotary": idle("no module of the model computes", "model.ops.rotary=torch", base="gpt2"),
    "Ops.patch_embed": idle("no module of the model computes", "model.ops.patch_embed=linear", base="gpt2"),
    "Ops.unread_rows": idle(
        "no module after the model's last attention works token by token", "model.ops.unread_rows=torch", base="gpt2"
    ),
    "Ops.experts": idle("the model has no experts", "model.ops.experts=torch", base="gpt2"),
    "Ops.cross_entropy": idle("computes its loss from logits", "model.ops.cross_entropy=torch", base="gpt2"),
    "Data.processor": idle(
        "`model.checkpoint` contains its HF processor",
        "data.chat=null",
        "model={checkpoint: runs/old}",
        "data.processor=ORG/NAME",
    ),
    "Data.audio_in_video": idle("no HF processor prepares media", "data.audio_in_video=true", base="text"),
    "Data.max_frames": idle("no HF processor prepares media", "data.max_frames=9", base="text"),
    "Data.fps": idle("no HF processor prepares media", "data.fps=1", base="text"),
    "Data.min_pixels": idle("no HF processor prepares media", "data.min_pixels=9", base="text"),
    "Data.max_pixels": idle("no HF processor prepares media", "data.max_pixels=9", base="text"),
    "DataSource.decoders": idle("no message shows a medium", "data.train.0.decoders=[image_decoder]", base="text"),
    "ChatFormat.starts": idle("unknown name 'x'", "data.chat.starts={x: '<|image|>'}"),
    "DataSource.encoders": idle("no message shows a medium", "data.train.0.encoders=[image_encoder]", base="text"),
    "DataSource.fps": idle("no message shows video", "data.train.0.fps=1", base="text"),
    "DataSource.max_frames": idle("no message shows video", "data.train.0.max_frames=9", base="text"),
    "DataSource.min_pixels": idle("no message shows image or video", "data.train.0.min_pixels=9", base="text"),
    "DataSource.max_pixels": idle("no message shows image or video", "data.train.0.max_pixels=9", base="text"),
    "Data.pack_tokens": SIZE,
    "Data.pack_elements": SIZE,
    "Data.overlong": Always("a row may be too long"),
    "DataSource.overlong": idle("samples that are too long are skipped", "data.heldout.0.overlong=split"),
    "Data.packing_buffer": idle("a pack has one sample", "data.packing_buffer=4", base="gpt2"),
    "Data.cached_samples": SIZE,
    "Data.workers": SIZE,
    "DataSource.path": Always("it is the data set"),
    "DataSource.name": Always("metrics have it"),
    "DataSource.split": idle("files, which have no splits", "data.train.0.split=test"),
    "DataSource.subset": idle("files, which have no subsets", "data.train.0.subset=en"),
    "DataSource.revision": idle("files, which have no revisions", "data.train.0.revision=v2"),
    "DataSource.streaming": idle("files, which are read where they are", "data.train.0.streaming=true"),
    "DataSource.copy_parquet": idle("the files are no parquet files", "data.train.0.copy_parquet=true", base="text"),
    "DataSource.read_seconds": idle("neither the files nor `media_folder` are a URL", "data.train.0.read_seconds=5"),
    "DataSource.sample_seconds": Always("a row may take too long"),
    "Columns.text": idle(
        "`text` is set, so no messages are read", "data.train.0.columns={text: a}", "data.train.0.columns.messages=b"
    ),
    "Columns.response": idle("`text` is set, so rows are documents", "data.train.0.columns={text: a, response: b}"),
    "Columns.prompt": idle("`response` is not set", "data.train.0.columns.prompt=a"),
    "Columns.history": idle("`response` is not set", "data.train.0.columns.history=a"),
    "DataSource.format": idle("'alpaca' reads 'instruction' and 'output'; found", "data.train.0.format=alpaca"),
    "Columns.system": idle(
        "documents have no media, tools and messages", "data.train.0.columns.text=a", "data.train.0.columns.system=a"
    ),
    "DataSource.epochs": idle("held-out data sets are read once", "data.heldout.0.epochs=2"),
    "DataSource.limit": SIZE,
    "Data.weights_by": idle("there is only one training data set", "data.weights_by=tokens"),
    "Stage.from_step": idle(
        "there is only one training data set", "data.stages=[{weights: {train: 2}}]", "data.stages.0.from_step=3"
    ),
    "Stage.weights": idle("there is only one training data set", "data.stages=[{from_step: 3, weights: {train: 2}}]"),
    "DataSource.weight": idle("there is only one training data set", "data.train.0.weight=2"),
    "DataSource.roles": idle(
        "`columns.text` is set", "data.train.0.columns.text=a", "data.train.0.roles={narrator: user}"
    ),
    "DataSource.media_markers": idle("no text content has <image>", "data.train.0.media_markers=[image]", base="text"),
    "DataSource.media_folder": idle("no message shows a medium", "data.train.0.media_folder=.", base="text"),
    **{
        f"Columns.{field}": idle("is missing", f"data.train.0.columns.{field}=nothing")
        for field in ("id", "source", "messages", "images", "audios", "videos", "tools")
    },
    **{
        f"ChatFormat.{field}": idle(
            "`processor` has its own chat template", f"data.chat={{{field}: x}}", "data.processor=ORG/NAME"
        )
        for field in ("system", "user", "assistant", "end", "separator")
    },
    **{
        f"ChatFormat.{field}": idle(
            f"no attached encoder or decoder handles {field}", f"data.chat.{field}=<|end|>", base="text"
        )
        for field in ("image", "audio", "video")
    },
    **{
        f"ProcessorArguments.{field}": idle(
            "no HF processor prepares media", f"data.processor_arguments.{field}={{do_resize: false}}", base="text"
        )
        for field in ("images_kwargs", "videos_kwargs", "audio_kwargs")
    },
    "Train.steps": idle("`epochs` decides how long the run is", "train.epochs=2", "train.steps=9"),
    "Train.epochs": SIZE,
    "Train.packs_per_step": idle(
        "`samples_per_step` decides how large a step is", "train.samples_per_step=8", "train.packs_per_step=2"
    ),
    "Train.samples_per_step": SIZE,
    "Train.seed": SIZE,
    "Train.flops": Always("every model has products to count"),
    "Train.device": DEVICE,
    "Train.precision": idle(
        "sets it for all components", "parallel.default.precision.compute=float32", "train.precision=bf16"
    ),
    "Train.cpu_threads": DEVICE,
    "Train.loss_weights": idle("unknown name; did you mean `text`", "train.loss_weights={txt: 2}"),
    "Train.losses": Always("they train"),
    "Train.metrics": Always("they are measured"),
    "Train.callbacks": Always("they are called"),
    "EarlyStopping.metric": Always("it may stop improving in any run"),
    "EarlyStopping.patience": SIZE,
    "EarlyStopping.min_delta": SIZE,
    "EarlyStopping.mode": Always("a metric has one direction or the other"),
    "Train.log_every": PERIOD,
    "Train.report": Always("a page is written"),
    "Save.every": PERIOD,
    "Save.background": Always("it changes no checkpoint"),
    "Save.keep_last": Always("a resumed run has the last checkpoint of each start"),
    "Save.keep_every": PERIOD,
    "Save.keep_best": idle("saves only at the end", "train.save.every=null", "train.save.keep_best=loss"),
    "EMA.decay": SIZE,
    "Train.stop_seconds": DEVICE,
    "Train.stall_seconds": DEVICE,
    "Optimizer.learning_rate": idle(
        "covers all trained parameters", TEXT_RATES, "train.optimizer.learning_rate=0.01", base="text"
    ),
    "Optimizer.learning_rates": idle(
        "longer names cover all trained parameters of 'foundation'",
        "train.optimizer.learning_rates={foundation: 0.1, foundation.model: 0.2}",
        base="text",
    ),
    "Optimizer.warmup_steps": PERIOD,
    "ParallelPlan.auto": Always("a layout is chosen"),
    "Optimizer.schedule": Always("rates follow it"),
    "Optimizer.final_ratio": idle(
        "`schedule: constant` never decays", "train.optimizer.schedule=constant", "train.optimizer.final_ratio=0.5"
    ),
    "Optimizer.kind": Always("weights are updated in one way or another"),
    "Optimizer.state": Always("moments have one format or another"),
    "Optimizer.momentum": idle("`kind: adamw` does not use it", "train.optimizer.momentum=0.9"),
    "Optimizer.weight_decay": SIZE,
    "Optimizer.weight_decays": idle(
        "longer names cover all trained parameters with weight decay of 'foundation'",
        "train.optimizer.weight_decays={foundation: 0.1, foundation.model: 0.2}",
        base="text",
    ),
    "Optimizer.betas": SIZE,
    "Optimizer.eps": SIZE,
    "Optimizer.max_grad_norm": SIZE,
    "ExpertsBalance.loss": idle("has no experts", "train.experts.loss=sample", base="text"),
    "ExpertsBalance.weight": idle("adds no loss", "train.experts.weight=0.1"),
    "ExpertsBalance.z_weight": idle("has no experts", "train.experts.z_weight=0.1", base="text"),
    "ExpertsBalance.bias_rate": idle("has no experts", "train.experts.bias_rate=0.1", base="text"),
    "ExpertsBalance.record": idle("has no experts", "train.experts.record=routes", base="text"),
    "ExpertsBalance.replay": idle("has no experts", "train.experts.replay=routes", base="text"),
    "Track.to": Always("these programs get what is measured"),
    "Track.project": idle("only wandb and trackio use it", "train.track.to=[tensorboard]", "train.track.project=mine"),
    "Track.name": idle("only wandb and trackio use it", "train.track.name=mine"),
    "Trace.steps": Always("every model has actions"),
    "Compile.enabled": idle(
        "cannot offload activations", "parallel.default.memory.offload=[activations]", "train.compile.enabled=true"
    ),
    "Compile.max_recompiles": idle("nothing is compiled", "train.compile={enabled: false, max_recompiles: 2}"),
    "ParallelPlan.tp_plan": idle(
        "tp 1, where it does nothing", "parallel.tp_plan={model.layers.*.mlp.up_proj: colwise}", base="text"
    ),
    "ParallelPlan.ep_plan": idle(
        "the model has none", "parallel.ep_plan={layers.*.mlp.up_proj.weight: 0}", base="text"
    ),
    "ComponentPlan.dp_replicate": plan("dp_replicate=2", "keeps one copy", "image_encoder", "mode=fsdp2"),
    "ComponentPlan.dp_shard": plan("dp_shard=2", "shards nothing", "image_encoder", "mode=replicate"),
    "ComponentPlan.tp": plan("tp=2", "found 2, but the foundation has 1"),
    "ComponentPlan.sequence_parallel": plan(
        "sequence_parallel=true", "tp 1, where it does nothing", "foundation", base="text"
    ),
    "ComponentPlan.ulysses": plan("ulysses=2", "no ranks share a sequence of the foundation"),
    "ComponentPlan.cp": plan("cp=2", "only the foundation supports ring attention"),
    "ComponentPlan.async_ulysses": plan(
        "async_ulysses=true", "ulysses 1, where it does nothing", "foundation", base="text"
    ),
    "ComponentPlan.ep": plan("ep=2", "no component has experts", "foundation", base="text"),
    "ComponentPlan.pp": plan("pp=2", "only the foundation is cut into stages", "image_encoder"),
    "PipelineSchedule.kind": Always("a pipeline runs in one order or another"),
    "PipelineSchedule.chunks": plan(
        "schedule.chunks=2", "which has one stage per rank", "foundation", "schedule.kind=1f1b"
    ),
    "PipelineSchedule.group_size": plan("schedule.group_size=2", "it is for `interleaved`", "foundation"),
    "PipelineSchedule.overlap": plan(
        "schedule.overlap=true", "no all-to-all of experts can be hidden", "foundation", base="text"
    ),
    "PipelineSchedule.extra_forwards": plan(
        "schedule.extra_forwards=1", "which has no further forwards", "foundation", "schedule.kind=gpipe"
    ),
    "PipelineSchedule.split": Always("any split gives other stages"),
    "Section.components": Always("each of them gets other ranks"),
    "Section.ranks": Always("each number divides the encoders otherwise"),
    "Section.micro_batch": Always("each number encodes other items together"),
    "Section.slots": Always("each number is another limit of memory"),
    "Section.in_flight": section("in_flight=2", "keeps no activations", FROZEN),
    "Section.encode_twice": section("encode_twice=true", "keeps no activations", FROZEN),
    "Section.carrier": Always("each sends the features otherwise"),
    "Section.ahead": section("ahead=1", "image_encoder trains", "data.workers=1"),
    "ComponentPlan.mode": Always("parameters lie in one way or another"),
    "MemoryPlan.offload": plan("memory.offload=[mlp_input]", "has no experts", "foundation", base="text"),
    "Recompute.keep": plan("memory.recompute.keep=[aten.mm]", "the component has no blocks", "image_decoder"),
    "Recompute.parts": plan("memory.recompute.parts=[router]", "has no experts", "foundation", base="text"),
    "ComponentPlan.freeze": idle(
        "frozen elsewhere", "model.freeze=[foundation]", "parallel.components.foundation.freeze=false", base="text"
    ),
    "ComponentPlan.compile": plan("compile=true", "only the foundation can be compiled"),
    "ComponentPlan.place": plan("place=group", "use `local`", "foundation", base="text"),
    "ComponentPlan.quadratic_cost": plan("quadratic_cost=0.1", "which divides no items", "image_encoder"),
    "EncodePlan.window": plan("encode.window=2", "encodes no media", "foundation", base="text"),
    "EncodePlan.call_elements": plan("encode.call_elements=9", "encodes no media", "foundation", base="text"),
    "EncodePlan.feature_bytes": plan("encode.feature_bytes=9", "no features wait", "image_encoder"),
    "EncodePlan.features_on": plan("encode.features_on=cpu", "no features wait", "image_encoder"),
    "ExpertsPlan.rows": plan("experts.rows=8", "has no experts", "foundation", base="text"),
    "ExpertsPlan.chunks": plan("experts.chunks=2", "ep 1, where it does nothing", "foundation", base="text"),
    "ExpertsPlan.dispatcher": plan("experts.dispatcher=auto", "ep 1, where it does nothing", "foundation", base="text"),
    "ExpertsPlan.delay_wgrad": plan(
        "experts.delay_wgrad=true", "ep 1, where it does nothing", "foundation", base="text"
    ),
    "Lora.targets": plan("lora.targets=[q_prj]", "did you mean", "foundation", base="text"),
    "Lora.rank": SIZE,
    "Lora.alpha": SIZE,
    "Lora.rslora": SIZE,
    "Lora.dropout": Always("it changes what adapters read; where they have none (experts), it is refused"),
    "Precision.param": Always("parameters have one format or another"),
    "Precision.compute": Always("computation has one format or another"),
    "Precision.reduce": plan("precision.reduce=bfloat16", "has no gradients", "image_encoder", "freeze=true"),
    "Evaluation.every": PERIOD,
    "Evaluation.loss_every": PERIOD,
    "Evaluation.examples_per_source": SIZE,
    "Evaluation.batch_size": SIZE,
    "Evaluation.max_new_tokens": SIZE,
    "Evaluation.ema": idle("needs `train.ema`, which keeps the averages", "evaluation.ema=true"),
    "Evaluation.scorer": Always("it scores"),
    "Evaluation.saved_samples": SIZE,
    "Sampling.temperature": SIZE,
    "Sampling.size": idle("writes no images as words of its text", "evaluation.sampling={text: {size: 8x8}}"),
    "Sampling.guidance": Always("any logits can be guided"),
    "ConditionDropout.whole": idle("no decoder writes media", "data.condition_dropout=0.1", base="text"),
    "ConditionDropout.text": idle("no decoder writes media", "data.condition_dropout.text=0.1", base="text"),
    "ConditionDropout.image": idle("the model reads no image", "data.condition_dropout.image=0.1", base="text"),
    "ConditionDropout.audio": idle("the model reads no audio", "data.condition_dropout.audio=0.1", base="text"),
    "ConditionDropout.video": idle("the model reads no video", "data.condition_dropout.video=0.1", base="text"),
    "Sampling.top_k": idle("`temperature: 0` takes the most likely token", "evaluation.sampling={text: {top_k: 4}}"),
    "Sampling.top_p": idle("`temperature: 0` takes the most likely token", "evaluation.sampling={text: {top_p: 0.5}}"),
}


def nodes_below(annotation: Any) -> Iterator[type[Strict]]:
    if isinstance(annotation, type) and issubclass(annotation, Strict):
        yield annotation
    for argument in get_args(annotation):
        yield from nodes_below(argument)


def leaves(node: type[Strict], seen: set[type[Strict]]) -> Iterator[str]:
    """The keys below a node that hold no node themselves, by class and name."""
    seen.add(node)
    for name, field in node.model_fields.items():
        below = list(nodes_below(field.annotation))
        if not below:
            yield f"{node.__name__}.{name}"
        for other in below:
            if other not in seen:
                yield from leaves(other, seen)


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Base], Path]:
    """Recipes of a model of all modalities, and of two language models over text alone."""
    folder = tmp_path_factory.mktemp("bases")
    path = tiny_recipe(folder, rows=7, evaluated=True)
    text = folder / "text.jsonl"
    turns = [{"role": "user", "content": "1 + 1"}, {"role": "assistant", "content": "2"}]
    text.write_text(json.dumps({"messages": turns}) + "\n")
    tree = yaml.safe_load(path.read_text())
    for name, config in (("text", FOUNDATION), ("gpt2", GPT2)):
        model = {"foundation": {"config": config}, "tokenizer": tree["model"]["tokenizer"]}
        data = {"train": [{"path": str(text)}], "chat": CHAT}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({"model": model, "data": data}))
    return lambda base: path if base == "any" else folder / f"{base}.yaml"


@pytest.fixture(scope="module")
def built(bases: Callable[[Base], Path]) -> Callable[..., Any]:
    """Builds each base's model once, and one for each list of what is frozen."""
    made: dict[tuple[str, ...], Any] = {}

    def build(recipe: Recipe, base: Base) -> Any:
        key = (base, *recipe.model.freeze)
        if key not in made:
            made[key] = build_from_recipe(Recipe.load(str(bases(base)), [f"model.freeze={list(key[1:])}"]), "meta")
            runner = made[key][0].runner
            if base == "gpt2":  # as of a model that keeps all to itself
                runner.contract = replace(
                    runner.contract, attention="its own", head="logits", packs=False, tokenwise=()
                )
        return made[key]

    return build


def refuse_what_can_do_nothing(recipe: Recipe, base: Base, built: Callable[..., Any]) -> None:
    """What `check` and `run` ask of a recipe before a step."""
    open_sources(recipe.data.train)
    model, processor = built(recipe, base)
    require_effect(recipe, model, processor)
    require_ops(model, recipe.model.ops, torch.device("cpu"), torch.float32)
    peaks_of(model, recipe.train.optimizer)
    decays_of(model, recipe.train.optimizer)
    resolve_without_ranks(model, recipe.parallel, None)


def test_every_key_of_the_tree_takes_a_stand() -> None:
    assert set(STANDS) == set(leaves(Recipe, set()))


@pytest.mark.parametrize("leaf", [leaf for leaf, stand in STANDS.items() if isinstance(stand, Idle)])
def test_a_key_that_can_have_no_effect_is_refused_with_the_reason(
    leaf: str, bases: Callable[[Base], Path], built: Callable[..., Any]
) -> None:
    stand = STANDS[leaf]
    assert isinstance(stand, Idle)
    with pytest.raises(UserError, match=re.escape(stand.message)) as refused:
        refuse_what_can_do_nothing(Recipe.load(str(bases(stand.base)), list(stand.overrides)), stand.base, built)
    key = stand.overrides[-1].partition("=")[0].split(".")
    assert leaf.partition(".")[2] in str(refused.value) or ".".join(key[-2:-1]) in str(refused.value)


@pytest.mark.parametrize("base", get_args(Base))
def test_a_saved_recipe_sets_every_key_and_is_refused_for_none(
    base: Base, bases: Callable[[Base], Path], built: Callable[..., Any], tmp_path: Path
) -> None:
    """Its data have no columns of media, or no markers: a default that is written out asks for nothing."""
    recipe = Recipe.load(str(bases(base)))
    save_recipe(recipe, tmp_path / "recipe.yaml")
    again = Recipe.load(str(tmp_path / "recipe.yaml"))
    assert again == recipe
    refuse_what_can_do_nothing(again, base, built)


@pytest.mark.parametrize("name", list_recipes())
def test_shipped_recipes_set_nothing_for_nothing(name: str, tmp_path: Path) -> None:
    recipe = Recipe.load(name)
    save_recipe(recipe, tmp_path / "recipe.yaml")
    assert Recipe.load(str(tmp_path / "recipe.yaml")) == recipe


def test_held_out_data_are_for_an_evaluation(bases: Callable[[Base], Path]) -> None:
    with pytest.raises(UserError, match=r"data\.heldout: .*but nothing is evaluated; add `evaluation: \{\}`"):
        Recipe.load(str(bases("any")), ["evaluation=null"])
    with pytest.raises(UserError, match=r"data\.heldout\.0\.weight: found 2\.0, but held-out data sets are not mixed"):
        Recipe.load(str(bases("any")), ["data.heldout.0.weight=2"])
