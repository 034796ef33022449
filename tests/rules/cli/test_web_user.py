"""`lowq web-user`: the line of a user of the dashboard."""

from click.testing import CliRunner

from lowq.admin.passwords import PasswordHash
from lowq.cli import main
from tests.rows import case


def test_it_makes_a_line_from_the_standard_input() -> None:
    made = CliRunner().invoke(main, ["web-user", "ann", "--role", "admin"], input="pass:wörd \nmore\n")
    assert made.exit_code == 0
    name, text, role = made.stdout.removesuffix("\n").split(":")
    assert (name, role) == ("ann", "admin")
    assert PasswordHash.parse(text).fits("pass:wörd ")
    assert "wörd" not in made.output


def test_without_a_role_a_user_may_only_look() -> None:
    made = CliRunner().invoke(main, ["web-user", "bob"], input="x\n")
    assert made.stdout.endswith(":read\n")


def test_a_name_that_no_line_could_have_is_refused() -> None:
    for name in ["", "a:b", "#ann", " ann", "a\nb", "a\x1bb", "x" * 201]:
        with case(name):
            refused = CliRunner().invoke(main, ["web-user", "--", name], input="x\n")
            assert refused.exit_code == 2
            assert refused.stdout == ""


def test_an_empty_password_is_refused() -> None:
    for given in ("", "\n", "\r\n"):
        refused = CliRunner().invoke(main, ["web-user", "ann"], input=given)
        assert (refused.exit_code, refused.stdout) == (2, "")
        assert "empty" in refused.stderr
