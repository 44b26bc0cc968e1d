"""Small damage to texts, bytes and JSON values, at random."""

from __future__ import annotations

import copy
import json
import random
import re
from typing import Any

NASTY: tuple[Any, ...] = (
    *(0, -1, 1, 2, 7, 10**6, 2**31, 2**63 - 1, 2**63, 10**30, -(10**30), 0.5, -0.0, 1e-320, 1e308, -1e308),
    *(
        True,
        False,
        None,
        "",
        " ",
        "0",
        "-1",
        "nan",
        "inf",
        "x",
        "a" * 3000,
        "a\nb",
        "\0",
        "\ud800",
        "é",
        "../..",
        "/dev/null",
    ),
    *([], {}, [[]], [None], {"": {}}, [1, "x"], {"a": [1]}),
)
"""Values that are right somewhere and wrong nearly everywhere. JSON can write all of them."""
_CHARACTERS = "0123456789.,:;+-=>()[]{}\"'#FBWOLSx \n\t\r\0é\u0661\ufeff"


def text(source: str, rng: random.Random) -> str:
    """One to three mutations of characters, words or lines."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        source = rng.choice((_character, _word, _number, _line, _action, _action, _action))(source, rng)
    return source


def _character(source: str, rng: random.Random) -> str:
    at = rng.randrange(len(source) + 1)
    return source[:at] + rng.choice(("", rng.choice(_CHARACTERS))) + source[at + rng.randrange(2) :]


def _word(source: str, rng: random.Random) -> str:
    """A word is left out, doubled, swapped with another or replaced by another's copy."""
    parts = re.split(r"([\s,]+)", source)
    words = range(0, len(parts), 2)
    a, b = rng.choice(words), rng.choice(words)
    changes = (("", parts[b]), (f"{parts[a]} {parts[a]}", parts[b]), (parts[b], parts[a]), (parts[b], parts[b]))
    new_a, new_b = rng.choice(changes)
    parts[b], parts[a] = new_b, new_a
    return "".join(parts)


def _action(source: str, rng: random.Random) -> str:
    """An action of a schedule is left out, doubled, moved behind another, swapped with it, or becomes another op."""
    matches = list(re.finditer(r"\b[A-Z]+\d+\.\d+|\b\d+[FIWB]\d+", source))
    if not matches:
        return source
    a, b = sorted(rng.choices(matches, k=2), key=lambda m: m.start())
    before, between, after = source[: a.start()], source[a.end() : b.start()], source[b.end() :]
    kind = rng.randrange(4)
    if kind == 0:
        return before + source[a.end() :]
    if kind == 1 or a is b:
        return before + a[0] + (" ", ",")[a[0][0].isdigit()] + source[a.start() :]
    if kind == 2:
        return before + b[0] + between + a[0] + after
    return before + re.sub("[A-Z]+", rng.choice(("F", "B", "W", "BW", "O", "L", "S", "I")), a[0]) + source[a.end() :]


def _number(source: str, rng: random.Random) -> str:
    matches = list(re.finditer(r"\d+", source))
    if not matches:
        return source
    number = rng.choice(matches)
    new = rng.choice(
        (int(number[0][:18]) + 1, max(0, int(number[0][:18]) - 1), rng.randrange(8), 10**6, 10**19, -1, "007")
    )
    return f"{source[: number.start()]}{new}{source[number.end() :]}"


def _line(source: str, rng: random.Random) -> str:
    """A line is left out, doubled, swapped with another; or the text ends early."""
    lines = source.split("\n")
    a, b = rng.randrange(len(lines)), rng.randrange(len(lines))
    kind = rng.randrange(4)
    if kind == 0:
        del lines[a]
    elif kind == 1:
        lines.insert(a, lines[b])
    elif kind == 2:
        lines[a], lines[b] = lines[b], lines[a]
    else:
        return source[: rng.randrange(len(source) + 1)]
    return "\n".join(lines)


def value(source: Any, rng: random.Random) -> Any:
    """One to three mutations of a JSON value: somewhere in it something is replaced, left out, doubled or renamed."""
    source = copy.deepcopy(source)
    for _ in range(rng.choice((1, 1, 2, 3))):
        source = _once(source, rng)
    return source


def _once(source: Any, rng: random.Random) -> Any:
    node, path = source, []
    while isinstance(node, (dict, list)) and node and (not path or rng.random() < 0.8):
        path.append((node, rng.choice([*node] if isinstance(node, dict) else range(len(node)))))
        node = node[path[-1][1]]
    if not path:
        return rng.choice(NASTY)
    parent, key = path[-1]
    kind = rng.randrange(4)
    if kind == 0:
        del parent[key]
    elif kind == 1 and isinstance(parent, dict):
        parent[rng.choice(("x", "", "format", f"{key} ", "a" * 300))] = parent.pop(key)
    elif kind == 1:
        parent.insert(key, copy.deepcopy(rng.choice(parent)))
    else:
        near = isinstance(node, (int, float)) and not isinstance(node, bool) and rng.random() < 0.5
        parent[key] = rng.choice((node + 1, node - 1, -node, node * 1000)) if near else copy.deepcopy(rng.choice(NASTY))
    return source


def as_json(source: Any) -> bytes:
    """Write JSON as other programs do: NaN and infinity in words."""
    return json.dumps(source).encode()


def as_bytes(source: str) -> bytes:
    return source.encode("utf-8", "surrogatepass")
