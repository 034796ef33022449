"""Where the jobs of a queue go: the registry, and what sealed shards have said since."""

from lowq.routes import READ_AGAIN, Routes
from lowq.sharding import Layout, Layouts


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_an_id_goes_to_the_layout_of_the_registry_until_its_shard_says_another() -> None:
    routes = Routes(Layouts.plain(4))
    shard = Layout(4).shard_of(b"a")
    assert routes.find(b"a") == (Layout(4), shard, b"")
    routes.note_sealed(Layout(4), shard, "6 1 17.5")
    assert routes.find(b"a") == (Layout(6, 1), Layout(6, 1).shard_of(b"a"), b"17.5")
    other = next(b"%d" % n for n in range(100) if Layout(4).shard_of(b"%d" % n) != shard)
    assert routes.find(other)[0] == Layout(4)


def test_it_is_sent_on_from_layout_to_layout_with_the_latest_clock() -> None:
    routes = Routes(Layouts.plain(1))
    routes.note_sealed(Layout(1), 0, "2 1 30.5")
    routes.note_sealed(Layout(2, 1), Layout(2, 1).shard_of(b"a"), "3 2 9.5")
    layout, _, clock = routes.find(b"a")
    assert (layout, clock) == (Layout(3, 2), b"30.5")


def test_the_registry_is_read_again_while_shards_are_sealed() -> None:
    clock = Clock()
    routes = Routes(Layouts.plain(1), clock)
    clock.now += 2 * READ_AGAIN
    assert [routes.is_doubtful] == [False]
    routes.note_sealed(Layout(1), 0, "2 1 5.0")
    assert [routes.is_doubtful] == [True]
    routes.note_read(Layouts(Layout(1), Layout(2, 1)))
    assert [routes.is_doubtful] == [False]
    assert routes.find(b"a")[0] == Layout(2, 1), "what was sealed stays so"
    clock.now += 2 * READ_AGAIN
    assert [routes.is_doubtful] == [True]
    routes.note_read(Layouts(Layout(2, 1)))
    assert not routes.has_sealed
    assert routes.find(b"a") == (Layout(2, 1), Layout(2, 1).shard_of(b"a"), b"")


def test_an_entry_of_the_registry_may_say_anything() -> None:
    assert Layouts.read({"shards_count": 3}) == Layouts.plain(3)
    following = {"shards_count": 4, "epoch": 2, "began_at": 1.5, "by": "ann"}
    layouts = Layouts.read({"shards_count": 3, "epoch": 1, "reshard": following})
    assert layouts == Layouts(Layout(3, 1), Layout(4, 2))
    assert layouts is not None
    assert layouts.facts == {"began_at": 1.5, "by": "ann"}
    for wrong in ({}, {"shards_count": 0}, {"shards_count": 3, "epoch": -1}, {"shards_count": 3, "epoch": "x"}):
        assert Layouts.read(wrong) is None
    skipping = Layouts.read({"shards_count": 3, "epoch": 1, "reshard": {"shards_count": 4, "epoch": 3}})
    assert skipping == Layouts(Layout(3, 1), Layout(4, 3))
    for reshard in (5, {}, {"shards_count": 4, "epoch": 1}, {"shards_count": 0, "epoch": 2}):
        assert Layouts.read({"shards_count": 3, "epoch": 1, "reshard": reshard}) == Layouts(Layout(3, 1))


def test_what_shards_have_said_is_forgotten_when_one_is_not_there_any_more() -> None:
    routes = Routes(Layouts.plain(1))
    routes.note_sealed(Layout(1), 0, "2 1 30.5")
    routes.note_lost(Layouts.plain(1))
    assert routes.find(b"a") == (Layout(1), 0, b"")
