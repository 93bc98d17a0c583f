"""A run is a frozen object whose key depends on what is not a default, and a method refuses settings that it does not take."""

import math
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isaac_lab import method
from isaac_lab.trial import SCHEDULES, Trial, TrialError, parse

TRIAL = Trial("mnist-mlp", "sgd+isaac", (("learning_rate", 0.1), ("damping", 1.0)), steps=100, points=4)
TRIALS = st.builds(
    Trial,
    st.sampled_from(["mnist-mlp", "cola"]),
    st.sampled_from(["sgd", "adamw+isaac"]),
    st.dictionaries(
        st.sampled_from(["learning_rate", "damping", "second_rate"]), st.floats(1e-9, 1e9, allow_subnormal=False)
    ).map(lambda own: tuple(own.items())),
    st.dictionaries(st.sampled_from(["width", "batch", "model"]), st.integers(1, 99) | st.text(max_size=3)).map(
        lambda own: tuple(own.items())
    ),
    st.sampled_from(SCHEDULES),
    st.integers(1, 10**6),
    st.integers(1, 99),
    st.integers(0, 99),
    st.booleans(),
)


@given(TRIALS)
def test_a_run_reads_back_as_it_was(trial: Trial) -> None:
    again = Trial.from_json(trial.as_json())
    assert again == trial
    assert again.key == trial.key


@given(TRIALS, TRIALS)
def test_keys_differ_where_runs_do(first: Trial, second: Trial) -> None:
    assert (first.key == second.key) == (first == second)


def test_the_key_is_the_same_in_every_process_and_version() -> None:
    assert TRIAL.key == "29f99ef5894a"


def test_every_field_changes_the_key() -> None:
    changed = {
        "workload": "char-gpt",
        "method": "sgd",
        "settings": (("learning_rate", 0.2),),
        "variant": (("width", 5),),
        "schedule": "cosine",
        "steps": 7,
        "points": 5,
        "seed": 1,
        "small": True,
        "split": "validation",
        "rules": "0123456789ab",
    }
    assert set(changed) == {field.name for field in fields(Trial)}
    keys = {replace(TRIAL, **{name: value}).key for name, value in changed.items()}  # type: ignore[arg-type]
    assert len(keys | {TRIAL.key}) == len(changed) + 1


def test_a_default_is_not_in_the_key_so_that_a_new_field_renames_nothing() -> None:
    assert TRIAL.as_json() == {
        "workload": "mnist-mlp",
        "method": "sgd+isaac",
        "settings": {"damping": 1.0, "learning_rate": 0.1},
        "steps": 100,
        "points": 4,
    }


def test_settings_are_taken_and_changed_by_name() -> None:
    assert (TRIAL.learning_rate, TRIAL.damping, TRIAL.output_damping) == (0.1, 1.0, math.inf)
    assert TRIAL.having(damping=None, output_damping=2).settings == (("learning_rate", 0.1), ("output_damping", 2.0))
    assert TRIAL.varied(width=7).get("width") == 7
    assert TRIAL.varied(width=7).varied(width=None) == TRIAL
    assert TRIAL.having(damping=1) == TRIAL


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 0}, "steps must be a whole number >= 1, got 0"),
        ({"points": 0}, "points must be a whole number >= 1, got 0"),
        ({"seed": -1}, "seed must be a whole number >= 0, got -1"),
        ({"seed": True}, "seed must be a whole number >= 0, got True"),
        ({"schedule": "zigzag"}, "schedule must be one of constant, cosine, linear, straight, stepped, got 'zigzag'"),
        ({"settings": (("learning_rate", 0.0),)}, "learning_rate must be > 0, got 0.0"),
        ({"settings": (("learning_rate", math.inf),)}, "learning_rate must be finite, got inf"),
        ({"settings": (("damping", math.nan),)}, "damping must be > 0, got nan"),
        ({"settings": (("damping", "x"),)}, "damping must be > 0, got 'x'"),
        ({"settings": (("layers", [1.5]),)}, "layers must be a word, a number or whole numbers"),
    ],
)
def test_what_cannot_be_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(TrialError, match=message):
        replace(TRIAL, **change)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"workload": "x", "method": "y", "bunch": 1}, "a run has no field bunch"),
        ({"workload": "x"}, "a run needs method"),
        ({"workload": "x", "method": "y", "settings": 3}, "settings must be names with values, got 3"),
    ],
)
def test_a_record_of_something_else_is_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(TrialError, match=message):
        Trial.from_json(values)


def test_settings_of_a_command_line() -> None:
    written = {"damping=inf": math.inf, "layers=1,3": (1, 3), "relative=true": True, "data=digits": "digits", "epochs=2": 2}
    assert [parse(text)[1] for text in written] == list(written.values())
    for wrong in ("epochs", "=3", "epochs="):
        with pytest.raises(TrialError, match="a setting is name=value"):
            parse(wrong)


def test_schedules() -> None:
    assert [TRIAL.share(step) for step in (0, 50, 99)] == [1.0, 1.0, 1.0]
    cosine, linear = replace(TRIAL, schedule="cosine"), replace(TRIAL, schedule="linear")
    assert [cosine.share(step) for step in (0, 50)] == pytest.approx([1.0, 0.5])
    assert [linear.share(step) for step in (0, 9, 10, 55, 99)] == pytest.approx([0.1, 1.0, 1.0, 0.5, 1 / 90])


def test_measured_steps_are_even_and_include_both_ends() -> None:
    assert TRIAL.measured() == [0, 25, 50, 75, 100]
    assert replace(TRIAL, steps=3, points=10).measured() == [0, 1, 2, 3]


# Methods


def test_a_setting_that_a_method_does_not_take_is_named() -> None:
    takes = "clip, drop, drops, floor, frames, learning_rate, warm_up, weight_decay"
    with pytest.raises(TrialError, match=f"sgd takes no damping; it takes {takes}"):
        method.check(replace(TRIAL, method="sgd"))
    with pytest.raises(TrialError, match="curvature must be sampled or empirical, got 'exact'"):
        method.check(TRIAL.having(curvature="exact"))
    with pytest.raises(TrialError, match=r"there is no method 'lion'; there are sgd, momentum"):
        method.find("lion")


@pytest.mark.parametrize(
    ("name", "settings", "captured"),
    [
        ("sgd", {}, True),
        ("adamw+isaac", {}, True),
        ("muon", {}, True),
        ("soap", {}, True),
        ("momentum+foof", {}, False),
        ("kfac", {}, False),
        ("adamw+isaac", {"running": True}, False),
        ("momentum+isaac", {"max_rows": 256}, False),
        ("momentum+isaac", {"sharing": "reduce"}, True),
    ],
)
def test_what_can_be_a_cuda_graph(name: str, settings: dict[str, Any], captured: bool) -> None:
    assert method.capturable(Trial("mnist-mlp", name, tuple(settings.items()))) is captured


def test_what_is_not_installed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert method.missing(Trial("mnist-mlp", "kron")) == "pytorch_optimizer is not installed"
    assert method.missing(Trial("mnist-mlp", "adamw")) == ""
