"""The help of every command can be read on a terminal of 80 columns: no name is cut, no line too long."""

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

import isaac_newton
from isaac_lab.cli import app


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield path, command
    for name, part in getattr(command, "commands", {}).items():
        yield from commands(part, (*path, name))


COMMANDS = dict(commands(typer.main.get_command(app)))


def test_the_commands_that_people_know_are_there() -> None:
    known = {"demo", "reproduce", "race", "claims", "bench", "report", "data", "scaling"}
    assert known <= {path[0] for path in COMMANDS if path}


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_help_fits_into_eighty_columns_and_names_every_option(path: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERMINAL_WIDTH", "80")
    result = CliRunner().invoke(app, [*path, "--help"])
    assert result.exit_code == 0, result.output
    assert max(map(len, result.output.splitlines())) <= 80
    words = result.output.replace(",", " ").replace("/", " ").split()
    options = [option for option in COMMANDS[path].params if option.param_type_name == "option"]
    assert options or not path or "commands" in vars(COMMANDS[path])
    for option in options:
        assert {*option.opts, *option.secondary_opts} <= set(words)
        assert option.help
    for name in getattr(COMMANDS[path], "commands", {}):
        assert name in words


def test_help_does_not_wait_for_torch() -> None:
    program = "import sys, isaac_lab.cli; print({'torch', 'vl_convert'} & set(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert loaded.strip() == "set()"


def test_the_version_is_that_of_the_library() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.output == f"isaac-newton {isaac_newton.__version__}\n"
