"""JSON Schema as automata: `compile_schema`."""

from jaxkv.grammar.schema.compile import CompiledSchema, compile_schema

__all__ = ["CompiledSchema", "compile_schema"]
