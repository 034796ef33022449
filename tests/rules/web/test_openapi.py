"""The description of the API is the one that was agreed on: clients are generated from it.

`python -m tests.rules.web.test_openapi` renews tests/rules/web/openapi.json.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

import lowq
import lowq_web
from lowq_web.documents import ActDocument, CommandDocument, CountDocument, IdQuery, JobsQuery
from lowq_web.received import Nothing, read_document, read_query
from tests.rows import case

AGREED = Path(__file__).with_name("openapi.json")


def served() -> Any:
    """What an application answers. The version is that of the package, and not agreed on here."""
    with lowq.Lowq().embedded():
        client = TestClient(lowq_web.create_app(lowq.Lowq(redis_url="memory://")), base_url="http://127.0.0.1")
        found = client.get("/api/v1/openapi.json").json()
    assert found["info"].pop("version") == lowq.__version__
    return found


def test_it_is_the_one_that_was_agreed_on() -> None:
    assert served() == json.loads(AGREED.read_text()), (
        "the API has changed: if that is meant, renew the file (`.venv/bin/python -m tests.rules.web.test_openapi`), "
        "look at its differences, and write them into CHANGELOG.md"
    )


def test_every_reference_leads_somewhere_and_every_schema_is_used() -> None:
    found = served()
    text = json.dumps(found)
    names = set(found["components"]["schemas"])
    referred = {part.partition('"')[0] for part in text.split('"#/components/schemas/')[1:]}
    assert referred == names


def test_a_query_that_is_wrong_is_answered_with_the_parameter_and_its_bounds() -> None:
    rows: list[tuple[dict[str, str], str]] = [
        ({"colour": "red"}, "unknown parameter 'colour'; known here: state, match, order_by, reverse, limit, after, "),
        ({"limit": "0"}, "limit='0': it is an integer from 1 to 1000"),
        ({"limit": "1" * 5000}, f"limit='{'1' * 49}: it is an integer from 1 to 1000"),
        ({"reverse": "1"}, "reverse='1': it is true or false"),
        ({"state": "x` - at `$.nope"}, "state='x` - at `$.nope': it is one of due, "),
        ({"match": ""}, "match='': it is a text of 1 to 512 characters"),
        ({"match": "\udcff*"}, "match is no text that UTF-8 has"),
        ({"after": "x" * 4097}, f"after='{'x' * 49}: it is a text of at most 4096 characters"),
    ]
    for query, reason in rows:
        with case(query, reason), pytest.raises(ValueError, match=f"^{re.escape(reason)}"):
            read_query(query, JobsQuery)


def test_a_query_is_read_with_defaults_and_bytes() -> None:
    found = read_query({"after": "\udcff", "reverse": "true", "limit": "7"}, JobsQuery)
    assert found.given() == {"after": "\udcff", "reverse": True, "limit": 7}
    assert read_query({}, JobsQuery).given() == {"reverse": False, "limit": 50}
    with pytest.raises(ValueError, match="unknown parameter 'x'; known here: none"):
        read_query({"x": "1"}, Nothing)
    with pytest.raises(ValueError, match="the parameter id is missing"):
        read_query({}, IdQuery)


def test_a_document_that_is_wrong_is_answered_with_the_field_and_its_bounds() -> None:
    rows: list[tuple[str, str]] = [
        ("{", "this is no JSON: "),
        ("[" * 100_000, "this is no JSON: "),
        ("[]", "the document must be an object"),
        ("{}", "the document lacks 'action'"),
        ('{"action": "explode"}', "action must be one of bury, delete, kick, perform_now"),
        ('{"action": "kick", "x": 1}', "the document has an unknown property 'x'; known: action, ids, all, reason, "),
        # As msgspec ends its message.
        ('{"a` - at `$.nope": 1}', "the document has an unknown property 'a` - at `$.nope'; known: action, "),
        ('{"action": "kick", "all": {"a` - at `$.nope": 1}}', "all has an unknown property 'a` - at `$.nope'; "),
        ('{"action": "x` - at `$.nope"}', "action must be one of bury, delete, kick, perform_now"),
        ('{"action": "kick", "all": {"state": "x` - at `$[0]"}}', "all.state must be one of due, morgue, "),
        ('{"action": "kick", "ids": []}', "ids must be a list of 1 to 1000 items"),
        ('{"action": "kick", "ids": ["a", 5]}', "ids[1] must be a text of 1 to 512 characters"),
        ('{"action": "kick", "ids": ["a", "\\ud800"]}', "ids is no text that UTF-8 has"),
        ('{"action": "kick", "at_most": true}', "at_most must be an integer of at least 0"),
        ('{"action": "kick", "at_most": 1.0}', "at_most must be an integer of at least 0"),
        ('{"action": "kick", "reason": 5}', "reason must be a text of at most 300 characters"),
        ('{"action": "kick", "reason": "x\\udcff"}', "reason is no text that UTF-8 has"),
        ('{"action": "kick", "all": {"min": "1"}}', "all.min must be a number"),
        ('{"action": "kick", "all": {"min": NaN}}', "all: min must be a finite number"),
        ('{"action": "kick", "all": {"min": %s}}' % ("9" * 5000), "all: min must be a finite number"),
        ('{"action": "kick", "all": {"match": "\\udcff"}}', "all: match is no text that UTF-8 has"),
        ('{"action": "kick", "all": %s}' % ('{"a":' * 500 + "1" + "}" * 500), "all has an unknown property 'a'; "),
    ]
    for sent, reason in rows:
        with case(sent, reason), pytest.raises(ValueError, match=f"^{re.escape(reason)}"):
            read_document(sent.encode(), ActDocument)


def test_a_document_is_read_with_bytes_large_numbers_and_the_last_of_two_names() -> None:
    sent = '{"action": "kick", "ids": ["a"], "ids": ["b\\udcff"], "at_most": %s, "all": {"min": 5, "max": 2e10}}'
    found = read_document((sent % 10**30).encode(), ActDocument)
    assert (found.ids, found.at_most) == (["b\udcff"], 10**30)
    assert found.given()["all"].given() == {"min": 5.0, "max": 2e10}
    assert read_document(b'{"action": "delete"}', CountDocument).given() == {"action": "delete"}
    with pytest.raises(ValueError, match="do must be one of quiet, reload, stop"):
        read_document(b'{"node": "a", "do": "kill"}', CommandDocument)


if __name__ == "__main__":
    AGREED.write_text(json.dumps(served(), indent=1) + "\n")
