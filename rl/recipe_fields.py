"""Frozen dataclasses from TOML and `KEY=VALUE`, with errors that name the dotted key."""

import dataclasses
import json
import tomllib
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from glm_jax.config_fields import Problems, describe, is_int, is_number, nearest
from glm_jax.errors import GlmError


def bounded(
    default: Any,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
) -> Any:
    """A field with a default whose values are at least, above, or at most, a number."""
    bounds = {"least": least, "above": above, "most": most}
    return dataclasses.field(default=default, metadata=bounds)


def keys(cls: type, prefix: str = "") -> dict[str, tuple[Any, Mapping[str, Any]]]:
    """Type and bounds of every dotted key of a dataclass of dataclasses."""
    out: dict[str, tuple[Any, Mapping[str, Any]]] = {}
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        name = f"{prefix}{field.name}"
        if dataclasses.is_dataclass(kind := hints[field.name]):
            assert isinstance(kind, type)
            out |= keys(kind, f"{name}.")
        else:
            out[name] = kind, field.metadata
    return out


def flatten(values: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted keys and values of nested dataclasses or tables; lists as TOML has them."""
    if dataclasses.is_dataclass(values):
        values = {f.name: getattr(values, f.name) for f in dataclasses.fields(values)}
    out: dict[str, Any] = {}
    for name, value in values.items():
        if dataclasses.is_dataclass(value) or isinstance(value, dict):
            out |= flatten(value, f"{prefix}{name}.")
        else:
            out[f"{prefix}{name}"] = list(value) if isinstance(value, tuple) else value
    return out


def build[T](cls: type[T], flat: Mapping[str, Any], problems: Problems) -> T | None:
    """The dataclass of these dotted keys; None if `problems`, to which mistakes are added, has any.

    Absent keys keep their defaults.
    """
    known = keys(cls)
    for key, value in flat.items():
        if key not in known:
            sections = {name.rpartition(".")[0] for name in known} - {""}
            reason = "is a section" if key in sections else "is unknown"
            problems[key] = describe(key, value, reason, f"{nearest(key, known)}correct the key")
        elif problem := _problem(value, *known[key]):
            problems[key] = describe(key, value, *problem)
    return None if problems else _make(cls, flat, "")


def _make(cls: Any, flat: Mapping[str, Any], prefix: str) -> Any:
    hints = typing.get_type_hints(cls)
    values = {}
    for field in dataclasses.fields(cls):
        name, kind = f"{prefix}{field.name}", hints[field.name]
        if dataclasses.is_dataclass(kind):
            values[field.name] = _make(kind, flat, f"{name}.")
        elif name in flat:
            value = flat[name]
            if kind is float:
                value = float(value)
            values[field.name] = tuple(value) if isinstance(value, list) else value
    return cls(**values)


def _problem(value: Any, kind: Any, bounds: Mapping[str, Any]) -> tuple[str, str] | None:
    """Reason and remedy, if the value is not of this kind or out of bounds."""
    if typing.get_origin(kind) is Literal:
        choices = typing.get_args(kind)
        if value in choices:
            return None
        hint = nearest(value, choices) if isinstance(value, str) else ""
        return "is no choice", f"{hint}use {', '.join(map(str, choices))}"
    if typing.get_origin(kind) is tuple:
        sound = isinstance(value, list | tuple) and all(isinstance(x, str) for x in value)
        return None if sound else ("is no list of strings", 'write ["...", "..."]')
    checks = {int: (is_int, "a whole number"), float: (is_number, "a number")}
    sound, what = checks.get(kind, (lambda value: isinstance(value, kind), "a string"))
    if not sound(value):
        return f"is not {what}", f"give {what}"
    if is_number(value):
        if not abs(value) < 2**63:
            return "is not finite, or too large", f"give {what} below 2^63"
        if (least := bounds.get("least")) is not None and value < least:
            return f"is below {least}", f"give at least {least}"
        if (above := bounds.get("above")) is not None and value <= above:
            return f"is not above {above}", "raise it"
        if (most := bounds.get("most")) is not None and value > most:
            return f"is above {most}", f"give at most {most}"
    return None


def read_toml(path: Path) -> dict[str, Any]:
    """Dotted keys of a TOML file. Raises `GlmError` if it cannot be read."""
    try:
        return flatten(tomllib.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise GlmError(f"{path}: cannot be read ({error}); give a recipe's TOML file") from error
    except ValueError as error:
        raise GlmError(f"{path}: is no TOML ({error}); correct the file") from error


def read_overrides(words: Sequence[str]) -> dict[str, Any]:
    """`KEY=VALUE` words; a value that is no TOML is a string.

    Raises:
        GlmError: a word without `=`, or a key given twice.
    """
    out: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or not key:
            raise GlmError(f"{word!r}: is no KEY=VALUE; write for example rl.steps=6")
        if key in out:
            raise GlmError(f"{key}: is given twice, as {out[key]!r} and {text!r}; give it once")
        try:
            (out[key],) = tomllib.loads(f"x = {text}").values()
        except ValueError:
            out[key] = text
    return out


def to_toml(values: Any) -> str:
    """TOML of nested dataclasses; `read_toml` of it gives the same keys."""
    return "\n".join(_lines(values)) + "\n"


def _lines(values: Any) -> Iterator[str]:
    sections: dict[str, list[str]] = {}
    for key, value in flatten(values).items():
        section, _, name = key.rpartition(".")
        text = repr(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False)
        sections.setdefault(section, []).append(f"{name} = {text}")
    yield from sections.pop("", [])
    for section, lines in sections.items():
        yield from ("", f"[{section}]", *lines)
