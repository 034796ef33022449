"""What `make mutants` changes."""

from tests.mutation import draw, mutants_of

SOURCE = '''
def pays(amount: int = 3, rich: bool = False) -> "int | None":
    """Not 7."""
    if rich and amount > 0:
        log.warning("%d is too much", amount + 1)
        send(f"{amount + 1}")
        raise ValueError(amount)
    return amount
'''


def test_each_mutant_changes_one_thing_and_nothing_that_is_only_said() -> None:
    found = {(mutant.before.strip(), mutant.after) for mutant in mutants_of("lowq/pays.py", SOURCE)}
    assert found == {
        ("3", "(4)"),
        ("False", "(True)"),
        ("rich and amount > 0", "(rich or amount > 0)"),
        ("amount > 0", "(amount >= 0)"),
        ("0", "(1)"),
        ('send(f"{amount + 1}")', "pass"),
        ("raise ValueError(amount)", "pass"),
        ("return amount", "return None"),
    }
    for mutant in mutants_of("lowq/pays.py", SOURCE):
        assert mutant.apply(SOURCE) != SOURCE
        compile(mutant.apply(SOURCE), "pays.py", "exec")


def test_a_seed_draws_the_same_from_all_packages() -> None:
    assert draw(40, 1, "lowq/push") == draw(40, 1, "lowq/push")
    assert len({mutant.package for mutant in draw(400, 1)}) > 12
