"""The values of a formula that allows only few, for `uniqueItems`."""

from jaxkv.grammar.automaton import ByteAutomaton
from jaxkv.grammar.literals import choice
from jaxkv.grammar.schema.formula import ARRAY, FALSE, NULL, NUMBER, OBJECT, STRING, TRUE, Formula, Pool
from jaxkv.grammar.schema.normal import Normaliser

_MOST = 8  # a state for each subset


def domain(pool: Pool, normaliser: Normaliser, formula: Formula) -> list[Formula] | None:
    """One formula for each value that the formula allows; None if there are more than 8, or it is not seen how many."""
    values: list[Formula] = []
    for of_type in (NULL, TRUE, FALSE):
        local = normaliser.restrict(formula, of_type)
        if local is pool.true:
            values.append(pool.type(of_type))
        elif local is not pool.false:
            return None
    for of_type in (ARRAY, OBJECT):
        if normaliser.restrict(formula, of_type) is not pool.false:
            return None
    numbers: set = set()
    strings: set[bytes] = set()
    for of_type in (NUMBER, STRING):
        for clause in normaliser.clauses(normaliser.restrict(formula, of_type)):
            atoms = list(clause)
            if of_type == NUMBER:
                listed = [set(atom.args[0]) for atom in atoms if atom.kind == "numbers"]
                if not listed:
                    return None
                numbers |= set.intersection(*listed)
            else:
                listed = [
                    texts for atom in atoms if atom.kind == "pattern" and (texts := _texts(atom.args[0])) is not None
                ]
                if not listed:
                    return None
                strings |= set.intersection(*listed)
    values += [pool.all([pool.type(NUMBER), pool.atom("numbers", (number,))]) for number in sorted(numbers)]
    values += [pool.all([pool.type(STRING), pool.atom("pattern", choice([text]))]) for text in sorted(strings)]
    return values if len(values) <= _MOST else None


def _texts(automaton: ByteAutomaton) -> set[bytes] | None:
    """The texts that an automaton accepts, if they are few."""
    found: set[bytes] = set()
    stack = [(automaton.start, b"")]
    steps = 0
    while stack:
        state, text = stack.pop()
        steps += 1
        if steps > 2000:
            return None
        if automaton.accepting[state]:
            found.add(text)
            if len(found) > _MOST:
                return None
        for byte in range(256):
            after = int(automaton.next[state, automaton.byte_class[byte]])
            if after:
                stack.append((after, text + bytes([byte])))
    return found
