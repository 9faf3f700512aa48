"""Grammars: regexes, choices and JSON Schemas as automata over bytes.

regex.compile_regex(pattern) -> ByteAutomaton      the whole output matches an ECMA-262 pattern
literals.choice(texts) -> ByteAutomaton            the output is one of some texts
schema.compile_schema(schema) -> CompiledSchema    the output is a JSON text that is valid under a schema
"""
