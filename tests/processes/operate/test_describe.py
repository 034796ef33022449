"""What is known of an id, from a cluster and on the command line."""

from click.testing import CliRunner

from lowq import Lowq
from lowq.cli import main
from tests.round_trips import counted_round_trips


def test_in_a_cluster_no_server_is_asked_twice_in_a_round_trip(cluster_url: str) -> None:
    app = Lowq(redis_url=cluster_url)
    queue = app.queue("Orders", 20)
    queue.push({"id": number, "payload": number} for number in range(40))
    queue.bury(range(10), reason="a test")
    queue.describe(0)  # now the connections are made, and the slots known
    shards = set()
    for number in range(40):
        with counted_round_trips() as counted:
            shards.add(queue.describe(number).shard.index)
        assert counted.most_of_a_server == 1
    assert len(shards) > 10, "of both servers, surely"
    with counted_round_trips() as counted:
        assert app.queue("Orders").describe(4).state == "morgue"
    assert counted.most_of_a_server <= 2
    app.close()


def test_why_and_peek_ask_once_for_the_queue_and_once_for_ten_ids(redis_url: str) -> None:
    app = Lowq(redis_url=redis_url)
    queue = app.queue("Orders", 3)
    queue.push([{"id": "a"}, {"id": "b", "delay": 90}])
    queue.bury("a")
    for verb in ("why", "peek"):
        for ids in (["a"], ["a", "b", "a", *map(str, range(9))]):
            with counted_round_trips() as counted:
                result = CliRunner().invoke(main, [verb, "Orders", *ids, "--redis-url", redis_url])
            assert result.exit_code == (len(ids) > 1)
            assert counted.count == 1 + -(-len(set(ids)) // 10), f"{verb} {ids}"
    app.close()
