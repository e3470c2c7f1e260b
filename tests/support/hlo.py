# SPDX-License-Identifier: Apache-2.0
"""Loops that exchange something between devices, and what XLA's runtime for CPU may run beside them."""

import re

from dsv4_jax.plan import collectives


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
