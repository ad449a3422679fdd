"""Text as people may see it: no control characters, no secrets of URLs."""

import pickle
import re
import string

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from precache import errors
from precache.errors import UsageError
from precache.messages import indented, printable, shown, without_secrets
from precache.storage.open import open_folder
from precache.units import ago, duration, in_ms, number, parse_age, size

CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")

ERRORS = [
    each
    for each in vars(errors).values()
    if isinstance(each, type) and issubclass(each, errors.PrecacheError)
]

ANY = st.text(st.characters())
HOSTILE = st.text(st.sampled_from("a\x1b[31m\n\r\t\x7f\x9b\u2028\u202e\u2066\udcff{}é日😀"))


@given(ANY | HOSTILE)
@example("\x1b]0;title\x07\x9b31m\nhole: forged\u202egpj.exe\udcff")
def test_nothing_that_a_terminal_obeys_is_left(text: str) -> None:
    found = printable(text)
    assert not CONTROLS.search(found)
    found.encode()  # of what is no character nothing is left either
    assert printable(found) == found
    kept = "".join(part for part in CONTROLS.split(text))
    assert all(character in found for character in kept)


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("é/日本/😀 👩‍👩‍👧 שלום.jpg", "é/日本/😀 👩‍👩‍👧 שלום.jpg"),
        ("a\x1b[31m\n\t", r"a\x1b[31m\n\t"),
        ("\x9b\x7f\u2028\u202e\u2069", r"\x9b\x7f\u2028\u202e\u2069"),
        ("\udcff", r"\udcff"),
        ("[red]:smile:[/red] $x$", "[red]:smile:[/red] $x$"),
    ],
)
def test_control_characters_are_shown_as_python_writes_them(text: str, seen: str) -> None:
    assert printable(text) == seen


@given(HOSTILE)
def test_of_several_lines_only_the_first_begins_a_line(text: str) -> None:
    lines = indented(text).split("\n")
    assert all(line.startswith("    ") for line in lines[1:])
    assert not any(CONTROLS.search(line) for line in lines)


@given(kind=st.sampled_from(ERRORS), text=ANY | HOSTILE)
def test_errors_travel_between_processes_without_what_a_terminal_obeys(
    kind: type[errors.PrecacheError], text: str
) -> None:
    error = kind(text)
    assert type(pickle.loads(pickle.dumps(error))) is kind
    assert not CONTROLS.search(str(error))
    assert str(pickle.loads(pickle.dumps(error))) == str(kind(str(error))) == str(error)


# --- secrets ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("uri", "text"),
    [
        ("s3://AKIA:abc/def+ghi@bucket/photos", "s3://bucket/photos"),
        ("s3://AKIA:12/34@bucket/photos", "s3://bucket/photos"),
        ("s3://AKIA:a?b#c@bucket/photos@3f2a", "s3://3f2a"),
        ("https://user:pa/ss@host/photos", "https://host/photos"),
        ("https://user:p@ss@host:8000/a/b?sig=zzz#part", "https://host:8000/a/b"),
        ("https://user:pw@[mistyped/a", "https://[mistyped/a"),
        ("az://photos?sv=2024&sig=zzz", "az://photos"),
        ("https://token@host/photos", "https://host/photos"),
        ("https://host/photos?token", "https://host/photos"),
        ("s3://bucket/photos?versionId=a/b", "s3://bucket/photos"),
        # what looks like a secret, and is none
        ("s3://bucket/store@3f2a", "s3://bucket/store@3f2a"),
        ("s3://bucket@3f2a", "s3://bucket@3f2a"),
        ("photos/in", "photos/in"),
        ("python:module:factory", "python:module:factory"),
        ("s3://bucket/a#1.jpg", "s3://bucket/a#1.jpg"),
        ("s3://bucket/year=1/shard-??.tar", "s3://bucket/year=1/shard-??.tar"),
        (
            "s3://arn:aws:s3:eu-west-1:1234:accesspoint/mine/store@3f2a",
            "s3://arn:aws:s3:eu-west-1:1234:accesspoint/mine/store@3f2a",
        ),
        ("abfs://photos@account.dfs.core.windows.net/a", "abfs://photos@account.dfs.core.windows.net/a"),
        ("http://host:9000/store@3f2a", "http://host:9000/store@3f2a"),
        ("http://[::1]:9000/store@3f2a", "http://[::1]:9000/store@3f2a"),
        ("ray://head:10001", "ray://head:10001"),
    ],
)  # fmt: skip
def test_a_url_is_shown_without_its_secrets(uri: str, text: str) -> None:
    assert shown(uri) == text
    assert without_secrets(f"cannot read '{uri}': no such bucket; see {uri}.") == (
        f"cannot read '{text}': no such bucket; see {text}."
    )


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("got {'Authorization': 'Basic QWxhZGRpbjpvcGVu', 'Host': 'a'}",
         "got {'Authorization': 'Basic …', 'Host': 'a'}"),
        ("authorization: bearer ya29.A0 is refused", "authorization: bearer …"),
    ],
)  # fmt: skip
def test_headers_that_a_server_repeats_are_shown_without_secrets(text: str, told: str) -> None:
    assert without_secrets(text) == told


def test_text_without_secrets_stays_as_it_is() -> None:
    text = "give a path, gs://, s3:// or az:// (http://head:8265); 3/4 of a://b@c: sig=0.25"
    assert without_secrets(text) == text


SECRET = st.text(string.ascii_letters + string.digits + "/+=@:%~!$*-_", min_size=20)


@given(
    secret=SECRET.map(lambda text: f"Zq{text}qZ"),
    form=st.sampled_from(
        [
            "s3://KEY:{}@bucket/photos",
            "gs://KEY:{}@bucket",
            "az://photos?sv=2024&sig={}",
            "https://host/a?X-Amz-Signature={}&x=1",
            "https://host/a#{}",
            "SharedAccessSignature sr=b&sig={}&se=1 is refused",
        ]
    ),
)
def test_no_error_holds_what_a_url_holds_of_secrets(secret: str, form: str) -> None:
    text = form.format(secret)
    assert secret not in str(UsageError(f"cannot open '{text}' ({text}), as {text}"))


@pytest.mark.parametrize("protocol", ["s3", "s3a", "gs", "gcs", "az", "abfs"])
def test_a_url_of_an_object_store_has_no_place_for_credentials(protocol: str) -> None:
    with pytest.raises(UsageError, match="give them as storage options") as caught:
        open_folder(f"{protocol}://KEY:pass/word@bucket/photos")
    assert "word" not in str(caught.value)
    assert f"{protocol}://bucket/photos" in str(caught.value)


def test_a_folder_far_away_is_shown_without_secrets_however_it_is_written() -> None:
    folder = open_folder("https://user:pass-word@host/photos?sig=pass-word", {"key": "pass-word"})
    for text in (str(folder), repr(folder), folder.path("a.jpg"), repr(folder.folder("x"))):
        assert "pass-word" not in text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"), (0.0123, "0.012 s"), (4.2, "4.2 s"), (89.4, "89 s"), (90, "1.5 min"),
        (600, "10 min"), (9000, "2.5 h"), (500_000, "5.8 days"),
        (1e-6, "0.000001 s"), (250 * 86400, "250 days"),
    ],
)  # fmt: skip
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
    assert ago(seconds) == ("just now" if seconds < 2 else f"{text} ago")


def test_no_quantity_has_an_exponent() -> None:
    assert [size(5e15), size(999.7e9)] == ["5,000 TB", "1 TB"]
    assert [in_ms(1e-7), in_ms(1e-9)] == ["0.0001 ms", "0.000001 ms"]
    assert [number(1e-6), number(999.7), number(1234567)] == ["0.000001", "1,000", "1,234,567"]


def test_ages_have_a_unit() -> None:
    ages = {"30s": 30, "5m": 300, "2H": 7200, "3d": 259200, "1w": 604800, "1.5h": 5400, "0": 0}
    assert {text: parse_age(text) for text in ages} == ages
    for text in ("7", "d", "-1d", "1y", "1d 2h", ""):
        with pytest.raises(UsageError, match="is not an age; give a number with a unit"):
            parse_age(text)
