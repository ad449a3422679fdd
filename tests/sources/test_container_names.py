"""Names of containers: files, folders, patterns and braces."""

from collections import Counter
from pathlib import Path

import pytest

from precache.errors import SourceError, UsageError
from precache.storage.base import LINK_AGAIN, LINK_OUT
from precache_workers.sources.base import SourceSpec
from precache_workers.sources.container_names import Containers, expand_braces


def tars_of(uri: str | Path, *, follow_links: bool = False) -> Containers:
    return Containers.named(SourceSpec(str(uri), follow_links=follow_links), (".tar",))


def named(uri: str | Path) -> list[str]:
    return [file.name for file in tars_of(uri).files(Counter())]


@pytest.fixture
def tars(tmp_path: Path) -> Path:
    for name in ("a.tar", "b.tar", "c.txt", "sub/a.tar", "sub/deep/d.tar", ".hidden.tar"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
    return tmp_path


def test_braces_expand_as_in_a_shell() -> None:
    assert expand_braces("a-{08..10}.tar") == ["a-08.tar", "a-09.tar", "a-10.tar"]
    assert expand_braces("{x,y}-{1..2}") == ["x-1", "x-2", "y-1", "y-2"]
    assert expand_braces("{3..1}") == ["3", "2", "1"]
    assert expand_braces("{0..10}") == [str(number) for number in range(11)]
    assert expand_braces("{00..10}") == [f"{number:02}" for number in range(11)]
    assert expand_braces("{9..010}") == ["009", "010"]


@pytest.mark.parametrize("text", ["a{1..2", "a}1", "a{1}", "a{1.." + "9" * 5000 + "}"])
def test_a_brace_that_does_not_fit_is_named(text: str) -> None:
    with pytest.raises(UsageError, match=r"brace|give"):
        expand_braces(text)


def test_braces_that_name_too_many_files_are_refused() -> None:
    with pytest.raises(UsageError, match="more than 100,000 files"):
        expand_braces("a{0..999}{0..999}")


def test_patterns_find_files_sorted(tars: Path) -> None:
    assert named(tars / "*.tar") == ["a.tar", "b.tar"]
    assert named(tars / "?.tar") == ["a.tar", "b.tar"]
    assert named(tars / "[b-z].tar") == ["b.tar"]
    assert named(tars / "*/*.tar") == ["sub/a.tar"]
    assert named(tars / "**/*.tar") == ["a.tar", "b.tar", "sub/a.tar", "sub/deep/d.tar"]


def test_hidden_files_and_folders_fit_only_a_pattern_with_a_dot(tmp_path: Path) -> None:
    for name in ("a.tar", "._a.tar", ".cache/b.tar", "sub/.c.tar"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    for pattern in ("*.tar", "**/*.tar", "**"):
        assert named(tmp_path / pattern) == ["a.tar"]
    assert named(tmp_path) == [f"{tmp_path.name}/a.tar"]
    assert named(tmp_path / ".*.tar") == ["._a.tar"]
    assert named(tmp_path / "**/.*.tar") == ["._a.tar", "sub/.c.tar"]
    assert named(tmp_path / ".cache/*.tar") == ["b.tar"]


def test_one_file_and_all_files_of_a_folder(tars: Path) -> None:
    assert named(tars / "a.tar") == ["a.tar"]
    assert named(tars / "sub") == ["sub/a.tar", "sub/deep/d.tar"]


def test_braces_keep_their_order_and_share_a_folder(tars: Path) -> None:
    assert named(f"{tars}/{{sub/a,b}}.tar") == ["sub/a.tar", "b.tar"]


def test_a_file_of_a_list_that_is_missing_is_named(tars: Path) -> None:
    with pytest.raises(SourceError, match=r"has no .*/x\.tar"):
        named(f"{tars}/{{a,x}}.tar")
    with pytest.raises(SourceError, match=r"x\.tar does not exist"):
        named(tars / "x.tar")
    with pytest.raises(SourceError, match=r"no file fits the source"):
        named(tars / "x*.tar")


@pytest.mark.timeout(30)
def test_missing_files_of_a_list_are_counted_in_linear_time(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"has no .*/0\.tar, and 39,999 more are missing"):
        named(tmp_path / "{0..39999}.tar")


def test_a_file_that_exists_is_no_pattern(tmp_path: Path) -> None:
    for name in ("a[1].tar", "a{1,2}.tar"):
        (tmp_path / name).write_bytes(b"x")
        assert named(tmp_path / name) == [name]


def test_a_url_that_leads_out_is_refused() -> None:
    with pytest.raises(UsageError, match=r"has '\.\.'"):
        tars_of("s3://bucket/../other/*.tar")
    with pytest.raises(UsageError, match="in one bucket"):
        tars_of("s3://{a,b}/x.tar")


@pytest.mark.parametrize("pattern", ["*.tar", "**/*.tar"])
def test_links_that_lead_out_are_counted_and_followed_where_allowed(
    tars: Path, pattern: str
) -> None:
    links = tars / "links"
    links.mkdir()
    (links / "own.tar").write_bytes(b"x")
    (links / "link.tar").symlink_to(tars / "a.tar")
    (links / "link.txt").symlink_to(tars / "c.txt")
    left_out = Counter[str]()
    uri = f"{links}/{pattern}"
    [file] = tars_of(uri).files(left_out)
    assert file.name == "own.tar"
    assert left_out == {LINK_OUT: 1}
    followed = tars_of(uri, follow_links=True).files(Counter())
    assert [file.name for file in followed] == ["link.tar", "own.tar"]
    (links / "own.tar").unlink()
    with pytest.raises(SourceError, match=r"no file fits .* 1 links that lead out of it"):
        named(uri)


@pytest.mark.parametrize("pattern", ["**/*.tar", "{alias,latest,x}/*.tar", "*/*.tar", ""])
def test_a_file_is_read_once_where_links_lead_to_it(tmp_path: Path, pattern: str) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x/a.tar").write_bytes(b"x")
    (tmp_path / "latest").symlink_to("x")
    (tmp_path / "alias").mkdir()
    (tmp_path / "alias/b.tar").symlink_to("../x/a.tar")
    left_out = Counter[str]()
    files = tars_of(tmp_path / pattern).files(left_out)
    assert [file.name.removeprefix(f"{tmp_path.name}/") for file in files] == ["x/a.tar"]
    assert +left_out == {LINK_AGAIN: 2}


def test_a_named_link_that_leads_out_is_refused_with_the_way_out(tars: Path) -> None:
    link = tars / "other/links/link.tar"
    link.parent.mkdir(parents=True)
    link.symlink_to(tars / "a.tar")
    with pytest.raises(SourceError, match=r"is a link that leads out of .*; give --follow-links"):
        named(link)
    with pytest.raises(SourceError, match=r"is a link that leads out of .*; give --follow-links"):
        named(link.with_name("{link,missing}.tar"))
    with pytest.raises(SourceError, match="1 links that lead out of it"):
        named(link.parent)
