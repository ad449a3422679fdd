"""`precache simulate`, as its users meet it."""

from __future__ import annotations

from pathlib import Path

import pytest

from precache.simulation.model import SCENARIOS, simulate
from precache.simulation.page import render_simulation
from tests.support.command_line import Run

STEADY = ("--load-ms", 2000, "--workers", 7, "--step-ms", 100)
TRACE = ("--load-ms", "x.txt", *STEADY[2:])


def test_every_setting_reaches_the_model(run: Run, tmp_path: Path) -> None:
    flags = "--prefetch 3 --no-in-order --startup-ms 9 --handover-ms 1 --copy-ms 2 --step-cv 0.1"
    settings = {"prefetch": 3, "in_order": False, "startup_ms": 9, "handover_ms": 1, "copy_ms": 2}
    expected = simulate(2000, 100, 7, **settings, step_cv=0.1, seed=5, load_cv=0.2)
    more = ("--seed", 5, "--load-cv", 0.2)
    assert run("simulate", *STEADY, *flags.split(), *more) == (0, f"{expected}\n", "")
    assert run("simulate", *STEADY, *flags.split(), *more, "--json").json == expected.to_dict()
    page = tmp_path / "a.html"
    assert run("simulate", *STEADY, "--html", page).status == 0
    assert page.read_text("utf-8") == render_simulation(simulate(2000, 100, 7))
    out = run("simulate", "--scenario", "balanced", "--workers", 8).out
    assert out == f"{simulate(**{**SCENARIOS['balanced'], 'workers': 8})}\n"
    assert out == f"{simulate(scenario='balanced', workers=8)}\n"
    trace = tmp_path / "times.txt"
    trace.write_text("# measured on Monday\n1e2\n\n300,  200 # a row\n")
    out = run("simulate", "--load-ms", trace, "--workers", 2, "--step-ms", 10).out
    assert out == f"{simulate([100, 300, 200], 10, 2)}\n"


@pytest.mark.parametrize(
    ("arguments", "text", "says"),
    [
        ((*STEADY[:2], "--workers", -1, "--step-ms", 100), None, "workers is -1"),
        (STEADY[2:], None, "give load_ms, or a scenario"),
        (STEADY[:2], None, "give step_ms and workers, or a scenario"),
        (("--scenario", "high"), None, "scenario is 'high'; there are loading-bound, "),
        ((*STEADY, "--html", "no/a.html"), None, "no/a.html cannot be written"),
        (TRACE, None, "cannot read the times in x.txt"),
        (TRACE, "12\n13 ms\n", "x.txt: could not convert string to float: 'ms'; give millisec"),
        (TRACE, "# none\n", "x.txt holds no times"),
    ],
)
def test_bad_usage_ends_in_a_message_and_status_2(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[object, ...],
    text: str | None, says: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    if text is not None:
        Path("x.txt").write_text(text)
    status, out, err = run("simulate", *arguments)
    assert (status, out) == (2, "")
    assert says in err
