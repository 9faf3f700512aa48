"""Bytes that a compiled program moves between memory and the cores, counted from its text.

XLA's own `cost_analysis` counts the body of a loop once; here the layer loop counts as often as it runs. An instruction
moves its operands and its results, except that

- what lies in on-chip memory (`S(1)` on TPUs) moves nothing,
- a fusion that slices an operand (a layer's weights out of the stack) moves the slice,
- an in-place update moves the update,
- cuBLAS' workspace, its last result, moves nothing: how much of it is used is not in the text,
- of a conditional the cheapest branch counts: greedy sampling without penalties, the common path,
- other loops than the layers' count once: how often they run is not in the text,
- the page pool counts nothing where a kernel takes it: how much of it is read depends on the lengths of the rows, which
  the caller adds.
"""

import dataclasses
import math
import re

from jaxkv.capacity.hlo import ENTRY, Array, Instruction, Loop, Module

_FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id", "iota",
    "optimization-barrier", "add-dependency", "domain",
}  # fmt: skip
_SLICES = ("dynamic-slice", "slice", "gather")
_LOOKS_THROUGH = ("bitcast", "convert", "copy", "reshape", "transpose")


def step_bytes(module: Module, layers: Loop | None, pool_elements: int) -> int:
    """Bytes of one run of the program, in which every loop but `layers` runs once; the pool has `pool_elements`."""
    return _Counter(module, layers, pool_elements).computation(ENTRY)


class _Counter:
    def __init__(self, module: Module, layers: Loop | None, pool_elements: int) -> None:
        self._module, self._layers, self._pool_elements = module, layers, pool_elements

    def computation(self, name: str) -> int:
        lines = {line.name: line for line in self._module.computations[name]}
        return sum(self._instruction(line, lines) for line in lines.values())

    def _instruction(self, line: Instruction, lines: dict[str, Instruction]) -> int:
        if line.op in _FREE or line.op.endswith(("-done", "-update")):
            return 0
        called = self._module.calls(line)
        if line.op == "while":
            loop = self._module.loop(line)
            trips = loop.trips if self._layers is not None and loop.body == self._layers.body else 1
            return (trips or 1) * self.computation(loop.body)
        if line.op == "conditional":
            return min((self.computation(name) for name in called), default=0)
        if line.op in ("call", "call-start", "async-start") or (line.op == "custom-call-start" and called):
            return sum(self.computation(name) for name in called)
        if line.op in ("copy-start", "slice-start", "dynamic-slice-start"):
            target = line.result[0] if line.op == "copy-start" else line.result[-2]
            source = [array for name in line.operands[:1] for array in _result(lines, name)]
            return target.num_bytes * ((target.space == 0) + any(array.space == 0 for array in source))
        if line.op.endswith("-start"):
            line = _synchronous(line, lines)
        if line.op.startswith(_SLICES):
            return 2 * _moved(line.result)
        if line.op == "dynamic-update-slice":
            return 2 * _moved(_result(lines, line.operands[1]))
        if line.op == "scatter":
            return 2 * _moved(_result(lines, line.operands[-1]))
        if line.op == "fusion":
            return self._fusion(line, lines, called[0])
        inside = _aliased(line)
        operands = [_result(lines, name) for i, name in enumerate(line.operands) if i not in inside.values()]
        if line.op == "custom-call":
            operands = [arrays for arrays in operands if not self._is_pool(arrays)]
        made = tuple(array for i, array in enumerate(line.result) if i not in inside)
        return sum(map(_moved, operands)) + _moved(made[:-1] if _has_workspace(line) else made)

    def _is_pool(self, arrays: tuple[Array, ...]) -> bool:
        return [math.prod(array.shape) for array in arrays] == [self._pool_elements]

    def _fusion(self, line: Instruction, lines: dict[str, Instruction], called: str) -> int:
        body = self._module.computations[called]
        root = next(each for each in body if each.is_root)
        updates = _updates(body, root)
        reads = 0
        for i, name in enumerate(line.operands):
            arrays = _result(lines, name)
            if any(array.space for array in arrays):
                continue
            reads += min(_moved(arrays), self._used(called, i))
        if updates is not None:
            return reads + updates
        return reads + _moved(line.result[:-1] if _has_workspace(root) else line.result)

    def _used(self, computation: str, number: int) -> int:
        """Bytes a fused computation reads of its parameter `number`: all of it, or the slices it takes."""
        body = self._module.computations[computation]
        lines = {line.name: line for line in body}
        parameter = next(line for line in body if line.op == "parameter" and line.attributes == str(number))
        whole = sum(array.num_bytes for array in parameter.result)
        total, stack = 0, [parameter.name]
        while stack:
            name = stack.pop()
            for user in (line for line in body if name in line.operands):
                if user.op.startswith(_SLICES) and user.operands[0] == name:
                    total += sum(array.num_bytes for array in user.result)
                elif user.op in ("dynamic-update-slice", "scatter") and user.operands[0] == name:
                    continue  # written in place
                elif not user.is_root and (user.op in _LOOKS_THROUGH or _aliased(user)):
                    stack.append(user.name)
                elif user.op == "fusion":
                    inner = self._module.calls(user)[0]
                    total += sum(self._used(inner, i) for i, operand in enumerate(user.operands) if operand == name)
                else:
                    total += sum(array.num_bytes for array in lines[name].result)
        return min(total, whole)


def _updates(body: list[Instruction], root: Instruction) -> int | None:
    """Bytes written by a fusion that ends in an in-place update; None for others."""
    lines = {line.name: line for line in body}
    while root.op in _LOOKS_THROUGH and root.operands:
        root = lines[root.operands[0]]
    if root.op == "dynamic-update-slice":
        return sum(array.num_bytes for array in lines[root.operands[1]].result)
    if root.op == "scatter":
        return sum(array.num_bytes for array in lines[root.operands[-1]].result)
    return None


def _synchronous(line: Instruction, lines: dict[str, Instruction]) -> Instruction:
    """`x-start`, whose result is its operands, the results and some flags, as the `x` it stands for."""
    num_operands = sum(len(_result(lines, name)) for name in line.operands)
    made = tuple(array for array in line.result[num_operands:] if array.shape)
    if line.op == "all-reduce-start":  # its result is the result alone
        made = line.result
    return dataclasses.replace(line, op=line.op.removesuffix("-start"), result=made)


def _aliased(line: Instruction) -> dict[int, int]:
    """Result -> operand that it takes the place of, of a kernel."""
    table = re.search(r"output_to_operand_aliasing=\{(.*?\))\}", line.attributes)
    if not table:
        return {}
    pairs = re.findall(r"\{(\d*)\}: \((\d+),", table.group(1))
    return {int(result or 0): int(operand) for result, operand in pairs}


def _has_workspace(line: Instruction) -> bool:
    return line.op == "custom-call" and "__cublas" in line.attributes


def _result(lines: dict[str, Instruction], name: str) -> tuple[Array, ...]:
    return lines[name].result if name in lines else ()


def _moved(arrays: tuple[Array, ...]) -> int:
    return sum(array.num_bytes for array in arrays if not array.space)
