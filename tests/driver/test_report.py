"""The report of a build: figures that are the receipts' own, and a page that is safe to open."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import precache
from precache.errors import BuildError, StorageError, UsageError
from precache.html.pages import save
from precache.store.receipts import Receipt, ShardObject
from precache_workers.driver import build as building
from precache_workers.driver.report import check_reports, page, summary
from tests.support.browser import Tab
from tests.support.building import cli, write, write_jpegs
from tests.support.html_page import stands_alone

HOSTILE = "<script>alert(1)</script>&\"'.jpg"
SMALL: dict[str, Any] = {"address": "serial", "shard_samples": 2}
RECIPE = precache.Recipe.image(resize=150, crop=150)


@pytest.fixture
def receipts(monkeypatch: pytest.MonkeyPatch) -> list[Receipt]:
    """Those of the builds to come, as the workers returned them."""
    from precache_workers.shards import shard_task

    made: list[Receipt] = []
    run = shard_task.run_shard

    def run_shard(task: Any) -> Receipt:
        made.append(run(task))
        return made[-1]

    monkeypatch.setattr(shard_task, "run_shard", run_shard)
    return made


# --- figures ------------------------------------------------------------------------------------


def test_the_figures_are_the_sums_of_the_receipts(tmp_path: Path, receipts: list[Receipt]) -> None:
    photos = write_jpegs(tmp_path / "in", 12)
    write(photos / "cat" / "broken.jpg", b"none")
    path = tmp_path / "build.json"
    result = precache.build(photos, tmp_path / "store", RECIPE, report=path, **SMALL)
    told = json.loads(path.read_text())
    assert (told["state"], told["error"], told["version"]) == ("complete", None, result.version)
    assert told["rows"] == told["images"] == 13
    assert told["images_failed"] == 1
    assert told["shards"] == {"of_version": 7, "to_make": 7, "made": 7, "reused": 0}
    assert told["cpu_seconds"] == pytest.approx(result.cpu_seconds)
    assert told["images_per_cpu_second"] == pytest.approx(13 / result.cpu_seconds)
    fetched = sum(each.stat().st_size for each in photos.rglob("*.jpg"))
    raw, stored = result.raw_bytes, result.stored_bytes
    assert told["bytes"] == {"fetched": fetched, "raw": raw, "stored": stored}
    assert told["ratio"] == pytest.approx(result.ratio)
    for stage in ("fetch", "ops", "encode", "put"):
        spent = sum(each.seconds[stage] for each in receipts)
        assert told["stages"][stage] == pytest.approx(spent) == result.timings[stage]
    assert [line["shard"] for line in told["timeline"]] == list(range(7))
    assert sum(line["images"] for line in told["timeline"]) == 13
    [node] = told["nodes"]
    assert (node["shards"], node["images"], node["fetched"]) == (7, 13, fetched)
    assert told["failures"] == [{"key": k, "reason": why} for k, why in result.holes]


def test_a_build_that_is_continued_tells_what_it_made_itself(tmp_path: Path) -> None:
    photos = write_jpegs(tmp_path / "in", 12)
    result = precache.build(photos, tmp_path / "store", RECIPE, **SMALL)
    Path(result.path, "image/c/3/0/0/0").unlink()
    paths = [tmp_path / "again.json", tmp_path / "again.html"]
    precache.build(photos, tmp_path / "store", RECIPE, report=paths, **SMALL)
    told = json.loads(paths[0].read_text())
    assert told["shards"] == {"of_version": 6, "to_make": 1, "made": 1, "reused": 0}
    assert [line["shard"] for line in told["timeline"]] == [3]
    assert "5 were complete before this run" in stands_alone(paths[1].read_text()).text
    precache.build(photos, tmp_path / "store", RECIPE, report=paths, **SMALL)
    told = json.loads(paths[0].read_text())
    assert (told["state"], told["images"], told["timeline"]) == ("complete", 0, [])
    assert "This run wrote no shard" in stands_alone(paths[1].read_text()).text


def test_shards_taken_over_are_told_apart(tmp_path: Path, many_touched: None) -> None:
    photos = write_jpegs(tmp_path / "in", 8)
    precache.build(photos, tmp_path / "store", RECIPE, **SMALL)
    for path in photos.rglob("*.jpg"):
        path.touch()
    paths = [tmp_path / "build.json", tmp_path / "build.html"]
    precache.build(photos, tmp_path / "store", RECIPE, report=paths, **SMALL)
    told = json.loads(paths[0].read_text())
    assert told["shards"]["reused"] == 4
    assert told["bytes"]["fetched"] == sum(each.stat().st_size for each in photos.rglob("*.jpg"))
    assert "4 were reused from an earlier version" in stands_alone(paths[1].read_text()).text


# --- builds that fail ---------------------------------------------------------------------------


@pytest.mark.heavy
def test_a_build_that_fails_is_reported_with_its_reason(tmp_path: Path) -> None:
    photos = write_jpegs(tmp_path / "in", 6)
    for number in range(9):
        write(photos / f"<script>x{number}&\"'.jpg", b"none")
    ran = cli(
        *("build", photos, tmp_path / "store", "--address", "serial", "--no-progress"),
        *("--shard-samples", 2, "--resize", "150x150"),
        *("--report", tmp_path / "f.html", "--report", tmp_path / "f.json"),
    )
    assert ran.returncode == 1
    told = json.loads((tmp_path / "f.json").read_text())
    assert told["state"] == "incomplete"
    assert ran.stderr.splitlines()[-1] == f"precache: {told['error']}"
    assert 5 < len(told["failures"]) <= 9
    assert told["shards"]["made"] < told["shards"]["to_make"] == 8
    read = stands_alone((tmp_path / "f.html").read_text())
    assert "Incomplete" in read.text
    assert told["error"] in read.text
    for failure in told["failures"]:
        assert failure["key"] in read.text
        assert failure["reason"] in read.text


def test_a_build_that_finds_no_source_is_reported_too(tmp_path: Path) -> None:
    paths = [tmp_path / "f.html", tmp_path / "f.json"]
    with pytest.raises(UsageError, match="does not exist"):
        precache.build(tmp_path / "none", tmp_path / "store", report=paths, **SMALL)
    assert "does not exist" in stands_alone(paths[0].read_text()).text
    assert json.loads(paths[1].read_text())["version"] is None


def test_an_interrupted_build_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    photos = write_jpegs(tmp_path / "in", 6)

    def interrupt(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(building, "commit", interrupt)
    path = tmp_path / "build.json"
    with pytest.raises(KeyboardInterrupt):
        precache.build(photos, tmp_path / "store", RECIPE, report=path, **SMALL)
    told = json.loads(path.read_text())
    assert told["error"].startswith("interrupted; run the same command again")
    assert told["images"] == 6


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("build.pdf", "ends in .html or .json"),
        ("build", "ends in .html or .json"),
        ("none/build.html", "there is no folder to write it to"),
        ("folder.json", "there is no folder to write it to"),
        ("store/build.json", "inside of the store"),
    ],
)
def test_reports_that_cannot_be_written_are_refused_first(
    tmp_path: Path, name: str, text: str
) -> None:
    photos = write_jpegs(tmp_path / "in", 2)
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(UsageError, match=text) as caught:
        precache.build(photos, tmp_path / "store", report=tmp_path / name, **SMALL)
    assert str(tmp_path / name) in str(caught.value)
    assert not (tmp_path / "store").exists()


def test_a_page_needs_its_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    monkeypatch.delitem(sys.modules, "precache.html.pages")
    check_reports(["build.json"], "store")
    with pytest.raises(UsageError, match=r"needs jinja2: pip install 'precache\[report\]'"):
        check_reports(["build.html"], "store")


def test_a_report_that_fails_in_the_end_hides_no_error_and_loses_no_build(tmp_path: Path) -> None:
    photos = write_jpegs(tmp_path / "in", 2)
    full = Path("/dev/full")  # opens, and takes no byte
    link = tmp_path / "build.json"
    link.symlink_to(full)
    with pytest.raises(StorageError, match=f"cannot write the report {link}: No space left"):
        precache.build(photos, tmp_path / "store", RECIPE, report=link, **SMALL)
    assert len(precache.open(tmp_path / "store").keys) == 2
    write(photos / "broken.jpg", b"none")
    with pytest.raises(BuildError, match="1 of 3 samples failed"):
        precache.build(photos, tmp_path / "store", RECIPE, report=link, on_error="raise", **SMALL)


# --- the page -----------------------------------------------------------------------------------


def figures(shards: int, nodes: int, **changes: Any) -> dict[str, Any]:
    """Of a build that never was: so many shards on so many nodes, three at a time on each."""
    receipts = []
    for shard in range(shards):
        node, turn = shard % nodes, shard // nodes
        seconds = {"fetch": 0.1, "ops": 2.0 + node / 10, "encode": 0.5, "put": 0.1}
        receipt = Receipt(
            shard=shard, objects={"image": ShardObject(10**7, 1, 2 * 10**7, "")}, holes={},
            content=[""] * 100, sums={}, seconds=seconds,
            cpu_seconds=2.5, host=f"10.0.0.{node}", began=1.7e9 + turn // 3 * 3, fetched=10**7,
        )  # fmt: skip
        receipts.append(receipt)
    monitor: Any = SimpleNamespace(
        request=SimpleNamespace(source="photos", store="photos.store", address="auto"),
        began=1.7e9, target=None, new_receipts=receipts, receipts={}, planned=shards,
    )  # fmt: skip
    return {**summary(monitor), **changes}


def test_hostile_text_is_escaped_wherever_it_stands() -> None:
    told = figures(3, 2)
    told |= {"source": HOSTILE, "store": HOSTILE, "error": HOSTILE, "address": HOSTILE}
    odd = {"key": "caf\udce9\x00\x1b.jpg", "reason": "$x^2$ \\frac{"}  # a key that is no text
    told["failures"] = [{"key": HOSTILE, "reason": HOSTILE}, odd]
    for each in (*told["nodes"], *told["timeline"]):
        each["node"] = HOSTILE + each["node"]
    read = stands_alone(page(told))
    assert read.text.count(HOSTILE) >= 9
    assert "caf" in read.text


def test_nodes_have_the_sums_of_their_own_shards() -> None:
    told = figures(31, 3)
    assert [node["shards"] for node in told["nodes"]] == [11, 10, 10]
    assert told["nodes"][1]["wall_seconds"] == pytest.approx(10 * (0.1 + 2.1 + 0.5 + 0.1))
    totals = {"images": told["images"], "cpu_seconds": told["cpu_seconds"], **told["bytes"]}
    for name in ("images", "fetched", "stored", "cpu_seconds"):
        assert sum(node[name] for node in told["nodes"]) == pytest.approx(totals[name])


def test_a_page_of_very_many_shards_and_nodes_stays_small() -> None:
    html = page(figures(3_000, 30))
    assert all(f"<td>10.0.0.{node}</td>" in html for node in range(30))
    assert len(html) < 500_000
    assert "3,000 of 3,000" in stands_alone(html).text
    assert "and 300 more" in stands_alone(page(figures(1000, 500))).text


# --- in a browser -------------------------------------------------------------------------------


def test_a_browser_shows_the_page_on_phones_and_in_the_dark(tab: Tab, tmp_path: Path) -> None:
    told = figures(60, 3, source="s" * 300, error="e" * 300)
    told["failures"] = [{"key": "k" * 300, "reason": "r" * 300}]
    save(page(told), tmp_path / "build.html")
    tab.fine(tmp_path / "build.html")
