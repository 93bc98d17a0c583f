"""When seeds show a difference: the same p as scipy's, and what counts."""

import pytest
from scipy import stats

from isaac_lab.stats import against, contrast

LOW, HIGH, WIDE = [1.0, 1.1, 1.2], [2.0, 2.1, 2.3, 2.2], [0.0, 1.0, 3.0]


@pytest.mark.parametrize(("first", "second"), [(LOW, HIGH), (HIGH, LOW), (LOW, WIDE)])
def test_p_is_that_of_welch(first: list[float], second: list[float]) -> None:
    found = contrast(first, second)
    assert found.p == pytest.approx(stats.ttest_ind(first, second, equal_var=False).pvalue, rel=1e-12)


def test_ahead_and_behind_need_a_small_p() -> None:
    assert contrast(HIGH, LOW).ahead
    assert contrast(LOW, HIGH).behind
    undecided = contrast(LOW, WIDE)
    assert not undecided.ahead
    assert not undecided.behind
    assert undecided.words.endswith("no difference shown")
    assert "no difference" not in contrast(HIGH, LOW).words


def test_a_difference_of_differences() -> None:
    gap = contrast(HIGH, LOW, LOW, LOW, weights=(1, -1, -1, 1))
    assert gap.value == pytest.approx(contrast(HIGH, LOW).value)
    assert gap.ahead
    assert contrast(HIGH, LOW, LOW, LOW, weights=(2, -2, -2, 2)).p == pytest.approx(gap.p)
    assert contrast(HIGH, LOW, HIGH, LOW, weights=(1, -1, -1, 1)).p == pytest.approx(1)


def test_seeds_that_all_agree_decide_at_once() -> None:
    assert contrast([1.0, 1.0], [0.5, 0.5]).ahead
    assert contrast([1.0, 1.0], [1.0, 1.0]).p == 1


def test_a_table_has_the_p_of_each_row_below_it() -> None:
    rows = [
        {"label": "∇", "cells": [{"values": LOW}, {"values": LOW}, None]},
        {"label": "ours", "cells": [{"values": HIGH}, None, {"values": HIGH}]},
    ]
    first, last = against(rows, ["x", "y", "z"])
    assert first == "p of ours against ∇ (Welch, over seeds): x 7.1e-05."
    assert last == "From p = 0.05 on no difference is shown."
    assert against([rows[0], {"label": "ours", "cells": [{"values": [1.0]}, None, None]}], ["x", "y", "z"]) == []
