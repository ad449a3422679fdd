"""Packages of jobs: what travels with a build, and what is refused before anything is sent."""

import json
from pathlib import Path
from typing import Any

import pytest

import precache
from precache.errors import UsageError
from precache.storage.environment import FromEnvironment
from precache_workers.jobs.job_package import JobPackage, pack
from precache_workers.planning.options import BuildOptions
from tests.cli.test_main import VALUES
from tests.support.building import write

RECIPE = precache.Recipe.image(resize=(20, 24), crop=16)

OTHERWISE: dict[str, Any] = {
    **VALUES,
    "labels": "/elsewhere/labels.csv",
    "classes": "s3://bucket/train.store",
    "report": ["/elsewhere/report.html", "/elsewhere/report.json"],
    "memory_per_task": 2_000_000_000,
    "max_sample_bytes": 2_000_000_000,
    "node_resources": {"spare": 1.5, "quick": 2},
    "progress": True,
    "retry_failed": True,
}
"""Options of `precache.build`, each with another value than its default."""
for _name in ("recompute", "storage_options"):  # the first contradicts retry_failed
    del OTHERWISE[_name]


def packed(
    source: str = "/in",
    store: str = "/out",
    recipe: precache.Recipe = RECIPE,
    code: Any = (),
    **options: Any,
) -> JobPackage:
    return pack(source, store, recipe, BuildOptions(**{"address": "auto", **options}), code)


def options_of(package: JobPackage) -> dict[str, Any]:
    return json.loads(package.document)["options"]


def recipe_of(package: JobPackage) -> precache.Recipe:
    return precache.Recipe.from_dict(json.loads(package.document)["recipe"])


def pack_code(*code: Path | str) -> JobPackage:
    return packed(code=code)


def test_every_option_of_a_build_travels() -> None:
    package = pack("/in", "/out", RECIPE, BuildOptions(**OTHERWISE))
    document = json.loads(package.document)
    assert (document["source"], document["store"]) == ("/in", "/out")
    assert document["options"] == OTHERWISE
    assert BuildOptions(**document["options"]) == BuildOptions(**OTHERWISE)
    assert options_of(packed(recompute=True)) == {"address": "auto", "recompute": True}


def test_storage_options_travel_without_their_secrets() -> None:
    plain = {
        "endpoint_url": "http://127.0.0.1:9000",
        "anon": False,
        "account_name": "0123",
        "client_kwargs": {"region_name": "us-east-1"},
        "token": "anon",
    }
    variables = {"secret": "PHOTOS_SECRET"}
    given = {"address": "auto", "storage_options": plain, "storage_options_env": variables}
    package = pack("/in", "/out", RECIPE, BuildOptions(**given))
    assert options_of(package) == given
    read = BuildOptions(**options_of(package)).storage_options
    assert read == {**plain, "secret": FromEnvironment("PHOTOS_SECRET")}


@pytest.mark.parametrize(
    "options",
    [
        {"key": "pass-word"},
        {"secret": "pass-word"},
        {"token": "pass-word"},
        {"token": {"private_key": "pass-word"}},
        {"password": "pass-word"},
        {"account_key": "pass-word"},
        {"sas_token": "pass-word"},
        {"connection_string": "AccountKey=pass-word"},
        {"credential": "pass-word"},
        {"unheard_of": "pass-word"},
        {"endpoint_url": "http://someone:pass-word@host"},
        {"client_kwargs": {"aws_secret_access_key": "pass-word"}},
        {"client_kwargs": ["pass-word"]},
        {"client_kwargs": {"endpoint_url": "http://someone:pass-word@host:9000"}},
        {"endpoint_url": "someone:pass-word@host:9000"},
        {"account_host": "account.blob.core.windows.net?sig=pass-word"},
        {"account_name": "AccountName=a;AccountKey=pass-word"},
    ],
)
def test_a_secret_in_the_clear_is_refused_with_the_way_out(options: dict[str, Any]) -> None:
    [name] = options
    advice = f"option '{name}' may hold a secret, .* --storage-options-env {name}=VARIABLE"
    with pytest.raises(UsageError, match=advice) as caught:
        precache.submit("/in", "/out", RECIPE, storage_options=options)
    assert "pass-word" not in str(caught.value)


@pytest.mark.parametrize("value", ["pass-word", "", "pass/word", " "])
def test_a_secret_in_place_of_the_name_of_a_variable_is_refused(value: str) -> None:
    names = {"secret": value}
    for ask in (
        lambda: precache.submit("/in", "/out", RECIPE, storage_options_env=names),
        lambda: precache.build("/in", "/out", RECIPE, storage_options_env=names),
    ):
        with pytest.raises(UsageError, match="names a variable, such as") as caught:
            ask()
        assert "pass" not in str(caught.value)


def test_the_recipe_travels_with_its_fields_in_their_order() -> None:
    function = {"op": "function", "function": "a.b:c", "params": {"x": ["ü 'q'", 1]}}
    crop = {"op": "random_resized_crop", "size": 8}
    image = {"ops": [{"op": "decode", "scaled": True}, crop, function], "codec": {"name": "zstd"}}
    fields = {"image": {**image, "codec": {"name": "zstd", "level": 7}}, "depth": image}
    for recipe in (RECIPE, precache.Recipe.from_dict({"fields": fields, "seed": 3})):
        assert recipe_of(packed(recipe=recipe)) == recipe
        assert list(recipe_of(packed(recipe=recipe)).fields) == list(recipe.fields)


def test_a_recipe_too_large_for_a_command_line_is_refused() -> None:
    op = {"op": "function", "function": "a:b", "params": {"text": "x" * 100_000}}
    recipe = precache.Recipe.from_dict({"fields": {"image": {"ops": [{"op": "decode"}, op]}}})
    with pytest.raises(UsageError, match=r"the recipe takes 100 KB as text, too much"):
        packed(recipe=recipe)


def test_paths_are_made_absolute_and_urls_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    package = packed("in", "out.store", classes="train.store", report="a.html")
    document = json.loads(package.document)
    assert document["options"]["report"] == [f"{tmp_path}/a.html"]
    assert document["options"]["classes"] == f"{tmp_path}/train.store"
    assert document["source"] == f"{tmp_path}/in"
    assert document["store"] == package.store == f"{tmp_path}/out.store"
    document = json.loads(packed("python:data:make", "gs://bucket/x").document)
    assert (document["source"], document["store"]) == ("python:data:make", "gs://bucket/x")


@pytest.mark.parametrize(
    "url", ["someone:{0}@host/photos", "{0}@host/photos", "host/photos?sig={0}"]
)
def test_a_url_with_credentials_is_refused_without_them(url: str) -> None:
    url = f"https://{url.format('pass-word')}"
    for source, store in ((url, "/out"), ("/in", url)):
        with pytest.raises(UsageError, match="https://host/photos carries credentials") as caught:
            packed(source, store)
        assert "pass-word" not in str(caught.value)


def test_files_that_options_name_travel(tmp_path: Path) -> None:
    labels = write(tmp_path / "a/list.csv", b"x,1\n")
    classes = write(tmp_path / "b/list.csv", b"cat\n")
    package = packed(labels=labels, classes=str(classes))
    options = options_of(package)
    package.unpack(tmp_path / "there")
    assert (tmp_path / "there" / options["labels"]).read_bytes() == b"x,1\n"
    assert (tmp_path / "there" / options["classes"]).read_bytes() == b"cat\n"


# --- code ---------------------------------------------------------------------------------------


def test_modules_packages_and_contents_of_folders_travel(tmp_path: Path) -> None:
    write(tmp_path / "one.py", b"1")
    write(tmp_path / "pack/__init__.py", b"")
    write(tmp_path / "pack/deep/more.py", b"2")
    write(tmp_path / "src/two.py", b"3")
    write(tmp_path / "src/names/three.py", b"4")
    made = pack_code(tmp_path / "one.py", tmp_path / "pack", tmp_path / "src")
    inner = ["pack/__init__.py", "pack/deep/more.py"]
    assert sorted(made.files) == ["names/three.py", "one.py", *inner, "two.py"]
    # Names below a package, and folders without code, are free.
    write(tmp_path / "pack/json.py", b"")
    write(tmp_path / "src/numpy/readme.txt", b"")
    made = pack_code(tmp_path / "pack", tmp_path / "src")
    assert {"pack/json.py", "numpy/readme.txt"} <= {*made.files}


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


def test_what_is_no_code_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "notes.txt", b"")
    for name in ("nothing", "notes.txt"):
        match = f"--code .*{name} is no Python module, package or folder"
        with pytest.raises(UsageError, match=match):
            pack_code(tmp_path / name)


def test_one_name_from_two_places_is_refused(tmp_path: Path) -> None:
    for folder in "ab":
        write(tmp_path / folder / "mine.py", b"")
    with pytest.raises(UsageError, match=r"--code gives mine\.py twice: .*/a/mine\.py and .*/b/"):
        pack_code(tmp_path / "a", tmp_path / "b")
    assert len(pack_code(tmp_path / "a", tmp_path / "a/mine.py").files) == 1


def test_code_of_this_folder_that_does_not_travel_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "mine.py", b"")
    ops = [{"op": "decode"}, {"op": "function", "function": "mine:f"}]
    recipe = precache.Recipe.from_dict({"fields": {"image": {"ops": ops}}})
    with pytest.raises(UsageError, match=r"mine:f is here and not on the cluster; send it: --code"):
        packed(recipe=recipe)
    with pytest.raises(UsageError, match=r"mine:data is here"):
        packed("python:mine:data")
    packed("python:mine:data", recipe=recipe, code=["mine.py"])
    packed("python:installed.there:data")


def test_the_digest_tells_builds_apart(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.py", b"1")
    first = pack_code(path).digest()
    assert first == pack_code(path).digest()
    assert first != pack_code().digest()
    assert first != packed(code=[path], shard_samples=2).digest()
    write(path, b"2")
    assert first != pack_code(path).digest()
    assert len(first) == 12
