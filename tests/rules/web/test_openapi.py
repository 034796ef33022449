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
from lowq_web.documents import ActDocument, IdQuery, JobsQuery
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
    found = served()
    assert found == json.loads(AGREED.read_text()), (
        "the API has changed: if that is meant, renew the file (`.venv/bin/python -m tests.rules.web.test_openapi`), "
        "look at its differences, and write them into CHANGELOG.md"
    )
    referred = {part.partition('"')[0] for part in json.dumps(found).split('"#/components/schemas/')[1:]}
    assert referred == set(found["components"]["schemas"]), "every schema is used"


def test_a_query_that_is_wrong_is_answered_with_the_parameter_and_its_bounds() -> None:
    rows: list[tuple[dict[str, str], str]] = [
        ({"colour": "red"}, "unknown parameter 'colour'; known here: state, match, order_by, reverse, limit, after, "),
        ({"limit": "0"}, "limit='0': it is an integer from 1 to 1000"),
        ({"limit": "1" * 5000}, f"limit='{'1' * 49}: it is an integer from 1 to 1000"),
        ({"reverse": "1"}, "reverse='1': it is true or false"),
        ({"state": "x` - at `$.nope"}, "state='x` - at `$.nope': it is one of due, "),
        ({"match": ""}, "match='': it is a text of 1 to 512 characters"),
        ({"match": "\udcff*"}, "match is no text that UTF-8 has"),
    ]
    for query, reason in rows:
        with case(query, reason), pytest.raises(ValueError, match=f"^{re.escape(reason)}"):
            read_query(query, JobsQuery)
    with pytest.raises(ValueError, match="unknown parameter 'x'; known here: none"):
        read_query({"x": "1"}, Nothing)
    with pytest.raises(ValueError, match="the parameter id is missing"):
        read_query({}, IdQuery)


def test_a_document_that_is_wrong_is_answered_with_the_field_and_its_bounds() -> None:
    rows: list[tuple[str, str]] = [
        ("[" * 100_000, "this is no JSON: "),
        ("[]", "the document must be an object"),
        ("{}", "the document lacks 'action'"),
        ('{"action": "explode"}', "action must be one of bury, delete, kick, perform_now"),
        # As msgspec ends its message.
        ('{"a` - at `$.nope": 1}', "the document has an unknown property 'a` - at `$.nope'; known: action, "),
        ('{"action": "kick", "all": {"state": "x` - at `$[0]"}}', "all.state must be one of due, morgue, "),
        ('{"action": "kick", "ids": []}', "ids must be a list of 1 to 1000 items"),
        ('{"action": "kick", "ids": ["a", 5]}', "ids[1] must be a text of 1 to 512 characters"),
        ('{"action": "kick", "ids": ["a", "\\ud800"]}', "ids is no text that UTF-8 has"),
        ('{"action": "kick", "at_most": 1.0}', "at_most must be an integer of at least 0"),
        ('{"action": "kick", "all": {"min": NaN}}', "all: min must be a finite number"),
        ('{"action": "kick", "all": {"min": %s}}' % ("9" * 5000), "all: min must be a finite number"),
        ('{"action": "kick", "all": %s}' % ('{"a":' * 500 + "1" + "}" * 500), "all has an unknown property 'a'; "),
    ]
    for sent, reason in rows:
        with case(sent, reason), pytest.raises(ValueError, match=f"^{re.escape(reason)}"):
            read_document(sent.encode(), ActDocument)


def test_queries_and_documents_are_read_with_bytes_and_large_numbers() -> None:
    query = read_query({"after": "\udcff", "reverse": "true"}, JobsQuery)
    assert query.given() == {"after": "\udcff", "reverse": True, "limit": 50}
    sent = '{"action": "kick", "ids": ["b\\udcff"], "at_most": %s, "all": {"min": 5, "max": 2e10}}' % 10**30
    document = read_document(sent.encode(), ActDocument)
    assert (document.ids, document.at_most) == (["b\udcff"], 10**30)
    assert document.given()["all"].given() == {"min": 5.0, "max": 2e10}


if __name__ == "__main__":
    AGREED.write_text(json.dumps(served(), indent=1) + "\n")
