"""Charts: what they show, one look for each method, and pictures that are the same for the same input."""

import math
import re
import struct
import sys
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import pytest

from isaac_lab.charts import dots, draw, heat, lines
from isaac_lab.charts.figure import HUES, LOOKS, Chart, Control, Figure, Look, Method, identifier, look
from isaac_lab.charts.lines import Axis, Line, Panel, Target
from isaac_lab.records import write_whole

PNG = b"\x89PNG"
PLAIN = Method("AdamW", look("adamw"))
ROOT = Path(__file__).parents[1]
ALWAYS = {"λ", "ζ", "∇", "ḡ", "η", "×", "−", "₁", "₀", "ₐ", "∞", "≤", "·", "“", "”", "±"}


def grid(loss: float | None = None) -> list[heat.Cell]:
    dampings = (0.01, 1.0, 100.0)
    places = [*((a, g) for a in dampings for g in (*dampings, math.inf)), (math.inf, math.inf)]
    values = [10.0 ** (-k / 2) if loss is None else loss for k in range(len(places))]
    if loss is None:
        values[-1] = math.nan
    return [
        {"a": a, "g": g, "loss": value, "accuracy": 1 - value / 2, "rate": 0.1}
        for (a, g), value in zip(places, values, strict=True)
    ]


def place(a: float, g: float) -> tuple[float, float]:
    """The top left corner of a cell, in cells from the top left."""
    names = {"λ_a": "∞" if a == math.inf else f"{a:g}", "λ_g": "∞" if g == math.inf else f"{g:g}"}
    (row,) = (row for row in heat.chart("m", "t", grid()).values if all(row[key] == name for key, name in names.items()))
    return row["x"], row["y"]


def curves(**changes: object) -> Figure:
    """Two methods, one of which diverges, with a target."""
    ours, steps = Method("AdamW + ISAAC", look("adamw+isaac")), [1, 2, 3, 4]
    drawn = [
        Line(PLAIN, "one seed", {"step": steps[:2], "loss": [3.0, 2.0]}, diverged=True),
        Line(ours, "mean of 3 seeds", {"step": steps, "loss": [3.0, 1.0, 0.5, 0.25]} | _range()),
    ]
    step, loss = Axis("step", "Steps", ",d"), Axis("loss", "Training loss")
    target, words = Target(0.08625, "target 0.08625"), {"title": "Title: ∇ and ζ*", "subtitle": "sub"}
    made = lines.figure("f", [Panel("c", "", "Two curves.", drawn)], [loss], [step], target=target, **words)
    return replace(made, **changes)  # type: ignore[arg-type]


def _range() -> dict[str, list[float]]:
    return {"loss_low": [2.9, 0.9, 0.4, 0.2], "loss_high": [3.1, 1.1, 0.6, 0.3]}


# Heat maps


def test_output_damping_grows_to_the_right_and_input_damping_downwards() -> None:
    assert place(0.01, 0.01) == (0, 0)
    assert place(0.01, 100.0) == (2, 0)
    assert place(100.0, 0.01) == (0, 2)


def test_zeta_star_is_the_last_column_and_the_gradient_the_corner() -> None:
    assert place(0.01, math.inf) == (3 + heat.GAP, 0)
    assert place(math.inf, math.inf) == (3 + heat.GAP, 3 + heat.GAP)


def test_brighter_is_better() -> None:
    assert heat.colour(0.01, "loss") > heat.colour(0.1, "loss")
    assert heat.colour(0.99, "accuracy") > heat.colour(0.9, "accuracy")
    assert math.isfinite(heat.colour(0.0, "loss"))
    assert math.isfinite(heat.colour(1.0, "accuracy"))


def test_a_grid_of_nothing_but_diverged_runs_is_drawn(tmp_path: Path) -> None:
    cells = grid(math.nan)
    figure = Figure("f", (heat.chart("m", "t", cells),), "t", "s", (heat.control(cells),))
    draw.draw(figure, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(PNG)
    assert draw.svg(figure).count(">×<") == len(cells)


def test_the_best_cells_of_zeta_and_zeta_star_are_framed() -> None:
    rows = heat.chart("m", "t", grid()).values
    assert [(row["λ_a"], row["λ_g"]) for row in rows if row["loss_best"]] == [("100", "100"), ("100", "∞")]
    assert {row["status"] for row in rows} == {"finished", "diverged"}


def test_a_map_can_show_losses_or_accuracies() -> None:
    control = heat.control(grid())
    assert list(control.choices) == ["Training loss", "Test accuracy"]
    without = [{**cell, "accuracy": math.nan} for cell in grid()]
    assert list(heat.control(without).choices) == ["Training loss"]


# Curves


@pytest.mark.parametrize(("low", "high"), [(0.54, 0.69), (0.7, 2.4), (0.62, 1.9), (0.0021, 0.0029)])
def test_a_logarithmic_axis_has_numbers_however_short_it_is(low: float, high: float) -> None:
    step, loss = Axis("step", "Steps", ",d"), Axis("loss", "Training loss")
    line = Line(PLAIN, "one seed", {"step": [1, 2], "loss": [high, low]})
    text = draw.svg(lines.figure("f", [Panel("c", "", "One curve.", [line])], [loss], [step]))
    numbers = re.findall(r'text-anchor="end"[^>]*>([\d.]+)</text>', text)
    assert len({float(number) for number in numbers}) >= 2, numbers


def test_curves_end_where_a_run_diverged_with_a_cross() -> None:
    text = draw.svg(curves())
    whole = draw.svg(curves(charts=tuple(_without_crosses(chart) for chart in curves().charts)))
    assert text.count("mark-symbol") == whole.count("mark-symbol") + 1


def _without_crosses(chart: Chart) -> Chart:
    layers = [layer for layer in chart.spec["layer"] if layer["mark"].get("shape") != lines.CROSS]
    return replace(chart, spec={**chart.spec, "layer": layers})


def test_a_curve_that_diverged_at_once_has_its_place_in_the_legend() -> None:
    gone = Panel("c", "", "", [Line(PLAIN, "one seed", {"step": [], "loss": []}, diverged=True)])
    axes = [Axis("loss", "Training loss")], [Axis("step", "Steps", ",d")]
    assert ">AdamW<" in draw.svg(lines.figure("f", [gone], *axes))


def test_nothing_runs_through_the_name_of_the_target() -> None:
    layers = curves().charts[0].spec["layer"]
    names = [layer["mark"] for layer in layers if layer["mark"].get("text") == "target 0.08625"]
    # Last, and over a rim of the paper's colour.
    assert [mark["color"] for mark in names] == ["var(--paper)", "var(--ink)"]
    assert layers[-2]["mark"] is names[0]
    assert names[0]["strokeWidth"] >= 4
    assert draw.svg(curves()).count("target 0.08625") == 2


# Looks


def test_every_method_has_one_look_and_no_two_have_the_same() -> None:
    families = {name: (own.hue, own.dash) for name, own in LOOKS.items() if name in _RACE}
    assert len(set(families.values())) == len(families)
    assert {own.hue for own in LOOKS.values()} <= set(HUES)
    assert all(not own.dash for name, own in LOOKS.items() if "isaac" in name)
    for name in ("sgd", "momentum", "adamw", "muon"):
        assert LOOKS[name].hue == LOOKS[f"{name}+isaac"].hue
        assert LOOKS[name].dash


_RACE = ("sgd", "momentum", "adamw", "muon", "soap", "kfac", "formula", "sgd+isaac", "momentum+isaac")
_RACE += ("adamw+isaac", "muon+isaac", "adamw+isaac running", "muon+isaac running")


def test_the_page_has_the_same_hues() -> None:
    style = (files("isaac_lab.report") / "assets" / "style.css").read_text(encoding="utf-8")
    found = dict(re.findall(r"--hue-(\w+): light-dark\((#\w{6})", style))
    assert found == HUES
    for name, value in draw.COLOURS.items():
        assert name.startswith("hue-") or name == "paper" or f"--{name}: light-dark({value}," in style


def test_a_race_looks_the_same_on_the_page_and_in_the_picture() -> None:
    """One figure, so one colouring; and each optimizer the hue that it has with ISAAC."""
    from isaac_lab.record import Store
    from isaac_lab.report.race import figure
    from isaac_lab.studies.race.standings import summarize

    summary = summarize(Store(ROOT / "results/race/mnist-mlp/quick"))
    found = {method.label: method for method in figure(summary).methods}
    assert found["SGD + momentum"].look.hue == found["SGD + momentum + ISAAC"].look.hue
    assert found["AdamW"].look.hue == found["AdamW + ISAAC"].look.hue
    text = draw.svg(figure(summary))
    for method in found.values():
        assert f'stroke="{HUES[method.look.hue]}"' in text


# Controls


def test_a_view_takes_the_first_choice_of_each_control_it_does_not_name() -> None:
    controls = (Control("A", {"1": {"a": 1}, "2": {"a": 2}}), Control("B", {"x": {"b": "x"}}))
    figure = Figure("f", (), controls=controls, methods=(Method("m", Look("red")),))
    assert figure.chosen() == {"rows": "true", "shown": ["m"], "a": 1, "b": "x"}
    assert figure.chosen({"A": "2"})["a"] == 2
    with pytest.raises(KeyError, match="no control C in f"):
        figure.chosen({"C": "1"})
    with pytest.raises(KeyError):
        figure.chosen({"A": "3"})


def test_what_no_control_says_is_left_out() -> None:
    spec = {"scale": {"domain": "$domain", "type": "$type"}, "list": ["$a", "b"], "text": "$ 5"}
    assert draw.filled(spec, {"type": "log", "a": 1}) == {"scale": {"type": "log"}, "list": [1, "b"], "text": "$ 5"}


def test_an_identifier_has_letters_digits_and_hyphens() -> None:
    assert identifier("map", "figA3", "ζ*") == "map-figa3---"


# Pictures


def test_the_same_figure_gives_the_same_bytes(tmp_path: Path) -> None:
    first = draw.svg(curves())
    assert draw.svg(curves()) == first
    draw.pictures(curves(), tmp_path / "figure")
    assert (tmp_path / "figure.svg").read_text(encoding="utf-8") == first
    png = (tmp_path / "figure.png").read_bytes()
    assert png.startswith(PNG)
    draw.draw(curves(), tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes() == png
    assert sorted(path.name for path in tmp_path.iterdir()) == ["figure.png", "figure.svg"]


def test_names_inside_of_a_picture_are_unique_and_used() -> None:
    text = draw.svg(curves(views=(({}, {}),)))
    names = re.findall(r'\bid="([^"]+)"', text)
    assert len(names) == len(set(names)) > 0
    assert set(re.findall(r"url\(#([^)]+)\)", text)) <= set(names)


def test_a_picture_has_its_title_its_words_and_a_legend() -> None:
    text = draw.svg(curves(title="a < b", subtitle="one\ntwo"))
    for words in ("a &lt; b", ">one<", ">two<", "<desc>Two curves.</desc>", ">AdamW + ISAAC<", ">Training loss<", ">Steps<"):
        assert words in text
    assert "var(--" not in text
    assert "$" not in text


def test_a_picture_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    target = tmp_path / "figure.svg"
    write_whole(target, "as it was")
    broken = Chart("c", "", "", {"layer": [], "mark": object()}, ())
    with pytest.raises(TypeError):
        draw.draw(Figure("f", (broken,)), target)
    assert target.read_text(encoding="utf-8") == "as it was"
    assert list(tmp_path.iterdir()) == [target]


def test_without_what_draws_the_error_says_what_to_install_and_what_was_trained_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    draw._engine.cache_clear()
    with pytest.raises(draw.DrawError, match=r"pip install 'isaac-newton\[lab\]'"):
        draw.svg(curves())
    draw.pictures(curves(), tmp_path / "figure")
    assert "figure is drawn later: pictures need vl-convert-python" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    draw._engine.cache_clear()


def test_the_font_that_is_shipped_has_every_letter_of_the_pictures() -> None:
    """No picture of ours needs a letter that would come from whatever the machine has."""
    fonts = files("isaac_lab.charts") / "fonts"
    assert "DejaVu" in (fonts / "LICENSE.txt").read_text(encoding="utf-8")
    written = "".join("".join(re.findall(r">([^<>]+)<", path.read_text(encoding="utf-8"))) for path in _pictures())
    letters = _letters((fonts / "DejaVuSans.ttf").read_bytes())
    missing = {letter for letter in {*written, *ALWAYS} if letter not in letters and letter not in "\n\t"}
    assert missing == set()


def _pictures() -> list[Path]:
    found = sorted((ROOT / "docs" / "figures").glob("*.svg"))
    assert len(found) > 15
    return found


def _letters(font: bytes) -> set[str]:
    """The characters of a TrueType font, from its table "cmap" (format 4)."""
    count = struct.unpack_from(">H", font, 4)[0]
    tables = {font[12 + 16 * n : 16 + 16 * n]: struct.unpack_from(">I", font, 20 + 16 * n)[0] for n in range(count)}
    start = tables[b"cmap"]
    several = struct.unpack_from(">H", font, start + 2)[0]
    subtables = [start + struct.unpack_from(">I", font, start + 8 + 8 * n)[0] for n in range(several)]
    place = next(one for one in subtables if struct.unpack_from(">H", font, one)[0] == 4)
    segments = struct.unpack_from(">H", font, place + 6)[0] // 2
    ends = struct.unpack_from(f">{segments}H", font, place + 14)
    starts = struct.unpack_from(f">{segments}H", font, place + 16 + 2 * segments)
    return {chr(code) for first, last in zip(starts, ends, strict=True) for code in range(first, last + 1) if code != 0xFFFF}


def test_committed_pictures_are_small_and_nobody_needs_matplotlib() -> None:
    # Those of the notebooks have a limit of their own: tests/test_notebooks.py.
    assert sum(path.stat().st_size for path in (ROOT / "docs" / "figures").iterdir()) < 2_000_000
    assert not [path for path in (ROOT / "results").rglob("*") if path.suffix in (".svg", ".png") and path.stem != "figure"]
    assert "matplotlib" not in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    sources = (ROOT / "src").rglob("*.py")
    assert not [path for path in sources if "matplotlib" in path.read_text(encoding="utf-8")]


# Dots


def test_dots_have_intervals_and_marks_only_where_there_is_something() -> None:
    methods = (Method("ζ*", look("zeta_star")), Method("ζ", look("zeta")))
    rows = [{"model": m, "method": "ζ*", "value": 1.1, "low": 1.0, "high": 1.2, "paper": None, "limit": None} for m in "ab"]
    kinds = [layer["mark"]["type"] for layer in dots.chart("d", "", "", rows, methods, ratio=True).spec["layer"]]
    assert kinds == ["rule", "rule", "circle"]
    rows[0] |= {"paper": 1.5, "limit": 1.3}
    kinds = [layer["mark"]["type"] for layer in dots.chart("d", "", "", rows, methods, ratio=True).spec["layer"]]
    assert kinds == ["rule", "rule", "point", "tick", "circle"]
    single = [{"model": "a", "method": "ζ", "value": 80.0, "low": 79.0, "high": 81.0, "seeds": [79.0, 81.0]}]
    figure = Figure("f", (dots.chart("d", "t", "", single, methods, unit=" %"),), methods=methods)
    assert draw.svg(figure).count("<path") > 3
