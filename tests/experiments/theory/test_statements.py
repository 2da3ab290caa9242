"""Every statement holds at a small size; with the column step left out many do not."""

import pytest

from experiments.theory import regularity
from experiments.theory.__main__ import NAMES


@pytest.mark.parametrize("name", NAMES)
def test_statements_hold(run_small, name: str) -> None:
    result = run_small(name)
    failed = [f"{s.sentence}: {s.measured} (expected {s.expected})" for s in result.statements if s.holds is False]
    assert not failed
    assert any(s.holds for s in result.statements)
    assert result.table


@pytest.mark.parametrize(
    ("name", "at_least"),
    [
        ("invariance", 2),
        ("gradient_flow", 2),
        ("heat_limit", 3),
        ("clusters", 1),
        ("regularity", 1),
        ("rank_and_depth", 2),
        ("transport", 3),
        ("implicit", 2),
    ],
)
def test_statements_fail_without_column_steps(run_small, without_column_steps, name: str, at_least: int) -> None:
    """At least 15 statements in all."""
    assert sum(statement.holds is False for statement in run_small(name).statements) >= at_least


def test_the_constants_of_small_moves_notice_a_scale_that_is_off(run_small, monkeypatch) -> None:
    """By a fiftieth, far below the slack of the paper's bounds."""
    honest = regularity.self_attention
    monkeypatch.setattr(regularity, "self_attention", lambda name, scale, **given: honest(name, 1.02 * scale, **given))
    constants = [s for s in run_small("regularity").statements if "most sensitive small move" in s.sentence]
    assert [statement.holds for statement in constants] == [False] * 3
