"""Where the jobs of a queue go: the registry, and what sealed shards have said since."""

from lowq.sharding import READ_AGAIN, Layout, Layouts, Routes


def test_an_id_goes_where_the_registry_says_and_its_sealed_shards_from_layout_to_layout_with_the_latest_clock() -> None:
    routes = Routes(Layouts.plain(4))
    shard = Layout(4).shard_of(b"a")
    assert routes.find(b"a") == (Layout(4), shard, b"")
    routes.note_sealed(Layout(4), shard, "6 1 30.5")
    routes.note_sealed(Layout(6, 1), Layout(6, 1).shard_of(b"a"), "3 2 9.5")
    assert routes.find(b"a") == (Layout(3, 2), Layout(3, 2).shard_of(b"a"), b"30.5")
    other = next(b"%d" % n for n in range(100) if Layout(4).shard_of(b"%d" % n) != shard)
    assert routes.find(other)[0] == Layout(4)
    routes.note_lost(Layouts.plain(4))
    assert routes.find(b"a") == (Layout(4), shard, b"")


def test_the_registry_is_read_again_while_shards_are_sealed() -> None:
    now = [100.0]
    routes = Routes(Layouts.plain(1), lambda: now[0])
    now[0] += 2 * READ_AGAIN
    found = [routes.is_doubtful]
    routes.note_sealed(Layout(1), 0, "2 1 5.0")
    found.append(routes.is_doubtful)
    routes.note_read(Layouts(Layout(1), Layout(2, 1)))
    found.append(routes.is_doubtful)
    assert routes.find(b"a")[0] == Layout(2, 1), "what was sealed stays so"
    now[0] += 2 * READ_AGAIN
    assert [*found, routes.is_doubtful] == [False, True, False, True]
    routes.note_read(Layouts(Layout(2, 1)))
    assert not routes.sealed


def test_an_entry_of_the_registry_may_say_anything() -> None:
    assert Layouts.read({"shards_count": 3}) == Layouts.plain(3)
    following = {"shards_count": 4, "epoch": 3, "began_at": 1.5, "by": "ann"}
    layouts = Layouts.read({"shards_count": 3, "epoch": 1, "reshard": following})
    assert layouts == Layouts(Layout(3, 1), Layout(4, 3))
    assert layouts.facts == {"began_at": 1.5, "by": "ann"}
    for wrong in ({}, {"shards_count": 0}, {"shards_count": 3, "epoch": -1}, {"shards_count": 3, "epoch": "x"}):
        assert Layouts.read(wrong) is None
    for reshard in (5, {}, {"shards_count": 4, "epoch": 1}, {"shards_count": 0, "epoch": 2}):
        assert Layouts.read({"shards_count": 3, "epoch": 1, "reshard": reshard}) == Layouts(Layout(3, 1))
