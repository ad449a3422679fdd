"""What travels with a build to a cluster, and what is refused before anything is sent."""

from __future__ import annotations

import argparse
import inspect
from pathlib import Path
from typing import Any

import pytest

import precache
from precache.building.api import build
from precache.cli.build_options import (
    add_build_options,
    build_keywords,
    read_recipe,
    running_keywords,
)
from precache.cli.refresh import add_refresh
from precache.errors import UsageError
from precache.maintenance.gc import parse_age
from precache_workers.jobs import job_package
from precache_workers.jobs.job_package import JobPackage, pack, pack_refresh
from tests.support.building import write

RECIPE = precache.Recipe.image(resize=(20, 24), crop=16)

OTHERWISE: dict[str, Any] = {
    "labels": "/elsewhere/labels.csv",
    "classes": "s3://bucket/train.store",
    "accept_unmatched": True,
    "follow_links": True,
    "keep_order": True,
    "shard_samples": 12,
    "on_error": "raise",
    "max_failures": 0,
    "accept_missing": True,
    "compact": True,
    "recompute": True,
    "retry_failed": True,
    "check_space": False,
    "cpus": 3,
    "cpus_per_task": 0.5,
    "memory_per_task": "2GB",
    "node_resources": {"spare": 1.5, "quick": 2},
    "node_labels": {"tier": "spot", "zone": "a=b"},
    "nice": 3,
    "progress": False,
    "report": ["/elsewhere/report.html", "/elsewhere/report.json"],
    "max_sample_bytes": "2GB",
    "sample_timeout": 99.5,
}
"""Every option of `precache.build`, each with another value than its default."""


def parsed(arguments: tuple[str, ...]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_build_options(parser, "local", "")
    return parser.parse_args(list(arguments[1:]))


def pack_code(*code: Path | str) -> JobPackage:
    return pack("/in", "/out", RECIPE, {}, code)


def test_every_option_of_a_build_travels() -> None:
    known = inspect.signature(build).parameters.keys()
    apart = {"source", "store", "recipe", "address", "storage_options"}
    apart.add("run_functions")  # asked for here: the recipe travels as the user's own
    assert known - apart == set(OTHERWISE)
    options = parsed(pack("/in", "/out", RECIPE, OTHERWISE).arguments)
    assert (options.source, options.store, options.address) == ("/in", "/out", "auto")
    keywords = build_keywords(options)
    assert {name: keywords[name] for name in OTHERWISE} == OTHERWISE
    assert keywords["storage_options"] == {}


def test_every_option_of_a_refresh_travels() -> None:
    rows = {"labels", "classes", "accept_unmatched", "keep_order", "shard_samples", "compact"}
    rows |= {"recompute", "retry_failed"}
    given = {n: each for n, each in OTHERWISE.items() if n not in rows}
    more = {"times": 3, "every": "60.000000s", "run_functions": True}
    sent = pack_refresh("/in", "/out", None, {**given, **more})
    parser = argparse.ArgumentParser()
    add_refresh(parser.add_subparsers())
    options = parser.parse_args(sent.arguments)
    assert (options.store, options.source, options.address) == ("/out", "/in", "auto")
    assert (options.times, parse_age(options.every), options.run_functions) == (3, 60, True)
    keywords = running_keywords(options)
    assert {name: keywords[name] for name in given} == given
    alone = pack_refresh(None, "/out", None, {}).arguments
    assert alone == ("refresh", "/out", "--address=auto", "--json")


@pytest.mark.parametrize(
    "recipe",
    [
        RECIPE,
        precache.Recipe.from_dict(
            {
                "fields": {
                    "image": {
                        "ops": [
                            {"op": "decode", "scaled": True},
                            {"op": "random_resized_crop", "size": 8},
                            {"op": "function", "function": "a.b:c", "params": {"x": ["ü 'q'", 1]}},
                        ],
                        "codec": {"name": "zstd", "level": 7},
                    }
                },
                "seed": 3,
            }
        ),
    ],
)
def test_the_recipe_travels_as_text(recipe: precache.Recipe) -> None:
    options = parsed(pack("/in", "/out", recipe, {}).arguments)
    assert read_recipe(options) == recipe


def test_fields_keep_their_order() -> None:
    image = {"ops": [{"op": "decode"}]}
    recipe = precache.Recipe.from_dict({"fields": {"image": image, "depth": image}})
    options = parsed(pack("/in", "/out", recipe, {}).arguments)
    assert list(read_recipe(options).fields) == ["image", "depth"]


def test_a_recipe_too_large_for_a_command_line_is_refused() -> None:
    op = {"op": "function", "function": "a:b", "params": {"text": "x" * 100_000}}
    recipe = precache.Recipe.from_dict({"fields": {"image": {"ops": [{"op": "decode"}, op]}}})
    with pytest.raises(UsageError, match=r"the recipe takes 100 KB as text, too much"):
        pack("/in", "/out", recipe, {})


def test_paths_are_made_absolute_and_urls_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made = pack("in", "out.store", RECIPE, {"classes": "train.store", "report": "a.html"})
    assert f"--report={tmp_path}/a.html" in made.arguments
    assert made.arguments[1:3] == (f"{tmp_path}/in", f"{tmp_path}/out.store")
    assert made.store == f"{tmp_path}/out.store"
    assert f"--classes={tmp_path}/train.store" in made.arguments
    made = pack("python:data:make", "gs://bucket/x", RECIPE, {})
    assert made.arguments[1:3] == ("python:data:make", "gs://bucket/x")


@pytest.mark.parametrize(
    "url",
    [
        "https://someone:pass-word@host/photos",
        "https://pass-word@host/photos",
        "https://host/photos?sig=pass-word",
    ],
)
def test_a_url_with_credentials_is_refused_without_them(url: str) -> None:
    for source, store in ((url, "/out"), ("/in", url)):
        with pytest.raises(UsageError, match="https://host/photos carries credentials") as caught:
            pack(source, store, RECIPE, {})
        assert "pass-word" not in str(caught.value)


def test_files_that_options_name_travel(tmp_path: Path) -> None:
    labels = write(tmp_path / "a/list.csv", b"x,1\n")
    classes = write(tmp_path / "b/list.csv", b"cat\n")
    made = pack("/in", "/out", RECIPE, {"labels": labels, "classes": str(classes)})
    options = parsed(made.arguments)
    made.unpack(tmp_path / "there")
    assert (tmp_path / "there" / options.labels).read_bytes() == b"x,1\n"
    assert (tmp_path / "there" / options.classes).read_bytes() == b"cat\n"


# --- code ---------------------------------------------------------------------------------------


def test_modules_packages_and_contents_of_folders_travel(tmp_path: Path) -> None:
    write(tmp_path / "one.py", b"1")
    write(tmp_path / "pack/__init__.py", b"")
    write(tmp_path / "pack/deep/more.py", b"2")
    write(tmp_path / "src/two.py", b"3")
    write(tmp_path / "src/names/three.py", b"4")
    made = pack_code(tmp_path / "one.py", tmp_path / "pack", tmp_path / "src")
    assert sorted(made.files) == [
        "names/three.py",
        "one.py",
        "pack/__init__.py",
        "pack/deep/more.py",
        "two.py",
    ]


def test_junk_and_data_stay_here(tmp_path: Path) -> None:
    write(tmp_path / "src/mine.py", b"")
    for name in (
        ".git/config",
        ".hidden.py",
        "__pycache__/mine.cpython-311.pyc",
        "old.pyc",
        "mine.egg-info/PKG-INFO",
        "env/pyvenv.cfg",
        "env/lib/huge.py",
        "photos.store/commits/000001.json",
        "photos.store/3f2a/image/c/0",
        "other/zarr.json",
        "node_modules/x.js",
    ):
        write(tmp_path / "src" / name, b"x")
    (tmp_path / "src/again").symlink_to(tmp_path / "src")
    assert list(pack_code(tmp_path / "src").files) == ["mine.py"]


@pytest.mark.parametrize(
    "name",
    ["precache", "precache_workers", "json", "random", "numpy", "torch", "ray", "PIL", "zarr"],
)
@pytest.mark.parametrize("form", ["{}.py", "{}/__init__.py"])
def test_a_module_in_place_of_one_that_is_needed_is_refused(
    tmp_path: Path, name: str, form: str
) -> None:
    path = write(tmp_path / "src" / form.format(name), b"")
    with pytest.raises(UsageError, match=f"{path} would be imported in place of .*'{name}'"):
        pack_code(tmp_path / "src")


def test_the_package_itself_is_refused_too(tmp_path: Path) -> None:
    write(tmp_path / "precache_workers/__init__.py", b"")
    with pytest.raises(UsageError, match="in place of the module 'precache_workers'"):
        pack_code(tmp_path / "precache_workers")


def test_names_below_a_package_and_folders_without_code_are_free(tmp_path: Path) -> None:
    write(tmp_path / "mine/__init__.py", b"")
    write(tmp_path / "mine/json.py", b"")
    write(tmp_path / "src/numpy/readme.txt", b"")
    made = pack_code(tmp_path / "mine", tmp_path / "src")
    assert sorted(made.files) == ["mine/__init__.py", "mine/json.py", "numpy/readme.txt"]


@pytest.mark.parametrize("name", ["nothing", "notes.txt"])
def test_what_is_no_code_is_refused(tmp_path: Path, name: str) -> None:
    write(tmp_path / "notes.txt", b"")
    with pytest.raises(UsageError, match=f"--code .*{name} is no Python module, package or folder"):
        pack_code(tmp_path / name)


def test_one_name_from_two_places_is_refused(tmp_path: Path) -> None:
    for folder in "ab":
        write(tmp_path / folder / "mine.py", b"")
    with pytest.raises(UsageError, match=r"--code gives mine\.py twice: .*/a/mine\.py and .*/b/"):
        pack_code(tmp_path / "a", tmp_path / "b")
    assert len(pack_code(tmp_path / "a", tmp_path / "a/mine.py").files) == 1


def test_more_than_the_job_server_takes_is_refused_with_the_largest_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_package, "MOST_NBYTES", 1000)
    write(tmp_path / "mine.py", bytes(100))
    for number in range(4):
        write(tmp_path / f"photos/{number}.jpg", bytes(500))
    with pytest.raises(UsageError, match=r"takes 2\.1 KB, and Ray takes 1 KB: photos/0\.jpg with"):
        pack_code(tmp_path)


def test_code_of_this_folder_that_does_not_travel_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "mine.py", b"")
    ops = [{"op": "decode"}, {"op": "function", "function": "mine:f"}]
    recipe = precache.Recipe.from_dict({"fields": {"image": {"ops": ops}}})
    with pytest.raises(UsageError, match=r"mine:f is here and not on the cluster; send it: --code"):
        pack("/in", "/out", recipe, {})
    with pytest.raises(UsageError, match=r"mine:data is here"):
        pack("python:mine:data", "/out", RECIPE, {})
    pack("python:mine:data", "/out", recipe, {}, ["mine.py"])
    pack("python:installed.there:data", "/out", RECIPE, {})


def test_the_digest_tells_builds_apart(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.py", b"1")
    first = pack_code(path).digest()
    assert first == pack_code(path).digest()
    assert first != pack_code().digest()
    assert first != pack("/in", "/out", RECIPE, {"seed": 2}, [path]).digest()
    write(path, b"2")
    assert first != pack_code(path).digest()
    assert len(first) == 12
