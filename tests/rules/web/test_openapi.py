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
from lowq_web.api.actions import ActDocument
from lowq_web.api.jobs import JobsQuery
from lowq_web.api.received import IdQuery, Nothing, read_document, read_query
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
        ({"colour": "red"}, "Object contains unknown field `colour`"),
        ({"limit": "0"}, "Expected `int` >= 1 - at `$.limit`"),
        ({"limit": "1" * 5000}, "Integer value out of range - at `$.limit`"),
        ({"limit": "many"}, "Expected `int`, got `str` - at `$.limit`"),
        ({"reverse": "yes"}, "Expected `bool`, got `str` - at `$.reverse`"),
        ({"state": "sleeping"}, "Invalid enum value 'sleeping' - at `$.state`"),
        ({"match": ""}, "Expected `str` of length >= 1 - at `$.match`"),
        ({"match": "\udcff*"}, "match is no text that UTF-8 has"),
    ]
    for query, reason in rows:
        with case(query, reason), pytest.raises(ValueError, match=f"^{re.escape(reason)}"):
            read_query(query, JobsQuery)
    with pytest.raises(ValueError, match="unknown field `x`"):
        read_query({"x": "1"}, Nothing)
    with pytest.raises(ValueError, match="missing required field `id`"):
        read_query({}, IdQuery)


def test_a_document_that_is_wrong_is_answered_with_the_field_and_its_bounds() -> None:
    rows: list[tuple[str, str]] = [
        ("[" * 100_000, "this is no JSON: "),
        ("[]", "Expected `object`, got `array`"),
        ("{}", "Object missing required field `action`"),
        ('{"action": "explode"}', "Invalid enum value 'explode' - at `$.action`"),
        ('{"action": "kick", "%s": 1}' % ("x" * 5000), "Object contains unknown field `xxx"),
        ('{"action": "kick", "all": {"state": "asleep"}}', "Invalid enum value 'asleep' - at `$.all.state`"),
        ('{"action": "kick", "ids": []}', "Expected `array` of length >= 1 - at `$.ids`"),
        ('{"action": "kick", "ids": ["a", 5]}', "Expected `str`, got `int` - at `$.ids[1]`"),
        ('{"action": "kick", "ids": ["a", "\\ud800"]}', "ids is no text that UTF-8 has"),
        ('{"action": "kick", "at_most": 1.0}', "Expected `int`, got `float` - at `$.at_most`"),
        ('{"action": "kick", "all": {"min": NaN}}', "min must be a finite number - at `$.all`"),
        ('{"action": "kick", "all": {"min": %s}}' % ("9" * 5000), "min must be a finite number - at `$.all`"),
        (
            '{"action": "kick", "all": %s}' % ('{"a":' * 500 + "1" + "}" * 500),
            "Object contains unknown field `a` - at `$.all`",
        ),
    ]
    for sent, reason in rows:
        with case(sent, reason):
            with pytest.raises(ValueError, match=f"^{re.escape(reason)}") as refused:
                read_document(sent.encode(), ActDocument)
            assert len(str(refused.value)) <= 300


def test_queries_and_documents_are_read_with_bytes_and_large_numbers() -> None:
    query = read_query({"after": "\udcff", "reverse": "true"}, JobsQuery)
    assert query.given() == {"after": "\udcff", "reverse": True, "limit": 50}
    sent = '{"action": "kick", "ids": ["b\\udcff"], "at_most": %s, "all": {"min": 5, "max": 2e10}}' % 10**30
    document = read_document(sent.encode(), ActDocument)
    assert (document.ids, document.at_most) == (["b\udcff"], 10**30)
    assert document.given()["all"].given() == {"min": 5.0, "max": 2e10}


if __name__ == "__main__":
    AGREED.write_text(json.dumps(served(), indent=1) + "\n")
