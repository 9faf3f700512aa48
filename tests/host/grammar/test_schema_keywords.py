"""Each keyword of JSON Schema, by pairs of schema and instance whose validity jsonschema confirms."""

import json

import jsonschema
import pytest
from jsonschema.validators import validator_for

from jaxkv.grammar.budget import Budget
from jaxkv.grammar.errors import InvalidSchema, TooLarge, UnsupportedSchema
from jaxkv.grammar.schema import compile_schema

ANY = [None, True, False, 0, 1, -1, 1.5, "", "a", "é", [], [1], ["a", 1], {}, {"a": 1}, {"b": []}]
ABC = {"a": {"type": "integer"}, "b": {"type": "string"}, "c": {}}

CASES = [
    (True, ANY),
    (False, ANY),
    ({"type": "integer"}, [*ANY, 1.0, -0.0, 1e20]),
    ({"type": ["null", "string", "array"]}, ANY),
    (
        {"const": {"a": [1, None], "b": False}},
        [{"a": [1, None], "b": False}, {"a": [1], "b": False}, {"b": False}, {}, 1],
    ),
    ({"const": 2}, [2, 2.0, "2", 20, 2.5]),
    ({"enum": [1, "1", True, None, [1], {"a": 1}]}, [*ANY, "1", {"a": 1.0}, [True]]),
    ({"minimum": 3}, [2, 3, 3.0, 4, 1e16, "a", 2.999]),
    ({"exclusiveMinimum": 0, "maximum": 10.5}, [0, -0.0, 1e-7, 10.5, 10.6, 11, 5]),
    ({"multipleOf": 0.25}, [0.25, 0.5, 0.3, 7, "x"]),
    ({"type": "integer", "multipleOf": 7, "minimum": -20}, [-21, -14, 0, 7, 8, 7.0]),
    ({"minLength": 2, "maxLength": 3}, ["a", "ab", "é😀a", "abcd", "\\\\", '"""', "\n", 1]),
    ({"maxLength": 50}, ["x" * 50, "x" * 51, "😀" * 50, '"' * 51]),
    ({"minLength": 20, "maxLength": 50}, ["x" * 19, "x" * 20, "é" * 51]),
    ({"minLength": 30}, ["x" * 29, "x" * 30, "é" * 300]),
    ({"pattern": "b+c"}, ["abbc", "bc", "ac", 3]),
    ({"pattern": "^[a-z]+$", "maxLength": 40}, ["a" * 40, "a" * 41, "", "a1"]),
    (
        {"pattern": "^a?(bc)*$", "minLength": 10, "maxLength": 12},
        ["bc" * 5, "a" + "bc" * 5, "bc" * 6, "a" + "bc" * 6, "bc" * 4],
    ),
    ({"pattern": '^"\\\\$'}, ['"\\', '"', "\\"]),
    ({"items": {"type": "integer"}}, [[], [1], [1, "a"], "a"]),
    (
        {"prefixItems": [{"type": "integer"}, {"type": "string"}], "items": False},
        [[], [1], [1, "a"], [1, "a", 2], ["a"]],
    ),
    ({"minItems": 1, "maxItems": 2}, [[], [1], [1, 2], [1, 2, 3], "a"]),
    ({"contains": {"const": 5}}, [[], [5], [1, 5, 2], [1], 5]),
    (
        {"contains": {"type": "integer"}, "minContains": 2, "maxContains": 3},
        [[1], [1, "a", 2], [1, 2, 3], [1, 2, 3, 4]],
    ),
    ({"contains": {"const": 1}, "minContains": 0}, [[], [1], [2]]),
    ({"items": {"enum": ["a", "b", 3]}, "uniqueItems": True}, [[], ["a", "b"], ["a", "a"], [3, "b", "a"], [3, 3.0]]),
    ({"uniqueItems": True, "maxItems": 1}, [[], [{}], [1, 1]]),
    ({"properties": ABC}, [{}, {"a": 1}, {"a": "x"}, {"a": 1, "b": "x", "c": None}, {"d": [1]}, {"b": 1}, 4]),
    (
        {"properties": ABC, "required": ["b"], "additionalProperties": False},
        [{}, {"b": ""}, {"a": 1, "b": ""}, {"b": "", "d": 1}],
    ),
    (
        {"properties": ABC, "additionalProperties": {"type": "null"}},
        [{"d": None}, {"a": 1, "d": None}, {"d": 1}, {"c": 1}],
    ),
    ({"required": ["x", "y"]}, [{"x": 1, "y": 2}, {"x": 1}, {"x": 1, "y": 3, "z": 0}, "x"]),
    (
        {"patternProperties": {"^a": {"type": "integer"}, "z$": {"minimum": 5}}},
        [{"a": 1}, {"a": "x"}, {"az": 4}, {"az": 5}, {"z": "x"}],
    ),
    ({"propertyNames": {"maxLength": 2, "pattern": "^[a-c]"}}, [{}, {"a": 1}, {"ab": 1}, {"abc": 1}, {"d": 1}]),
    ({"minProperties": 1, "maxProperties": 2}, [{}, {"a": 1}, {"a": 1, "b": 2}, {"a": 1, "b": 2, "c": 3}, []]),
    ({"dependentRequired": {"a": ["b"]}}, [{}, {"a": 1}, {"a": 1, "b": 2}, {"b": 1}]),
    (
        {"dependentSchemas": {"a": {"properties": {"b": {"type": "null"}}}}},
        [{"b": 1}, {"a": 1, "b": 1}, {"a": 1, "b": None}, {"a": 1}],
    ),
    (
        {"allOf": [{"properties": {"a": {"minimum": 2}}}, {"properties": {"a": {"maximum": 4}}, "required": ["a"]}]},
        [{"a": 3}, {"a": 1}, {"a": 5}, {}],
    ),
    ({"anyOf": [{"type": "integer"}, {"minimum": 2}]}, [1, 2.5, 1.5, "a"]),
    ({"oneOf": [{"type": "integer"}, {"minimum": 2}]}, [1, 2.5, 3, 1.5]),
    (
        {
            "oneOf": [
                {"properties": {"k": {"const": k}, k: {"type": "integer"}}, "required": ["k", k]} for k in ("x", "y")
            ]
        },
        [{"k": "x", "x": 1}, {"k": "y", "y": 1}, {"k": "x", "y": 1}, {"k": "x"}, {"k": "x", "x": 1, "y": 2}],
    ),
    ({"oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, [{"a": 1}, {"b": 1}, {"a": 1, "b": 2}, {}, 3]),
    ({"not": {"type": ["integer", "object"]}}, ANY),
    ({"not": {"properties": {"a": {"type": "string"}}, "required": ["a"]}}, [{}, {"a": 1}, {"a": "x"}, {"b": "x"}, 1]),
    ({"not": {"items": {"type": "integer"}, "minItems": 1}}, [[], [1], [1, 2], [1, "a"], "x"]),
    ({"not": {"pattern": "^a"}}, ["a", "b", "", 1]),
    ({"not": {"maxLength": 2}}, ["ab", "abc", 1]),
    ({"not": {"const": {"a": 1}}}, [{"a": 1}, {"a": 2}, {"a": 1, "b": 1}, {}, 1]),
    ({"not": {"propertyNames": {"pattern": "^a"}}}, [{}, {"a": 1}, {"b": 1}, {"a": 1, "b": 1}]),
    ({"not": {"additionalProperties": {"type": "integer"}}}, [{}, {"a": 1}, {"a": "x"}]),
    ({"not": {"contains": {"const": 1}}}, [[], [1], [2, 3], [2, 1], 1]),
    (
        {
            "if": {"properties": {"k": {"const": 1}}, "required": ["k"]},
            "then": {"required": ["x"]},
            "else": {"required": ["y"]},
        },
        [{"k": 1, "x": 0}, {"k": 1, "y": 0}, {"k": 2, "y": 0}, {"y": 1}, {}],
    ),
    ({"if": {"minimum": 5}, "then": {"multipleOf": 2}}, [4, 3, 5, 6, "a"]),
    ({"properties": {"a": {}}, "unevaluatedProperties": False}, [{"a": 1}, {"b": 1}, {}]),
    (
        {
            "anyOf": [
                {"properties": {"a": {"const": 1}}, "required": ["a"]},
                {"properties": {"b": {"const": 2}}, "required": ["b"]},
            ],
            "unevaluatedProperties": False,
        },
        [{"a": 1}, {"b": 2}, {"a": 1, "b": 2}, {"a": 1, "b": 3}, {"a": 1, "c": 1}],
    ),
    (
        {"prefixItems": [{}], "contains": {"type": "string"}, "unevaluatedItems": False},
        [[1], [1, "a"], [1, 2], ["a"], [1, "a", "b"]],
    ),
    ({"$ref": "#/$defs/n", "$defs": {"n": {"type": "integer", "maximum": 3}}}, [1, 4, "a"]),
    ({"$ref": "#here", "$defs": {"n": {"$anchor": "here", "type": "null"}}}, [None, 1]),
    (
        {"$id": "http://x.y/root.json", "$ref": "part.json", "$defs": {"p": {"$id": "part.json", "type": "null"}}},
        [None, 1],
    ),
    (
        {
            "type": "object",
            "properties": {"next": {"$ref": "#"}, "v": {"type": "integer"}},
            "additionalProperties": False,
        },
        [{}, {"next": {"next": {"v": 1}}}, {"next": {"v": "a"}}, {"next": {"next": {"w": 1}}}],
    ),
    ({"format": "date"}, ["2024-02-29", "2023-02-29", "2023-1-1", 5]),
    ({"format": "ipv4"}, ["1.2.3.4", "1.2.3.256", "1.2.3"]),
    ({"format": "int32"}, ["x", 5]),
    (
        {"properties": {'q"\n': {"type": "null"}}, "required": ['q"\n'], "additionalProperties": False},
        [{'q"\n': None}, {'q"\n': 1}, {"q": None}],
    ),
]


def text_of(data) -> bytes:
    return json.dumps(data, separators=(",", ":"), ensure_ascii=False).encode()


def is_valid(schema, data) -> bool:
    validator = validator_for(schema, jsonschema.Draft202012Validator)
    return validator(schema, format_checker=jsonschema.FormatChecker()).is_valid(data)


@pytest.mark.parametrize(("schema", "instances"), CASES, ids=[str(schema)[:60] for schema, _ in CASES])
def test_a_keyword_is_enforced_exactly(schema, instances):
    automaton = compile_schema(schema).automaton
    for data in instances:
        assert automaton.matches(text_of(data)) == is_valid(schema, data), data


@pytest.mark.parametrize(("schema", "instances"), CASES[::4], ids=[str(schema)[:60] for schema, _ in CASES[::4]])
def test_whitespace_is_only_where_it_may_be(schema, instances):
    automaton = compile_schema(schema, whitespace="flexible").automaton
    for data in instances:
        for text in (
            text_of(data),
            json.dumps(data, indent=2, ensure_ascii=False).encode(),
            b" " + text_of(data) + b"\n",
        ):
            assert automaton.matches(text) == is_valid(schema, data), text
    assert not compile_schema(schema).automaton.matches(b" 1")


def test_old_drafts():
    draft4 = {"$schema": "http://json-schema.org/draft-04/schema#", "minimum": 3, "exclusiveMinimum": True}
    assert [compile_schema(draft4).automaton.matches(text) for text in ("3", "4")] == [False, True]
    lists = {
        "items": [{"type": "integer"}],
        "additionalItems": False,
        "$schema": "http://json-schema.org/draft-07/schema#",
    }
    assert [compile_schema(lists).automaton.matches(text) for text in ("[1]", "[]", "[1,2]", '["a"]')] == [
        True,
        True,
        False,
        False,
    ]
    beside = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "properties": {"a": {"$ref": "#/definitions/s", "maxLength": 1}},
    }
    beside["definitions"] = {"s": {"type": "string"}}  # draft 7 does not look beside a $ref
    assert compile_schema(beside).automaton.matches('{"a":"xx"}')
    assert not compile_schema(beside | {"$schema": "https://json-schema.org/draft/2020-12/schema"}).automaton.matches(
        '{"a":"xx"}'
    )
    ids = {"properties": {"a": {"$id": "http://y/z.json", "$ref": "#/definitions/s"}}}  # nor at an $id there
    ids |= {"$schema": beside["$schema"], "definitions": {"s": {"type": "string"}}}
    assert [compile_schema(ids).automaton.matches(text) for text in ('{"a":"x"}', '{"a":1}')] == [True, False]
    plain = {"items": {"id": "http://y/z.json", "$ref": "#/$defs/s"}, "$defs": {"s": {"type": "string"}}}
    assert [compile_schema(plain).automaton.matches(text) for text in ('["x"]', "[1]")] == [True, False]
    needs = {"dependencies": {"a": ["b"], "b": {"required": ["c"]}}}
    texts = ("{}", '{"a":1}', '{"a":1,"b":1}', '{"a":1,"b":1,"c":1}')
    assert [compile_schema(needs).automaton.matches(text) for text in texts] == [True, False, False, True]


def test_integers_of_draft_4_are_written_so():
    draft4 = {"$schema": "http://json-schema.org/draft-04/schema#"}
    for schema in (draft4 | {"type": "integer"}, draft4 | {"not": {"type": "integer"}}):
        automaton = compile_schema(schema).automaton
        for data in (1, 1.0, -3, 2.5, 1e20, "a"):
            assert automaton.matches(text_of(data)) == is_valid(schema, data), data
    later = {"$schema": "http://json-schema.org/draft-06/schema#", "type": "integer"}
    assert compile_schema(later).automaton.matches("1.0")


def test_draft_3_is_enforced_or_refused():
    draft3 = {"$schema": "http://json-schema.org/draft-03/schema#"}
    schema = draft3 | {"properties": {"a": {"required": True}, "b": {"required": False}}}
    for data in ({}, {"a": 1}, {"b": 1}, 3):
        assert compile_schema(schema).automaton.matches(text_of(data)) == is_valid(schema, data), data
    for keyword, value in (("divisibleBy", 2), ("disallow", "integer"), ("extends", {"type": "string"})):
        with pytest.raises(UnsupportedSchema, match=keyword):
            compile_schema(draft3 | {keyword: value})


def test_numbers_of_many_digits_are_exact():
    number = 123456789012345678901234567890123
    cases = ({"const": number}, {"minimum": number}, {"not": {"exclusiveMinimum": number}}, {"enum": [number, 0.1]})
    for schema in cases:
        automaton = compile_schema(schema).automaton
        for data in (number - 1, number, number + 1, round(number, -5), float(number), 0.1):
            assert automaton.matches(text_of(data)) == is_valid(schema, data), (schema, data)


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"\ud800": {"type": "null"}}, "required": ["a"]},
        {"required": ["\ud800"]},
        {"enum": [{"\ud800": 1}, {"a": "\ud800"}, {"a": 1}]},
        {"dependentRequired": {"\ud800": ["b"], "a": ["b"]}},
        {"dependentSchemas": {"\ud800": False}, "properties": {"\ud800": {}}, "unevaluatedProperties": False},
    ],
)
def test_a_lone_surrogate_is_in_no_output(schema):
    automaton = compile_schema(schema).automaton
    for data in ({}, {"a": 1}, {"b": 1}, 3):
        assert automaton.matches(text_of(data)) == is_valid(schema, data), data


def test_closed_objects_have_only_what_they_list():
    schema = {
        "properties": {"a": {"properties": {"b": {"type": "integer"}}}},
        "allOf": [{"properties": {"c": {"type": "null"}}}],
    }
    closed = compile_schema(schema, additional="closed").automaton
    assert closed.matches('{"a":{"b":1},"c":null}')
    assert not closed.matches('{"a":{"b":1},"d":1}') and not closed.matches('{"a":{"d":1}}')
    assert compile_schema(schema).automaton.matches('{"a":{"d":1},"d":1}')
    free = {"type": "object"}  # lists nothing: anything goes
    assert compile_schema(free, additional="closed").automaton.matches('{"x":1}')


@pytest.mark.parametrize(
    ("schema", "keyword", "path"),
    [
        ({"properties": {"a": {"type": "array", "uniqueItems": True}}}, "uniqueItems", "#/properties/a/uniqueItems"),
        ({"items": {"pattern": "(a)\\1"}}, "pattern", "#/items/pattern"),
        ({"properties": {"a/b": {"$ref": "http://elsewhere/x.json"}}}, "$ref", "#/properties/a~1b"),
        ({"minProperties": 3}, "minProperties", "#"),
        ({"not": {"uniqueItems": True}, "type": "array"}, "uniqueItems", "#/not/uniqueItems"),
        ({"$ref": "#"}, "$ref", "#"),
    ],
)
def test_what_cannot_be_enforced_is_refused_by_name_and_place(schema, keyword, path):
    with pytest.raises(UnsupportedSchema) as caught:
        compile_schema(schema)
    assert (caught.value.keyword, caught.value.path) == (keyword, path)
    assert keyword in str(caught.value) and path in str(caught.value)


def test_relaxing_leaves_out_and_reports():
    schema = {"type": "array", "uniqueItems": True, "items": {"type": "string", "pattern": "(a)\\1"}}
    compiled = compile_schema(schema, strict=False)
    assert set(compiled.relaxed) == {"uniqueItems@#/uniqueItems", "pattern@#/items/pattern"}
    assert compiled.automaton.matches('["x","x"]') and not compiled.automaton.matches("[1]")
    assert compile_schema({"type": "string"}, strict=False).relaxed == ()


def test_a_shallow_reading_allows_less_and_reports_it():
    names = {"type": "array", "uniqueItems": True, "items": {"type": "string"}}
    compiled = compile_schema({"properties": {"a": names, "b": names | {"minItems": 2}}}, shallow=True)
    assert compiled.restricted == ("uniqueItems@#/properties/a/uniqueItems", "uniqueItems@#/properties/b/uniqueItems")
    texts = ("{}", '{"a":[]}', '{"a":["x"]}', '{"a":["x","x"]}', '{"a":["x","y"]}', '{"b":["x"]}')
    assert [compiled.automaton.matches(text) for text in texts] == [True, True, True, False, False, False]
    with pytest.raises(UnsupportedSchema, match="uniqueItems"):
        compile_schema(names | {"minItems": 2}, shallow=True)


def test_large_recursive_schemas_are_cut_at_a_depth():
    parts = {
        f"p{i}": {"type": "array", "items": {"anyOf": [{"$ref": f"#/$defs/p{j}"} for j in range(9)]}} for i in range(9)
    }
    for name, part in parts.items():  # told apart, so that each may be in each
        part["prefixItems"] = [{"const": name}]
        part["minItems"] = 1
    schema = {"$ref": "#/$defs/p0", "$defs": parts}
    compiled = compile_schema(schema, shallow=True)
    assert compiled.level.deep < 10
    assert compiled.automaton.matches('["p0",["p3"],["p8",["p1"]]]') and not compiled.automaton.matches('["p0",["q"]]')


def test_formats_without_an_automaton_are_annotations():
    compiled = compile_schema({"properties": {"a": {"format": "regex"}, "b": {"format": "date"}}})
    assert compiled.annotations == ("format@#/properties/a/format",)
    assert compile_schema({"format": "date"}, formats=False).automaton.matches('"x"')


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "nothing"},
        {"$ref": "#/no/where"},
        {"allOf": []},
        {"minLength": -1},
        {"required": "a"},
        5,
        {"properties": []},
        "{",
        {"minimum": float("inf")},
        {"minLength": float("nan")},
        '{"maximum": 1e999}',
        '{"not":' * 100_000 + "1" + "}" * 100_000,
    ],
)
def test_wrong_schemas_are_refused(schema):
    with pytest.raises(InvalidSchema):
        compile_schema(schema)


def test_a_budget_is_kept():
    with pytest.raises(TooLarge):
        compile_schema({"type": "object"}, budget=Budget(states=50))


def test_long_strings_are_counted_by_the_counter():
    compiled = compile_schema({"type": "string", "maxLength": 4096})
    assert compiled.automaton.counters is not None and compiled.automaton.num_states < 30
    short = compile_schema({"type": "string", "maxLength": 4})
    assert short.automaton.counters is None
