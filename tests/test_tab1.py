"""Table 1: scores, tokenized batches, encoders from folders, a small run of everything, and the claims on BERT."""

import csv
import hashlib
import io
import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn
from typer.testing import CliRunner

from isaac_lab import executors, methods
from isaac_lab.claims import CLAIMS
from isaac_lab.claims.evidence import Evidence, Verdict
from isaac_lab.cli import app
from isaac_lab.data import text
from isaac_lab.progress import Display
from isaac_lab.record import Store, StoreError
from isaac_lab.report import paper
from isaac_lab.scores import SCORES
from isaac_lab.studies.calls import Means
from isaac_lab.studies.paper import EXPERIMENTS, runner, tab1
from isaac_lab.studies.paper.folder import view
from isaac_lab.studies.paper.larger import Budget
from isaac_lab.studies.paper.recipe import SCALES
from isaac_lab.studies.paper.tab1 import COLUMNS, METHODS, PLANS, TASKS, TUNING_SEED, Run, grid
from isaac_lab.training import Options, train
from isaac_lab.trial import Trial
from isaac_lab.workload import Form, load, seeded
from isaac_lab.workload import _load as loaded
from isaac_lab.workloads import encoders, glue

pytest.importorskip("transformers")

TOY = ("cola", "mrpc", "stsb")


def toy(name: str) -> glue.Glue:
    made = load(Trial(name, "sgd", small=True), device="cpu")
    assert isinstance(made, glue.Glue)
    return made


# Scores


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_scores_of_classes_are_those_of_their_definitions(seed: int, share: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    predicted, labels = ((torch.rand(97, generator=generator) < share).long() for _ in range(2))
    yes, true = predicted == 1, labels == 1
    found, missed, false, rejected = (int(both.sum()) for both in (yes & true, ~yes & true, yes & ~true, ~yes & ~true))
    scale = (found + missed) * (found + false) * (rejected + missed) * (rejected + false)
    expected = (found * rejected - missed * false) / math.sqrt(scale) if scale else 0.0
    assert SCORES["matthews"](predicted, labels) == pytest.approx(expected, abs=1e-12)
    assert SCORES["f1"](predicted, labels) == pytest.approx(2 * found / (2 * found + missed + false), abs=1e-12)
    assert SCORES["accuracy"](predicted, labels) == pytest.approx((found + rejected) / 97, abs=1e-12)


@pytest.mark.parametrize("levels", [2, 5, 1000])
def test_correlations_are_those_of_their_definitions(levels: int) -> None:
    generator = torch.Generator().manual_seed(levels)
    x, y = (torch.randint(levels, (80,), generator=generator).float() for _ in range(2))
    y += 0.5 * x

    def linear(a: Tensor, b: Tensor) -> float:
        a, b = a.double() - a.double().mean(), b.double() - b.double().mean()
        return float(a @ b / (a.norm() * b.norm()))

    def ranks(values: Tensor) -> Tensor:
        """Equal values share the mean of the ranks that they take."""
        return torch.tensor([float((values < v).sum()) + (float((values == v).sum()) + 1) / 2 for v in values])

    assert SCORES["pearson"](x, y) == pytest.approx(linear(x, y), abs=1e-9)
    assert SCORES["spearman"](x, y) == pytest.approx(linear(ranks(x), ranks(y)), abs=1e-9)


def test_scores_of_a_constant_prediction_are_zero() -> None:
    labels, constant = torch.tensor([0, 1, 1, 0]), torch.zeros(4, dtype=torch.long)
    assert SCORES["matthews"](constant, labels) == 0
    assert SCORES["f1"](constant, labels) == 0
    assert SCORES["pearson"](constant.float() + 0.1, labels) == 0
    assert SCORES["spearman"](constant, labels) == 0


def test_scores_that_are_no_numbers_are_said() -> None:
    assert math.isnan(SCORES["pearson"](torch.tensor([0.0, math.nan]), torch.tensor([0.0, 1.0])))
    assert math.isnan(SCORES["spearman"](torch.tensor([0.0, math.inf]), torch.tensor([0.0, 1.0])))
    with pytest.raises(ValueError, match="two equal rows"):
        SCORES["accuracy"](torch.tensor([1, 0]), torch.tensor([1]))
    with pytest.raises(ValueError, match="must be 0 or 1"):
        SCORES["matthews"](torch.tensor([1, 2]), torch.tensor([1, 0]))


# Batches


@pytest.mark.parametrize("name", TOY)
def test_batches_are_what_the_tokenizer_itself_pads(name: str) -> None:
    workload = toy(name)
    order = torch.randperm(400, generator=glue.noise.generator("order", 3, 0)).tolist()
    train = workload.task.train
    for number, batch in zip(range(5), workload.batches(3, 0), strict=False):
        own = order[8 * number : 8 * number + 8]
        second = None if train.second is None else [train.second[i] for i in own]
        expected = glue.tiny().tokenizer(
            [train.first[i] for i in own], second, padding="longest", pad_to_multiple_of=8, return_tensors="pt"
        )
        for column, tensor in zip(workload.names, batch, strict=False):
            assert torch.equal(tensor, expected[column]), column
        assert batch[-1].tolist() == [train.labels[i] for i in own]
    assert set(workload.names) == {"input_ids", "attention_mask", "token_type_ids"}


def test_pairs_are_marked_as_such() -> None:
    workload = toy("mrpc")
    types = next(workload.batches(0, 0))[workload.names.index("token_type_ids")]
    assert set(types.flatten().tolist()) == {0, 1}


def test_padding_on_the_left_stays_there() -> None:
    tokenizer = glue.tiny().tokenizer
    sentences = text.Split(("the dog", "the big dog saw the cat near the sea . the big dog saw the cat"), None, (0, 1))
    tokenizer.padding_side = "left"
    try:
        tokens = glue.Tokens(sentences, tokenizer, "cpu")
        short = tokens(torch.tensor([0]), [0])
    finally:
        tokenizer.padding_side = "right"
    ids, mask = (short[tokens.names.index(name)][0] for name in ("input_ids", "attention_mask"))
    assert mask.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert ids[:4].tolist() == [tokenizer.pad_token_id] * 4


def test_an_epoch_has_every_example_once_and_the_next_another_order() -> None:
    workload = toy("cola")
    epochs = [list(workload.batches(1, epoch)) for epoch in (0, 0, 1)]
    assert workload.steps == len(epochs[0]) == 50
    assert sum(int(batch[-1].sum()) for batch in epochs[0]) == sum(workload.task.train.labels)
    same, other = (
        [torch.equal(a[0], b[0]) for a, b in zip(epochs[0], epochs[number], strict=True) if a[0].shape == b[0].shape]
        for number in (1, 2)
    )
    assert all(same)
    assert not any(other)


def test_an_incomplete_batch_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    task = text.load("toy-cola")
    short = text.Split(task.train.first[:13], None, task.train.labels[:13])
    workload = glue.Glue(replace(task, train=short), glue.tiny(), Form())
    assert [len(batch[-1]) for batch in workload.batches(0, 0)] == [8, 5]
    assert workload.steps == 2


def test_all_methods_see_the_same_batches_and_start_from_the_same_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = toy("cola")
    seen: dict[str, list[Tensor]] = {}
    started: dict[str, list[Tensor]] = {}
    for conditioning in ("none", "zeta_star", "reduce"):
        plain_loss, plain_model = glue.Glue.loss, glue.Glue.model
        seen[conditioning], started[conditioning] = [], []

        def loss(
            self: glue.Glue, model: nn.Module, *batch: Tensor, seen: list[Tensor] = seen[conditioning], plain: Any = plain_loss
        ) -> Any:
            seen.append(batch[0])
            return plain(self, model, *batch)

        def model(self: glue.Glue, seed: int, kept: list[Tensor] = started[conditioning], plain: Any = plain_model) -> Any:
            made = plain(self, seed)
            kept.extend(parameter.detach().clone() for parameter in made.parameters())
            return made

        with monkeypatch.context() as patch:
            patch.setattr(glue.Glue, "loss", loss)
            patch.setattr(glue.Glue, "model", model)
            train([_trial("cola", conditioning, steps=4, points=1)], workload, Options())
    for kept in (seen, started):
        assert len(kept["none"]) >= 4
        for conditioning in ("zeta_star", "reduce"):
            assert all(torch.equal(a, b) for a, b in zip(kept["none"], kept[conditioning], strict=True))


def _trial(
    name: str, conditioning: str = "none", base: str = "sgd", rate: float = 0.1, model: str = encoders.TINY, **fields: Any
) -> Trial:
    own: dict[str, Any] = {"learning_rate": rate}
    own |= {} if conditioning == "none" else {"damping": 1.0}
    own |= {"sharing": "reduce"} if conditioning == "reduce" else {}
    method = base if conditioning == "none" else f"{base}+isaac"
    return Trial(name, method, tuple(own.items()), (("model", model),), **{"small": True, **fields})


@pytest.mark.parametrize("conditioning", ["zeta_star", "reduce"])
def test_padding_does_not_change_a_step(conditioning: str) -> None:
    workload = toy("cola")
    *inputs, labels = next(workload.batches(0, 0))
    wider = [nn.functional.pad(tensor, (0, 8)) for tensor in inputs]
    weights = []
    for batch in ((*inputs, labels), (*wider, labels)):
        model = workload.model(0)
        for layer in model.modules():
            if isinstance(layer, nn.Dropout):
                layer.p = 0.0
        methods.prepare(_trial("cola", conditioning).having(damping=0.1), workload, model).step(*batch)
        # The positions of a batch are one row of numbers for all its sentences, padded or not: no mask fits them.
        weights.append({name: p.detach() for name, p in model.named_parameters() if "position" not in name})
    start = workload.model(0).get_parameter("classifier.weight")
    assert not torch.equal(weights[0]["classifier.weight"], start)
    for name in weights[0]:
        torch.testing.assert_close(weights[0][name], weights[1][name], rtol=1e-4, atol=1e-6)


def test_rows_of_one_length_have_no_padding() -> None:
    workload = load(Trial("cola-64", "sgd", small=True), device="cpu")
    batches = list(workload.batches(0, 0))
    assert {tuple(batch[0].shape) for batch in batches} == {(8, glue.FIXED_LENGTH)}
    assert workload.mask(*batches[0]) is None
    assert all((batch[0] != glue.tiny().tokenizer.pad_token_id).all() for batch in batches)
    assert workload.loss(workload.model(0), *batches[0]).item() > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("conditioning", ["none", "zeta_star", "reduce"])
def test_on_a_gpu_there_is_a_graph_for_each_length(conditioning: str) -> None:
    task = text.load("toy-cola")
    long = tuple(f"{sentence} {sentence}" if number < 40 else sentence for number, sentence in enumerate(task.train.first))
    workload = glue.Glue(replace(task, train=replace(task.train, first=long)), glue.tiny(), Form(device="cuda"))
    assert {batch[0].shape[1] for batch in workload.batches(0, 0)} == {16, 24}
    trial = _trial("cola", conditioning, "adam", 3e-3, schedule="linear", steps=80, points=2)
    (record,) = train([trial], workload, Options("cuda"))
    first, *_, last = record.points
    assert record.about["mode"] == "captured"
    assert record.finished
    assert last["train_loss"] < first["train_loss"]


# Encoders


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A local Hugging Face folder."""
    path = tmp_path_factory.mktemp("models") / "my-bert"
    torch.manual_seed(7)
    model: Any = glue.tiny().build(2)
    with glue.quietly():
        model.bert.save_pretrained(path)
        glue.tiny().tokenizer.save_pretrained(path)
    return path


def test_an_encoder_of_a_folder_has_its_name_its_weights_and_a_new_head(folder: Path) -> None:
    found = glue.encoder(str(folder))
    assert found.name == "my-bert"
    assert found.weights == hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    assert methods.last_layer(found.build(2)) == "classifier"
    made: list[Any] = [seeded(lambda: found.build(1), seed) for seed in (0, 0, 1)]
    words = [model.bert.embeddings.word_embeddings.weight for model in made]
    assert torch.equal(words[0], words[2])
    assert torch.equal(made[0].classifier.weight, made[1].classifier.weight)
    assert not torch.equal(made[0].classifier.weight, made[2].classifier.weight)
    assert made[0].classifier.weight.shape == (1, 32)


def test_a_record_names_the_encoder_and_its_weights(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(glue.ENCODER, str(folder))
    monkeypatch.setattr(text, "load", _few)
    loaded.cache_clear()
    trial = _trial("stsb", small=False, model="my-bert", steps=3, points=1)
    (record,) = train([trial], load(trial, device="cpu"), Options())
    assert record.trial.get("model") == "my-bert"
    assert record.about["weights"] == glue.encoder(str(folder)).weights
    assert str(folder) not in str(record)
    assert -1 <= record.points[-1]["spearman"] <= 1
    with pytest.raises(ValueError, match="the workload has 'my-bert'"):
        load(trial.varied(model="BERT-Mini"), device="cpu")
    loaded.cache_clear()


_load = text.load


def _few(name: str, folder: Path | None = None) -> text.TextTask:
    """Five batches, of the toy task of this kind."""
    task = _load(name if name.startswith("toy-") else f"toy-{name}", folder)

    def first(split: text.Split) -> text.Split:
        second = None if split.second is None else split.second[:40]
        return text.Split(split.first[:40], second, split.labels[:40])

    return replace(task, train=first(task.train), dev=first(task.dev))


def test_what_is_no_encoder_is_said(tmp_path: Path) -> None:
    from transformers import BartConfig, GPT2Config, ViTConfig

    with pytest.raises(glue.EncoderError, match=r"there is no folder .*--model"):
        glue.encoder(str(tmp_path / "nothing"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(glue.EncoderError, match=r"no config\.json.*--model"):
        glue.encoder(str(tmp_path / "empty"))
    for config in (GPT2Config(), ViTConfig(), BartConfig()):
        config.save_pretrained(tmp_path / config.model_type)
        with pytest.raises(glue.EncoderError, match=rf"is a {config.model_type}, not an encoder"):
            glue.encoder(str(tmp_path / config.model_type))


def test_weights_that_are_missing_or_damaged_are_said(folder: Path, tmp_path: Path) -> None:
    for name, content in (("missing", None), ("damaged", b"no weights")):
        copy = tmp_path / name
        copy.mkdir()
        for file in folder.iterdir():
            if file.suffix != ".safetensors":
                (copy / file.name).write_bytes(file.read_bytes())
        if content is not None:
            (copy / "model.safetensors").write_bytes(content)
        with pytest.raises(glue.EncoderError, match="cannot be read"):
            glue.encoder(str(copy))


def test_a_scale_that_needs_an_encoder_asks_for_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(glue.ENCODER, raising=False)
    for arguments, message in ((["--model", str(tmp_path / "none")], "no folder"), ([], "needs a pre-trained encoder")):
        command = ["reproduce", "tab1", "--scale", "quick", "--device", "cpu", "--out", str(tmp_path / "out"), *arguments]
        result = CliRunner().invoke(app, command, env={"COLUMNS": "400", "TERM": "dumb"})
        assert result.exit_code == 2
        assert message in result.output
    assert not list((tmp_path / "out").rglob("*.json"))


# The experiment


SHORT = Budget(1, 2, {"adam": (1e-3,), "momentum": (1e-2,)}, {"adam": (1e-3,), "momentum": (1e-2,)}, (0.1,), rounds=2)


@pytest.fixture(scope="module")
def short() -> Iterator[pytest.MonkeyPatch]:
    """Smoke scale, with five steps a run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tab1, "PLANS", {"smoke": SHORT, "quick": SHORT})
        patch.setattr(text, "load", _few)
        patch.delenv(glue.ENCODER, raising=False)
        loaded.cache_clear()
        executors._checked.cache_clear()
        yield patch
    loaded.cache_clear()
    executors._checked.cache_clear()


@pytest.fixture(scope="module")
def finished(short: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> tuple[runner.Request, list[str]]:
    said: list[str] = []

    class Told(Display):
        def say(self, what: str) -> None:
            said.append(what)

    out = tmp_path_factory.mktemp("out")
    shown = Told(Console(file=io.StringIO()), None)
    means = Means(executors.Call(command="isaac-newton reproduce tab1", progress=shown), display=shown)
    request = runner.Request(scale="smoke", out=out, means=means)
    paper.write(runner.run(EXPERIMENTS["tab1"], request))
    return request, said


def test_every_method_may_try_equally_many_settings() -> None:
    for scale, plan in PLANS.items():
        run = Run("a", "", plan.seeds, {task.name: 10 for task in TASKS}, scale)
        for task in TASKS:
            tried = {method: grid(run, task, method) for method in task.methods}
            assert {len(set(trials)) for trials in tried.values()} == {len(plan.plain_rates[task.optimizer])}
            assert {trial.seed for trials in tried.values() for trial in trials} == {TUNING_SEED}
            assert {(trial.method.partition("+")[0], trial.schedule) for trials in tried.values() for trial in trials} == {
                (task.optimizer, "linear")
            }
    assert PLANS["quick"].seeds >= 5
    assert PLANS["paper"].seeds == 10


def summary_of(request: runner.Request) -> dict[str, Any]:
    return tab1.summary(view(EXPERIMENTS["tab1"], request.out, SCALES[request.scale]))


def test_the_table_is_made_from_records(finished: tuple[runner.Request, list[str]]) -> None:
    request, said = finished
    directory = request.out / "tab1" / "smoke"
    summary = summary_of(request)
    assert summary["model"] == encoders.TINY
    assert summary["columns"][:2] == ["toy-cola (Matthews)", "toy-mrpc (accuracy)"]
    assert "toy tasks" in summary["title"]
    own = {row["method"]: row for row in summary["rows"] if row["method"]}
    assert list(own) == list(METHODS)
    records = Store(directory).records()
    assert {record.trial.get("model") for record in records} == {encoders.TINY}
    # Three tasks × three methods × (one setting + two seeds), and Adam for STS-B.
    assert len(records) == 28
    values = [
        record.points[-1]["f1"]
        for seed in (1, 2)
        for record in records
        if (record.trial.workload, record.trial.get("sharing"), record.trial.seed) == ("mrpc", "reduce", seed)
    ]
    cell = own["reduce"]["cells"][COLUMNS.index("MRPC (F1)")]
    assert cell["values"] == values
    assert cell["mean"] == pytest.approx(sum(values) / 2)
    assert cell["std"] == pytest.approx(abs(values[0] - values[1]) / math.sqrt(2))
    assert cell["settings"] == "Adam, η 0.001, λ 0.1"
    assert said[0].startswith(f"Table 1 with {encoders.TINY}, 140 training steps in all")
    with (directory / "numbers.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == sum(len(record.points) for record in records)
    assert {row["seed"] for row in rows} == {"0", "1", "2"}
    for name in ("figure.png", "figure.svg", "times.jsonl"):
        assert (directory / name).stat().st_size > 0


def test_nothing_is_trained_twice(finished: tuple[runner.Request, list[str]]) -> None:
    request = finished[0]
    directory = request.out / "tab1" / "smoke"
    names = ("trials.jsonl", "times.jsonl", "about.json")
    before = [(directory / name).read_bytes() for name in names]
    runner.run(EXPERIMENTS["tab1"], request)
    assert [(directory / name).read_bytes() for name in names] == before


def test_another_encoder_needs_another_directory(
    finished: tuple[runner.Request, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    another = replace(glue.tiny(), name="another")
    monkeypatch.setattr(encoders, "tiny", lambda: another)
    with pytest.raises(StoreError, match=r"was made with model tiny random BERT, this is another; name another --out"):
        runner.run(EXPERIMENTS["tab1"], finished[0])


def test_a_table_that_is_not_whole_is_drawn_as_far_as_it_goes(
    finished: tuple[runner.Request, list[str]], tmp_path: Path
) -> None:
    source = finished[0].out / "tab1" / "smoke"
    directory = tmp_path / "tab1" / "smoke"
    part = Store(directory)
    with part.writing():
        part.note(Store(source).about)
        part.add(*(record for record in Store(source).records() if record.trial.workload != "stsb"))
    request = replace(finished[0], out=tmp_path)
    drawn = runner.known(EXPERIMENTS["tab1"], request)
    paper.write(drawn)
    cells = summary_of(request)["rows"][0]["cells"]
    assert [cell is None for cell in cells] == [False, False, False, True, True]
    table = paper.table(drawn)
    assert table is not None
    assert table.rows[1].cells[4] == "–"


def test_without_records_there_is_nothing_to_draw(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="isaac-newton reproduce tab1 --scale smoke trains it"):
        paper.write(runner.known(EXPERIMENTS["tab1"], runner.Request(scale="smoke", out=tmp_path)))


@pytest.fixture(scope="module")
def from_folder(short: pytest.MonkeyPatch, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> runner.Request:
    """An encoder from a folder, one seed, through the whole experiment."""
    loaded.cache_clear()
    command = f"isaac-newton reproduce tab1 --model {folder.name}"
    out = tmp_path_factory.mktemp("quick")
    means = Means(executors.Call(workers=1, command=command), model=str(folder), seeds=1)
    request = runner.Request(scale="quick", out=out, means=means)
    paper.write(runner.run(EXPERIMENTS["tab1"], request))
    return request


def test_an_encoder_from_a_folder_is_named_and_its_place_is_not(from_folder: runner.Request, folder: Path) -> None:
    directory = from_folder.out / "tab1" / "quick"
    summary = summary_of(from_folder)
    assert summary["model"] == "my-bert"
    assert summary["weights"] == glue.encoder(str(folder)).weights
    assert summary["command"] == from_folder.means.call.command
    assert summary["columns"] == COLUMNS
    assert summary["rows"][1]["cells"][0]["n"] == 1
    assert glue.ENCODER not in os.environ
    assert not any(str(folder) in path.read_text() for path in directory.rglob("*.json*"))


def test_the_papers_numbers_stand_beside_ours(from_folder: runner.Request) -> None:
    table = paper.table(runner.known(EXPERIMENTS["tab1"], from_folder))
    assert table is not None
    headings, rows = table.columns, [list(row.cells) for row in table.rows]
    assert headings[0] == "Method"
    shown = {(section, row[0].strip()): row for section, row in _sections(rows)}
    assert [label for section, label in shown if section == "my-bert"] == ["∇", "ζ*", "ζ* reduce"]
    assert shown["BERT-Base (paper)", "ζ*"][1] == "57.62 ± 1.59"
    assert shown["BERT-Mini (paper)", "ζ*"][-2] == "80.82 ± 1.57"
    assert shown["my-bert", "∇"][-1] == "1.00 ×"
    assert all(len(row) == len(headings) for row in rows)


def _sections(rows: Sequence[Sequence[str]]) -> Iterator[tuple[str, Sequence[str]]]:
    section = ""
    for row in rows:
        if row[0].startswith(" "):
            yield section, row
        else:
            section = row[0]


@pytest.mark.skipif("ISAAC_TEST_ENCODER" not in os.environ, reason="ISAAC_TEST_ENCODER names no encoder")
def test_a_real_encoder_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(glue.ENCODER, os.environ["ISAAC_TEST_ENCODER"])
    monkeypatch.setattr(text, "load", _few)
    blank = Trial("cola", "adam+isaac", (("learning_rate", 1e-4), ("damping", 1.0)), steps=25, points=1)
    first, last = train([blank], load(blank, device="cpu"), Options())[0].points
    assert last["train_loss"] < first["train_loss"]


# Claims


def _summary(ours: float, plain: float, *, std: float = 0.01, n: int = 5, diverged: int = 0) -> dict[str, Any]:
    def cell(mean: float, diverged: int = 0) -> dict[str, Any]:
        ended = n - diverged
        values = [mean + std * (number - (ended - 1) / 2) for number in range(ended)]
        return {"mean": mean, "std": std, "n": ended, "diverged": diverged, "values": values, "settings": ""}

    rows: list[dict[str, Any]] = [
        {"label": "∇", "method": "gradient", "cells": [cell(plain) for _ in COLUMNS]},
        {"label": "ζ*", "method": "expand", "cells": [cell(ours, diverged) for _ in COLUMNS]},
        {"label": "ζ* reduce", "method": "reduce", "cells": [cell(plain) for _ in COLUMNS]},
        {"label": "∇ (paper)", "method": None, "paper": True, "cells": [None for _ in COLUMNS]},
    ]
    tried = [
        {"task": task.title, "optimizer": task.optimizer, "method": "expand", "settings": [{"score": score}], "missing": 0}
        for task, score in zip(TASKS, (0.1, 0.2, 0.8, 0.7), strict=True)
    ]
    return {"kind": "tab1", "model": "some-encoder", "columns": COLUMNS, "rows": rows, "tried": tried, "times": {}, "notes": []}


BERT = ("E4.1", "E4.1r", "E4.2", "E4.2r", "E4.3", "E4.3r", "E4.4", "E4.4b")
#: By folder and scale, what records would say.
MADE: dict[Path, dict[str, Any]] = {}


def _ledger(summary: dict[str, Any] | None, tmp_path: Path, scale: str = "quick") -> dict[str, Any]:
    known = MADE.setdefault(tmp_path, {})
    known |= {} if summary is None else {scale: json.loads(json.dumps(summary))}
    evidence = Evidence(tmp_path, tmp_path / "bench")
    evidence.summary = lambda experiment, scale: known.get(scale, {})  # type: ignore[assignment,misc]
    return {claim.number: claim.check(evidence) for claim in CLAIMS if claim.number in BERT}


def test_claims_hold_where_the_seeds_show_a_difference(tmp_path: Path) -> None:
    found = _ledger(_summary(0.60, 0.50), tmp_path)
    verdicts = {number: finding.verdict for number, finding in found.items()}
    holds = {"E4.1", "E4.2", "E4.3", "E4.4", "E4.4b"}
    assert {number for number, verdict in verdicts.items() if verdict == Verdict.HOLDS} == holds
    # "reduce" equals ∇ there.
    assert {verdicts[number] for number in ("E4.1r", "E4.2r", "E4.3r")} == {Verdict.UNDECIDED}
    assert all(finding.figures.startswith("some-encoder: ") and finding.scale == "quick" for finding in found.values())
    assert "difference +10.00 (p = " in found["E4.2"].figures


def test_a_difference_that_is_noise_is_none(tmp_path: Path) -> None:
    # The means differ by one standard error and a half: p = 0.17.
    found = _ledger(_summary(0.515, 0.50, std=0.01), tmp_path)
    assert found["E4.1"].verdict == Verdict.UNDECIDED
    assert "p = 0.17, no difference shown" in found["E4.1"].figures
    assert found["E4.4"].verdict == Verdict.HOLDS


def test_a_claim_fails_where_ours_is_shown_to_be_behind(tmp_path: Path) -> None:
    found = _ledger(_summary(0.40, 0.50), tmp_path)
    assert found["E4.1"].verdict == found["E4.4"].verdict == Verdict.FAILS


def test_one_score_that_is_not_better_decides(tmp_path: Path) -> None:
    summary = _summary(0.60, 0.50)
    place = COLUMNS.index("MRPC (F1)")
    summary["rows"][1]["cells"][place] = summary["rows"][0]["cells"][place]
    found = _ledger(summary, tmp_path)
    assert found["E4.2"].verdict == Verdict.UNDECIDED
    assert found["E4.1"].verdict == Verdict.HOLDS


def test_runs_that_diverged_count_against_a_method(tmp_path: Path) -> None:
    found = _ledger(_summary(0.55, 0.50, diverged=2), tmp_path)
    assert found["E4.1"].verdict == Verdict.UNDECIDED
    assert found["E4.4"].verdict == Verdict.FAILS
    assert "2 diverged" in found["E4.1"].figures


def test_a_comparison_with_runs_still_to_come_is_open(tmp_path: Path) -> None:
    summary = _summary(0.40, 0.50)
    summary["rows"][1]["cells"][COLUMNS.index("CoLA (Matthews)")]["n"] = 3
    found = _ledger(summary, tmp_path)
    assert found["E4.1"].verdict == found["E4.4"].verdict == Verdict.UNKNOWN
    assert found["E4.2"].verdict == Verdict.FAILS


def test_claims_without_enough_data_are_open(tmp_path: Path) -> None:
    assert {finding.verdict for finding in _ledger(None, tmp_path).values()} == {Verdict.UNKNOWN}
    # Smoke proves nothing.
    assert {finding.verdict for finding in _ledger(_summary(0.6, 0.5), tmp_path, "smoke").values()} == {Verdict.UNKNOWN}
    summary = _summary(0.6, 0.5)
    for row in summary["rows"]:
        row["cells"][-2:] = [None, None]
    summary["tried"] = []
    found = _ledger(summary, tmp_path)
    assert found["E4.3"].verdict == found["E4.4b"].verdict == Verdict.UNKNOWN
    assert found["E4.1"].verdict == Verdict.HOLDS
    single = _summary(0.6, 0.5, n=1, std=0.0)
    assert _ledger(single, tmp_path)["E4.1"].verdict == Verdict.UNKNOWN


def test_the_larger_scale_decides_and_adam_on_similarity_is_compared(tmp_path: Path) -> None:
    _ledger(_summary(0.4, 0.5), tmp_path, "quick")
    summary = _summary(0.6, 0.5)
    summary["tried"][3]["settings"] = [{"score": 0.9}, {"score": None}]
    found = _ledger(summary, tmp_path, "paper")
    assert found["E4.1"].scale == "paper"
    assert found["E4.1"].verdict == Verdict.HOLDS
    assert found["E4.4b"].verdict == Verdict.FAILS
    assert "Adam 90.00, SGD with momentum 80.00" in found["E4.4b"].figures
    summary["tried"][2]["missing"] = 1
    found = _ledger(summary, tmp_path, "paper")
    assert "Adam 70.00" in found["E4.4b"].figures, "what a half of a grid reached is no answer"
