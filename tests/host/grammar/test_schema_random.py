"""Random schemas and random instances: what the automaton says against what jsonschema says."""

import json

import jsonschema
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxkv.grammar.errors import TooLarge, UnsupportedSchema
from jaxkv.grammar.schema import compile_schema

NAMES = st.sampled_from(["a", "b", "c"])
SCALARS = st.sampled_from([None, True, False, 0, 1, 2, -1, 2.5, 1.0, "", "a", "ab", "abc"])
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3).map(lambda d: dict(sorted(d.items())))
    ),
    max_leaves=5,
)
TYPES = st.sampled_from(["null", "boolean", "integer", "number", "string", "array", "object"])
LEAVES = st.one_of(
    st.booleans(),
    st.builds(lambda name: {"type": name}, TYPES),
    st.builds(lambda value: {"const": value}, VALUES),
    st.builds(lambda values: {"enum": values}, st.lists(SCALARS, min_size=1, max_size=3)),
    st.builds(lambda low, high: {"minimum": low, "maximum": low + high}, st.integers(-1, 2), st.integers(0, 2)),
    st.builds(lambda low, high: {"minLength": low, "maxLength": low + high}, st.integers(0, 2), st.integers(0, 2)),
    st.sampled_from(
        [{"pattern": "^a"}, {"pattern": "b"}, {"multipleOf": 2}, {"maxItems": 1}, {"minItems": 2}, {"maxProperties": 1}]
    ),
    st.builds(lambda names: {"required": names}, st.lists(NAMES, min_size=1, max_size=2, unique=True).map(sorted)),
)


def _nest(inner):
    some = st.lists(inner, min_size=1, max_size=2)
    return st.one_of(
        st.builds(
            lambda parts: {"properties": dict(sorted(parts.items()))},
            st.dictionaries(NAMES, inner, min_size=1, max_size=2),
        ),
        st.builds(lambda a, rest: {"properties": {"a": a}, "additionalProperties": rest}, inner, inner),
        st.builds(lambda part: {"items": part}, inner),
        st.builds(lambda first, rest: {"prefixItems": [first], "items": rest}, inner, inner),
        st.builds(lambda part, low: {"contains": part, "minContains": low}, inner, st.integers(0, 2)),
        st.builds(lambda parts: {"anyOf": parts}, some),
        st.builds(lambda parts: {"allOf": parts}, some),
        st.builds(lambda parts: {"oneOf": parts}, some),
        st.builds(lambda part: {"not": part}, inner),
        st.builds(lambda a, b, c: {"if": a, "then": b, "else": c}, inner, inner, inner),
        st.builds(lambda name, part: {"dependentSchemas": {name: part}}, NAMES, inner),
        st.builds(
            lambda part, names: {"allOf": [part], "properties": {"c": True}, "unevaluatedProperties": names},
            inner,
            inner,
        ),
        st.builds(lambda part: {"patternProperties": {"^[ab]$": part}}, inner),
    )


SCHEMAS = st.recursive(LEAVES, _nest, max_leaves=4)


@given(SCHEMAS, st.lists(VALUES, min_size=8, max_size=12))
@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_no_invalid_instance_is_accepted_and_few_valid_ones_are_not(schema, values):
    try:
        automaton = compile_schema(schema).automaton
    except (UnsupportedSchema, TooLarge):
        return
    validator = jsonschema.Draft202012Validator(schema)
    for value in values:
        accepted = automaton.matches(json.dumps(value, separators=(",", ":")))
        valid = validator.is_valid(value)
        assert accepted <= valid, (schema, value)
        if not isinstance(value, dict | list) or (
            isinstance(value, list) and not any(isinstance(item, dict | list) for item in value)
        ):  # objects inside may be in another order than the schema's
            assert accepted == valid, (schema, value)
