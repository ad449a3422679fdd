"""`precache simulate`, as its users meet it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from precache.cli import main as cli
from precache.simulation.model import simulate

Run = Callable[..., tuple[int, str, str]]
STEADY = ("--load-ms", 2000, "--loaders", 7, "--step-ms", 100)


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("COLUMNS", "80")

    def run(*arguments: object) -> tuple[int, str, str]:
        try:
            status = cli.main(["simulate", *map(str, arguments)])
        except SystemExit as error:
            status = int(error.code or 0)
        return (status, *capfd.readouterr())

    return run


def test_it_prints_the_figures_and_shows_the_spikes(run: Run) -> None:
    status, out, err = run(*STEADY)
    assert (status, err) == (0, "")
    assert "7 loaders, 2,000 ms per batch; a queue of 7; 100 ms per step" in out
    assert "98 in 30 s" in out
    assert "3.50 batches/s once the first batch is there, after 2 s" in out
    assert "65.0% of the time since the first batch, 67.3% of the whole time" in out
    assert "long-run limit   3.50 batches/s, set by loading: loaders / load time = 3.50, " in out
    assert " = 3.50, 1 / step time = 10.00\n" in out
    assert "112 batches done (+14), stall 60.0%" in out
    assert "······█······█······█" in out
    assert "█······  1,300 0 0 0 0 0 0 ms" in out
    assert "Spikes: 100% of the waiting is for one batch in 7" in out


def test_with_variance_it_says_that_the_stall_remains(run: Run) -> None:
    _, out, _ = run(*STEADY, "--load-cv", 0.4, "--seconds", 300)
    assert "(cv 0.4, gamma)" in out
    assert "Spread:" in out
    assert "The training loop still waits" in out


def test_it_says_so_where_there_is_no_stall_and_where_no_batch_came(run: Run) -> None:
    _, out, _ = run("--load-ms", 350, "--loaders", 7, "--step-ms", 100)
    assert "never waits after the first batch" in out
    assert "48.5% of their time, by a full queue" in out
    _, out, _ = run("--load-ms", 1, "--load-cv", 0.5, "--loaders", 7, "--step-ms", 0.2)
    assert "hardly waits: for 2 of" in out
    _, out, _ = run("--load-ms", 1000, "--loaders", 1, "--step-ms", 50, "--seconds", 1.95)
    assert "waits at the end, 94.7% of the time since the first batch" in out
    _, out, _ = run(*STEADY, "--seconds", 1)
    assert "No batch was finished in this time" in out


def test_json_is_one_object_with_the_series(run: Run) -> None:
    status, out, err = run(*STEADY, "--load-cv", 0.2, "--seed", 5, "--json")
    assert (status, err) == (0, "")
    assert json.loads(out) == simulate(2000, 100, 7, load_cv=0.2, seed=5).to_dict()
    assert {"stalls_ms", "queue_depth", "made"} <= set(json.loads(out)["series"])


def test_a_trace_gives_the_load_times(run: Run, tmp_path: Path) -> None:
    trace = tmp_path / "times.txt"
    trace.write_text("100\n300\n200\n")
    arguments = ("--trace", trace, "--loaders", 2, "--step-ms", 10)
    _, out, _ = run(*arguments, "--json")
    assert json.loads(out) == simulate([100, 300, 200], 10, 2).to_dict()
    _, out, _ = run(*arguments, "--load-dist", "resample")
    assert "200 ms per batch (cv 0.41, 3 measured times in random order)" in out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((*STEADY[:2], "--loaders", 0, "--step-ms", 100), "loaders=0"),
        ((*STEADY, "--load-cv", -1), "load_cv=-1"),
        ((*STEADY, "--load-dist", "cycle"), "load_dist='cycle' needs measured times"),
        ((*STEADY, "--trace", "x.txt"), "not allowed with argument --load-ms"),
        (("--trace", "x.txt", *STEADY[2:]), "cannot read the times in x.txt"),
        (STEADY[2:], "one of the arguments --load-ms --trace is required"),
        ((*STEADY[:-1], "soon"), "--step-ms is 'soon'; give a number"),
    ],
)
def test_bad_usage_ends_in_a_message_and_status_2(
    run: Run, arguments: tuple[object, ...], says: str
) -> None:
    status, out, err = run(*arguments)
    assert (status, out) == (2, "")
    assert says in err
    assert "Traceback" not in err


def test_help_says_what_differs_at_the_balance_point(run: Run) -> None:
    status, out, _ = run("--help")
    assert status == 0
    assert "precache simulate --load-ms 2000 --loaders 7 --step-ms 100" in out
    assert "98      293      296" in out
    assert "At 700 ms, loading and the step are balanced" in out
