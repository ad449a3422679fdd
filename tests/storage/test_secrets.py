"""Secrets of URLs and storage options: in no message, report, log or list of processes."""

import contextlib
import functools
import itertools
import pickle
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

import precache
from precache.storage.backends import reason_of
from precache.storage.environment import with_environment
from precache.storage.open import open_folder
from precache_workers.sources.kinds import open_source
from tests.support.building import cut, encoded, write_jpegs
from tests.support.command_line import Run
from tests.support.containers import SOURCES
from tests.support.servers import FileHandler, S3Server, answering, web_server

SECRET = "Zq7secret/Key+qZ"
PLAIN = "Zq7secretKeyqZ"
_KEY = "a-secret=that/nobody+may=see=="
RECIPE = ("--resize", 16, "--crop", 16, "--address", "serial")

Said = Callable[..., str]


@pytest.fixture
def said(run: Run) -> Said:
    """All that a command prints that does not succeed."""

    def said(*arguments: object) -> str:
        ran = run(*arguments)
        assert ran.status != 0
        return ran.out + ran.err

    return said


def assert_no_secret(text: str) -> None:
    assert "Zq7" not in text
    assert "qZ" not in text


COMMANDS: list[tuple[object, ...]] = [
    *((command, "{}") for command in ("info", "ls", "gc", "view", "doctor", "verify", "use")),
    *((command, "{}@3f2a") for command in ("verify", "use")),
    ("{}",),
    ("info", "{}", "--json"),
    ("info", "/nowhere", "{}"),
    ("diff", "{}", "/nowhere"),
    ("pull", "{}", "/nowhere/at/all"),
    ("push", "/nowhere", "{}"),
    ("refresh", "{}", "--address", "serial"),
    ("build", "{}", "/nowhere/at/all", *RECIPE),
    ("build", "/nowhere", "{}", *RECIPE),
    ("build", "/nowhere", "/nowhere/at/all", *RECIPE, "--classes", "{}"),
    ("build", "/nowhere", "/nowhere/at/all", *RECIPE, "--labels", "{}"),
    ("plan", "/nowhere", "{}", *RECIPE),
    ("submit", "{}", "s3://bucket/store", "--address", "http://127.0.0.1:9"),
]


@pytest.mark.parametrize("arguments", COMMANDS, ids=lambda each: " ".join(map(str, each[:2])))
def test_no_command_quotes_the_credentials_of_a_url(
    said: Said, tmp_path: Path, arguments: tuple[object, ...]
) -> None:
    for url in (f"s3://KEY:{SECRET}@bucket/store", f"gs://KEY:{PLAIN}@bucket/store"):
        printed = said(*(str(each).format(url) for each in arguments))
        assert_no_secret(printed)
        assert "precache" in printed


@pytest.mark.parametrize(
    "arguments",
    [
        ("info", "store", "--storage-options", SECRET),
        ("info", "store", "--storage-options", f"={SECRET}"),
        ("info", "store", "--storage-options", f"-{SECRET}"),
        ("info", "store", "--storage-options-env", SECRET),
        ("info", "store", "--storage-options-env", f"secret={SECRET}"),
        ("info", "store", f"--storage-optoin=secret={SECRET}"),
        ("info", "store", f"--storage-optio=secret={SECRET}"),
        ("info", "store", "--storage-optoin", f"secret={SECRET}"),
        ("info", "store", "--storage-options", "connection_string=a", SECRET),
        ("--storage-options", f"secret={SECRET}", "info", "store"),
        ("simulate", "--storage-options", f"secret={SECRET}"),
        ("submit", "a", "b", "--storage-options", SECRET, "--address", "http://127.0.0.1:9"),
    ],
)
def test_an_option_that_is_mistyped_is_not_quoted(
    said: Said, arguments: tuple[object, ...]
) -> None:
    printed = said(*arguments)
    assert "error: " in printed
    assert_no_secret(printed)
    assert "unexpected argument: again" in said("info", "store", "again")


REASONS: list[tuple[str, str, str, dict[str, Any]]] = [
    (PLAIN, "…", f"https://user:{PLAIN}@host/a", {}),
    (f"user:{PLAIN}/", "…", f"https://user:{PLAIN}%2F@host/a", {}),
    (f"{PLAIN}==", "…", f"https://host/a?sv=2024&sig={PLAIN}%3D%3D&x=1", {}),
    (f"sig={PLAIN}%3D%3D", "sig=…", f"https://host/a?sv=2024&sig={PLAIN}%3D%3D&x=1", {}),
    (f"KEY:{SECRET}@bucket", "…@bucket", f"s3://KEY:{SECRET}@bucket/a", {}),
    (PLAIN, "…", f"az://photos/a?sv=2024&sig={PLAIN}", {}),
    (_KEY, "…", "", {"key": _KEY}),
    (_KEY, "…", "", {"client_kwargs": {"password": _KEY}}),
    (_KEY, "…", "", {"connection_string": f"A=x;AccountKey={_KEY};BlobEndpoint=http://host/x"}),
    (_KEY, "…", "", {"connection_string": f"SharedAccessSignature=sv=2024&sig={_KEY}&sp=rl;X=y"}),
    (_KEY, "…", "", {"sas_token": f"?sv=2024-11-04&sig={_KEY}"}),
]
"""What an error quotes, what is said instead, and the URL and storage options of the request."""


@pytest.mark.parametrize(("quoted", "said", "url", "options"), REASONS)
def test_a_reason_holds_nothing_secret_of_urls_and_options(
    quoted: str, said: str, url: str, options: dict[str, Any]
) -> None:
    error = ValueError(f"http://host/x refuses '{quoted}'")
    assert reason_of(error, options, url) == f"http://host/x refuses '{said}'"


def test_a_signed_url_is_read_by_the_name_of_its_path_and_its_signature_is_kept_nowhere(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (files := tmp_path / "files").mkdir()
    members = [(f"cat/{number}.jpg", encoded(cut(number))) for number in range(4)]
    containers = [
        Path(SOURCES[kind](files, members)).name for kind in ("zip", "tar", "arrow", "csv")
    ]
    stores, texts = tmp_path / "stores", list[str]()
    recipe = precache.Recipe.image(resize=16, crop=16)
    for name, number in itertools.product(containers, range(2)):
        query = f"?se=2027&sig={PLAIN}{number}%2F{{,}}"  # each time by another signature
        with web_server(files, query=query) as server:
            url = f"http://someone:{PLAIN}@{server.removeprefix('http://')}/{name}{query}"
            result = precache.build(url, stores / name, recipe, address="serial")
            with pytest.raises(precache.PrecacheError) as raised:
                precache.build(url.replace("%2F", "%2B"), stores / name, recipe, address="serial")
            rows = open_source(url).list(lambda count: None).table
            texts += [*rows.keys, str(rows.locations), str(result), repr(result), str(raised.value)]
            assert (result.samples, result.failed) == (4, 0)
    kept = [path.read_bytes() for path in stores.rglob("*") if path.is_file()]
    assert_no_secret(" ".join([*texts, *capfd.readouterr(), *map(str, kept)]))


def command_lines() -> Iterator[str]:
    """Of every process of this machine."""
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            yield file.read_bytes().decode(errors="replace")


class Indiscreet(FileHandler):
    """Lists and sends files to whoever knows the password; `refusal` repeats all that it got."""

    protocol_version = "HTTP/1.0"  # whose connections end with an answer
    refusal = 0
    seen: list[str]

    def do_GET(self) -> None:
        self.seen += [line for line in command_lines() if PLAIN in line]
        if not self.refusal and self.headers.get("Authorization"):
            super().do_GET()
            return
        told = f"{self.path} with {dict(self.headers)} and {PLAIN}".replace("\r\n", " ")
        self.send_response(self.refusal or 401, told)
        self.send_header("Retry-After", "0")
        self.send_header("Content-Length", str(len(told)))
        self.end_headers()
        self.wfile.write(told.encode())

    do_HEAD = do_GET


@contextlib.contextmanager
def indiscreet(folder: Path, refusal: int = 0) -> Iterator[tuple[str, list[str]]]:
    """Such a server's URL, with user and password, and the command lines it saw the latter in."""
    kind = type("Handler", (Indiscreet,), {"refusal": refusal, "seen": (seen := [])})
    with answering(functools.partial(kind, directory=str(folder))) as url:
        yield url.replace("://", f"://user:{PLAIN}@"), seen


@pytest.mark.parametrize("refusal", [403, 500, 503])
def test_what_a_server_repeats_is_not_said(
    said: Said, tmp_path: Path, caplog: pytest.LogCaptureFixture, refusal: int
) -> None:
    report = tmp_path / "report.json"
    with indiscreet(tmp_path, refusal) as (url, _):
        printed = said("build", f"{url}/in", tmp_path / "store", *RECIPE, "--report", report)
    assert_no_secret(printed + caplog.text)
    assert str(refusal) in printed
    if refusal != 403:
        assert "trying again" in caplog.text
    assert_no_secret(report.read_text())


BUILD = """
import os, sys, precache
source = f"http://user:{os.environ['PASSWORD']}@127.0.0.1:{sys.argv[1]}/in"
for build in (1, 2):
    precache.build(
        source, sys.argv[2], precache.Recipe.image(crop=16), max_failures=9,
        address=sys.argv[3], progress=True, shard_samples=2,
        report=[sys.argv[2] + ".html", sys.argv[2] + ".json"],
    )
print(precache.open(sys.argv[2]).attributes)
"""


@pytest.mark.parametrize("address", ["serial", pytest.param("local", marks=pytest.mark.heavy)])
def test_a_build_leaves_no_secret_behind(
    run_python: Callable[..., subprocess.CompletedProcess[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    address: str,
) -> None:
    """Neither in the store, nor in reports, nor in what all users see of a process."""
    write_jpegs(tmp_path / "in", 4)
    (tmp_path / "in/cat/broken.jpg").write_bytes(b"no photo")
    (tmp_path / "store").mkdir()
    monkeypatch.setenv("PASSWORD", PLAIN)
    with indiscreet(tmp_path) as (url, seen):
        ran = run_python(BUILD, urlsplit(url).port, tmp_path / "store", address)
    assert_no_secret(ran.stdout + ran.stderr)
    assert seen == []
    reports = [tmp_path / "store.html", tmp_path / "store.json"]
    files = [*reports, *(path for path in (tmp_path / "store").rglob("*") if path.is_file())]
    assert "zarr.json" in {path.name for path in files}
    for path in files:
        assert PLAIN.encode() not in path.read_bytes(), path


# --- options that name variables of the environment ---------------------------------------------

BY_NAME = {"key": "PHOTOS_KEY", "secret": "PHOTOS_SECRET"}


def split(s3: S3Server) -> tuple[dict[str, Any], dict[str, str]]:
    """Options of a server without secrets, and the variables that hold these."""
    options = s3.options()
    return options, {variable: options.pop(key) for key, variable in BY_NAME.items()}


def test_the_environment_is_read_where_the_storage_is_opened(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, variables = split(s3)
    folder = open_folder("s3://bucket/by-name", with_environment(plain, BY_NAME))
    sent = pickle.dumps(folder)
    for name, value in variables.items():
        assert value.encode() not in sent
        monkeypatch.setenv(name, value)
    folder.put("a", [b"1"])
    assert pickle.loads(sent).read("a") == b"1"
    digits = {**plain, "key": 12345678, "secret": 87654321}
    assert open_folder("s3://bucket/by-name", digits).read("a") == b"1"


def test_commands_take_variables_of_the_environment(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    source, store = write_jpegs(tmp_path / "in", 3), "s3://bucket/commands"
    plain, variables = split(s3)
    flags = [f"--storage-options=endpoint_url={plain['endpoint_url']}"]
    flags += ['--storage-options=client_kwargs={"region_name": "us-east-1"}']
    flags += [f"--storage-options-env={key}={variable}" for key, variable in BY_NAME.items()]
    with monkeypatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        for line in (["build", source, store, "--address", "serial"], ["info", store]):
            assert run(*line, *flags).status == 0, line
    for line in (["info", store], ["build", source, store]):
        monkeypatch.setenv("PHOTOS_KEY", "") if "info" in line else monkeypatch.delenv("PHOTOS_KEY")
        ran = run(*line, *flags)
        assert ran.status == 2
        assert "the environment variable PHOTOS_KEY of the storage option key is not" in ran.err
