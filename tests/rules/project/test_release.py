"""What `make release-check` says of a version and its tag. The rest of it is shown by running it."""

from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.release import TESTS, Failed, check_floors, check_pages, check_version
from tests.rows import case

ROOT = Path(__file__).parents[3]
WHEEL = Path("dist/lowq-0.1.0-py3-none-any.whl")


def test_a_tag_is_of_the_version_that_was_built_and_has_its_section_in_the_changelog() -> None:
    dated = "# Changelog\n\n## [Unreleased]\n\n## [0.1.0] - 2027-01-31\n"
    check_version(WHEEL, None, "")
    check_version(WHEEL, "v0.1.0", dated)
    for tag, changelog, said in (
        ("v0.2.0", dated, "the tag is v0.2.0, and the version in lowq/version.py is 0.1.0"),
        ("v0.1.0", dated.replace("[0.1.0] - 2027-01-31", "[Unreleased]"), "no section '## [0.1.0] - DATE'"),
        ("v0.1.0", dated.replace("0.1.0", "0x1.0"), "no section"),
    ):
        with case(tag, changelog), pytest.raises(Failed) as caught:
            check_version(WHEEL, tag, changelog)
        assert said in str(caught.value)


def test_a_page_of_a_release_does_not_say_that_there_is_none() -> None:
    pages = {"start.md": "lowq is not on a package index yet.", "workers.md": "A worker"}
    check_pages(None, pages)
    with pytest.raises(Failed, match=r"on no index: start\.md$"):
        check_pages("v0.1.0", pages)


def test_the_tests_of_the_installed_wheel_are_there() -> None:
    assert all((ROOT / path).exists() for path in TESTS)


def test_the_lowest_dependencies_are_those_that_are_declared() -> None:
    needed = [Requirement("redis<9,>=6.0"), Requirement("msgspec>=0.19")]
    check_floors(needed, "msgspec==0.19.0\nredis==6.0.0\npip==1.0\n")
    with pytest.raises(Failed, match=r": redis 6\.1\.0 instead of 6\.0, msgspec is not installed instead of 0\.19$"):
        check_floors(needed, "redis==6.1.0\n")
