"""A configuration is a value: it says what is wrong with it, reads back from TOML as it was, and has one name."""

import inspect
import math
import tomllib
from dataclasses import asdict, fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isaac_lab.config import Config, ConfigError

POSITIVE = st.floats(min_value=0, exclude_min=True, allow_nan=False, allow_infinity=False)
DAMPINGS = POSITIVE | st.just(math.inf)


@st.composite
def configs(draw: st.DrawFn) -> Config:
    hidden = tuple(draw(st.lists(st.integers(1, 2000), min_size=1, max_size=6)))
    kfac = draw(st.booleans())
    damping = draw(POSITIVE if kfac else DAMPINGS)
    return Config(
        data=draw(st.sampled_from(["mnist", "fashion-mnist", "digits"])),
        task=draw(st.sampled_from(["classification", "autoencoder"])),
        hidden=hidden,
        batch=draw(st.integers(1, 10**6)),
        epochs=draw(st.integers(1, 1000)),
        optimizer=draw(st.sampled_from(["sgd", "momentum", "adam"])),
        learning_rate=draw(POSITIVE),
        damping=damping,
        output_damping=damping if kfac else draw(DAMPINGS),
        curvature=draw(st.sampled_from(["sampled", "empirical"])),
        kfac=kfac,
        layers=tuple(draw(st.sets(st.integers(1, len(hidden) + 1)))),
        seed=draw(st.integers(0, 2**63)),
        examples=draw(st.integers(0, 60000)),
    )


@given(configs())
def test_toml_reads_back_as_it_was(config: Config) -> None:
    again = Config.from_toml(config.to_toml())
    assert again == config
    assert again.key == config.key


@given(configs())
def test_toml_is_what_another_reader_of_toml_reads(config: Config) -> None:
    read = tomllib.loads(config.to_toml())
    assert {name: tuple(value) if isinstance(value, list) else value for name, value in read.items()} == asdict(config)


@given(configs())
def test_every_field_can_be_set_on_a_command_line(config: Config) -> None:
    settings = []
    for name, value in asdict(config).items():
        text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        settings.append(f"{name}={text}")
    assert Config().with_settings(settings) == config


def test_a_part_of_a_toml_file_leaves_the_rest_at_its_default() -> None:
    assert Config.from_toml("damping = 1\nhidden = [10]") == Config(damping=1.0, hidden=(10,))


def test_settings_may_be_written_in_several_ways() -> None:
    config = Config().with_settings([" hidden = (100, 100) ", "kfac=True", "damping=1e-2", "output_damping=0.01", "layers=[]"])
    assert config == Config(hidden=(100, 100), kfac=True, damping=0.01, output_damping=0.01)


def test_the_key_is_the_same_in_every_process_and_version() -> None:
    """Records are found again by it."""
    assert Config().key == "9be343348830"


@given(configs(), configs())
def test_keys_differ_where_runs_do(first: Config, second: Config) -> None:
    same = first == second or replace(first, curvature="sampled") == replace(second, curvature="sampled")
    assert same or first.key != second.key


def test_without_zeta_the_curvature_makes_no_difference() -> None:
    plain, star, zeta = (Config(), Config(damping=1.0), Config(damping=1.0, output_damping=1.0))
    for config in (plain, star):
        assert replace(config, curvature="empirical").key == config.key
    assert replace(zeta, curvature="empirical").key != zeta.key


def test_sectors() -> None:
    assert Config().sector == "gradient"
    assert Config(damping=1.0).sector == "zeta_star"
    assert Config(output_damping=1.0).sector == "zeta"
    assert Config(damping=1.0, output_damping=1.0).sector == "zeta"


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no data": ({"data": ""}, "data must be the name of a data set, such as mnist or digits, got ''"),
    "no such task": ({"task": "sorting"}, "task must be one of classification, autoencoder, got 'sorting'"),
    "no hidden layer": ({"hidden": ()}, "hidden must be sizes >= 1"),
    "an empty layer": ({"hidden": (400, 0)}, "hidden must be sizes >= 1"),
    "half a neuron": ({"hidden": (400, 0.5)}, "hidden must be whole numbers"),
    "no batch": ({"batch": 0}, "batch must be >= 1, got 0"),
    "a truth value": ({"batch": True}, "batch must be a whole number, got True"),
    "no epochs": ({"epochs": 0}, "epochs must be >= 1, got 0"),
    "another optimizer": ({"optimizer": "lbfgs"}, "optimizer must be one of sgd, momentum, adam, got 'lbfgs'"),
    "no rate": ({"learning_rate": 0}, "learning_rate must be > 0 and finite, got 0"),
    "an endless rate": ({"learning_rate": math.inf}, "learning_rate must be > 0 and finite"),
    "no damping": ({"damping": 0.0}, "damping must be > 0, got 0.0; inf conditions nothing"),
    "not a number": ({"output_damping": math.nan}, "output_damping must be > 0, got nan"),
    "another curvature": ({"curvature": "exact"}, "curvature must be one of sampled, empirical"),
    "K-FAC with two dampings": ({"kfac": True, "damping": 1.0}, "kfac needs damping and output_damping to be one finite"),
    "K-FAC without damping": ({"kfac": True}, "kfac needs damping and output_damping to be one finite"),
    "a layer too many": ({"layers": (6,)}, "layers must be different numbers from 1 to 5"),
    "a layer twice": ({"layers": (1, 1)}, "layers must be different numbers from 1 to 5"),
    "a negative seed": ({"seed": -1}, "seed must be >= 0, got -1"),
    "negative examples": ({"examples": -1}, "examples must be >= 0, got -1"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_is_named(case: str) -> None:
    values, message = WRONG[case]
    with pytest.raises(ConfigError) as caught:
        Config(**values)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("damping", "a setting is field=value, such as damping=0.1, got 'damping'"),
        ("dumping=1", "there is no field 'dumping'; there are data, task, hidden"),
        ("batch=many", "batch must be a whole number, got 'many'"),
        ("batch=1.5", "batch must be a whole number, got '1.5'"),
        ("damping=small", "damping must be a number, got 'small'"),
        ("kfac=maybe", "kfac must be true or false, got 'maybe'"),
        ("hidden=400,wide", "hidden must be whole numbers, got '400,wide'"),
    ],
)
def test_a_setting_that_does_not_fit_is_named(setting: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config().with_settings([setting])
    assert str(caught.value).startswith(message)


def test_a_file_that_does_not_fit_is_named() -> None:
    with pytest.raises(ConfigError, match="not a TOML file"):
        Config.from_toml("damping: 1")
    with pytest.raises(ConfigError, match="there is no field 'lr'"):
        Config.from_toml("lr = 1")
    with pytest.raises(ConfigError, match="batch must be a whole number, got 'many'"):
        Config.from_toml('batch = "many"')


def test_every_field_is_documented() -> None:
    # Python 3.13 takes the indentation away.
    assert all(f"\n    {field.name}: " in inspect.cleandoc(Config.__doc__ or "") for field in fields(Config))
