"""The help of every command can be read on a terminal of 80 columns: no name is cut, no line too long."""

from collections.abc import Iterator
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

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
