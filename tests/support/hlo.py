# SPDX-License-Identifier: Apache-2.0
"""Loops that exchange something between devices, and what XLA's runtime for CPU may run beside them."""

import math
import re

from dsv4_jax.roofline import COLLECTIVES

_COLLECTIVE = re.compile(rf"= (.*?) ({'|'.join(sorted(COLLECTIVES))})(?:-start)?\(")
_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4}


def collectives(program: str) -> list[tuple[str, int, tuple[int, ...]]]:
    """List every collective of a compiled program: its kind, bytes of its result on a device, its largest shape."""
    found = []
    for line in program.splitlines():
        if match := _COLLECTIVE.search(line):
            arrays = [
                (_BYTES.get(kind, 4), tuple(int(n) for n in dims.split(",") if n))
                for kind, dims in re.findall(r"(\w+)\[([\d,]*)\]", match[1])
            ]
            size = sum(width * math.prod(shape) for width, shape in arrays)
            found.append((match[2], size, max((shape for _, shape in arrays), key=math.prod)))
    return found


def loops(program: str) -> dict[str, list[str]]:
    """Loops (calls, branches) of a compiled program that have collectives: of each those that may run beside it.

    These come later and do not need it. XLA's runtime for CPU starts them while the loop still runs, at another
    point of it on every device, and all of them may wait forever. (What comes before a loop is over when it begins.)
    """
    computations: dict[str, list[tuple[str, str, set[str]]]] = {}
    for line in program.splitlines():
        names = re.findall(r"%([\w.-]+)", line)
        if names and line.endswith("{") and not line.startswith(" "):
            computations[names[0]] = lines = []
        elif names and " = " in line:
            lines.append((names[0], line, set(names[1:])))
    known: dict[str, bool] = {}

    def calls(names: set[str]) -> bool:
        """Whether there are collectives in a computation of these names."""
        for name in names & computations.keys() - known.keys():
            known[name] = any(moves(line, names) for _, line, names in computations[name])
        return any(known.get(name) for name in names)

    def moves(line: str, names: set[str]) -> bool:
        return calls(names) or bool(collectives(line))

    found: dict[str, list[str]] = {}
    for lines in computations.values():
        for i, (loop, _, names) in enumerate(lines):
            if calls(names):
                found[loop], after = [], {loop}
                for name, line, names in lines[i + 1 :]:
                    if names & after:
                        after.add(name)
                    elif moves(line, names):
                        found[loop].append(name)
    return found
