"""`lowq web-user`: the line of a user of the dashboard."""

from click.testing import CliRunner, Result

from lowq.cli import main
from lowq.operate.logins import PasswordHash
from tests.rows import case


def web_user(*args: str, given: str = "x\n") -> Result:
    return CliRunner().invoke(main, ["web-user", *args], input=given)


def test_it_makes_a_line_from_the_standard_input() -> None:
    made = web_user("ann", "--role", "admin", given="pass:wörd \nmore\n")
    name, text, role = made.stdout.removesuffix("\n").split(":")
    assert (made.exit_code, name, role) == (0, "ann", "admin")
    assert PasswordHash.parse(text).fits("pass:wörd ")
    assert "wörd" not in made.output
    assert web_user("bob").stdout.endswith(":read\n")  # without a role a user may only look


def test_a_name_that_no_line_could_have_and_an_empty_password_are_refused() -> None:
    names = ["", "a:b", "#ann", " ann", "a\nb", "a\x1bb", "x" * 201]
    for name, given in [*((name, "x\n") for name in names), ("ann", ""), ("ann", "\r\n")]:
        with case(name, given):
            refused = web_user("--", name, given=given)
            assert (refused.exit_code, refused.stdout) == (2, "")
            assert ("empty" in refused.stderr) >= (name == "ann")
