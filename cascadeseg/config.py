"""Typed configuration: frozen dataclasses read from TOML, strictly.

A key that the dataclass does not have, or a value of another type, is a `ConfigError` that names the key and
says what was meant. `dump` writes what `load` reads back equal. ``--set section.key=value`` overrides reach
every key.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import tomllib
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

from cascadeseg.errors import ConfigError

T = TypeVar("T")
Keys = tuple[str, ...]
"""Where a value stands: the keys of the tables around it and its own."""
Limits = Mapping[str, tuple[Callable[[float], bool], str]]
"""What numbers may be, in words: whether one is, and the dotted keys that it holds for, with spaces between."""

NAMES = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text in quotes",
    Path: "a path in quotes",
}


def load(source: str | Path | Mapping[str, Any], into: type[T], overrides: Sequence[str] = ()) -> T:
    """The configuration that a TOML file (or a mapping of the same form) and overrides describe.

    Args:
        source: a TOML file, or its tables as a mapping.
        into: a dataclass; its fields may be numbers, text, `Path`, ``Literal``, tuples, ``X | None``,
            ``dict[str, X]`` and further dataclasses. A key that is left out takes the field's default. Its `Limits`,
            if it has some as its ``LIMITS``, are held.
        overrides: ``section.key=value`` each, the value in TOML (``[64, 64]``, ``true``, ``1e-3``); what is
            no TOML value is taken as text, so ``optimizer.name=adamw`` needs no quotes. Later ones win.

    Raises:
        ConfigError: the file cannot be read, a key is unknown or missing, or a value has the wrong type or is beyond
            its limits.
    """
    if isinstance(source, Mapping):
        tables, name = _copied(source), "config"
    else:
        tables, name = _read_toml(Path(source)), str(source)
    origins: dict[Keys, str] = {}
    for override in overrides:
        keys = _apply(tables, override)
        origins[keys] = f"--set {override}"
    reader = _Reader(name, origins)
    config = typing.cast(T, reader.dataclass(into, tables, ()))
    check_limits(config, reader.where)
    return config


def check_limits(config: object, where: Callable[[Keys], str] = ".".join) -> None:
    """Refuses numbers that are not what the ``LIMITS`` of a configuration allow; of a list, each must be.

    Args:
        config: a dataclass.
        where: what an error names for a value's keys.

    Raises:
        ConfigError: of the first such number.
    """
    limits: Limits = getattr(config, "LIMITS", {})
    for expected, (allowed, dotted) in limits.items():
        for key in dotted.split():
            value = attrgetter(key)(config)
            numbers = value if isinstance(value, tuple) else (value,)
            if not numbers or not all(map(allowed, numbers)):
                raise ConfigError(where(tuple(key.split("."))), _shown(value), expected)


def dump(config: object) -> str:
    """The TOML text that `load` reads back as an equal configuration."""
    return "\n".join(_dumped_table(config, ())).strip() + "\n"


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(path, "no such file") from None
    except OSError as error:
        raise ConfigError(path, f"cannot be read ({error.strerror})") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(path, f"not a TOML file: {error}") from None


def _copied(value: Any) -> Any:
    """Tables copied, so that overrides never write into the caller's mapping."""
    return {key: _copied(inner) for key, inner in value.items()} if isinstance(value, Mapping) else value


def _apply(tables: dict[str, Any], override: str) -> Keys:
    """Write one ``section.key=value`` into the tables; returns its keys."""
    dotted, equals, text = override.partition("=")
    keys = tuple(key.strip() for key in dotted.split("."))
    if not equals or not all(keys):
        raise ConfigError(f"--set {override}", "not an override", "section.key=value")
    table = tables
    for key in keys[:-1]:
        inner = table.setdefault(key, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"--set {override}", f"'{key}' is a value, not a section")
        table = inner
    table[keys[-1]] = _toml_value(text.strip())
    return keys


def _toml_value(text: str) -> Any:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    # A line break in the text could smuggle in further keys.
    return parsed["value"] if len(parsed) == 1 else text


@dataclasses.dataclass(frozen=True)
class _Reader:
    """Turns parsed TOML into typed values; holds what its error messages need.

    Attributes:
        name: the file that the tables came from.
        origins: for keys that an override wrote, the override as it was typed.
    """

    name: str
    origins: Mapping[Keys, str]

    def where(self, keys: Keys) -> str:
        for end in range(len(keys), 0, -1):
            if keys[:end] in self.origins:
                return self.origins[keys[:end]]
        return f"{self.name}: {'.'.join(keys)}" if keys else self.name

    def dataclass(self, into: type[Any], table: Any, keys: Keys) -> Any:
        if not isinstance(table, dict):
            raise ConfigError(self.where(keys), _shown(table), "a section (a TOML table)")
        hints = typing.get_type_hints(into)
        fields = {field.name: field for field in dataclasses.fields(into) if field.init}
        for key in table:
            if key not in fields:
                raise self._unknown(key, (*keys, key), list(fields))
        missing = [name for name, field in fields.items() if name not in table and _is_required(field)]
        if missing:
            raise ConfigError(self.where(keys), f"key '{missing[0]}' is missing")
        values = {key: self.value(hints[key], value, (*keys, key)) for key, value in table.items()}
        try:
            return into(**values)
        except ValueError as error:  # a dataclass may check its values in __post_init__
            raise ConfigError(self.where(keys), str(error)) from None

    def _unknown(self, key: str, keys: Keys, known: list[str]) -> ConfigError:
        near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
        if near:
            return ConfigError(self.where(keys), f"unknown key '{key}'", remedy=f"did you mean '{near[0]}'?")
        return ConfigError(self.where(keys), f"unknown key '{key}'", f"one of {', '.join(known)}")

    def value(self, hint: Any, value: Any, keys: Keys) -> Any:
        origin, arguments = typing.get_origin(hint), typing.get_args(hint)
        if dataclasses.is_dataclass(hint):
            return self.dataclass(typing.cast(type[Any], hint), value, keys)
        if origin is typing.Literal:
            return self._literal(arguments, value, keys)
        if origin in (typing.Union, types.UnionType):
            return self._union(hint, arguments, value, keys)
        if origin is tuple:
            return self._tuple(hint, arguments, value, keys)
        if origin is dict:
            if not isinstance(value, dict):
                raise self._wrong(hint, value, keys)
            return {key: self.value(arguments[1], inner, (*keys, key)) for key, inner in value.items()}
        return self._scalar(hint, value, keys)

    def _scalar(self, hint: Any, value: Any, keys: Keys) -> Any:
        if hint is float and type(value) in (int, float):
            return float(value)
        if hint is Path and isinstance(value, str):
            return Path(value)
        if type(value) is hint:  # `isinstance` would let true pass for a whole number
            return value
        raise self._wrong(hint, value, keys)

    def _literal(self, choices: tuple[Any, ...], value: Any, keys: Keys) -> Any:
        for choice in choices:
            if type(choice) is type(value) and choice == value:
                return choice
        near = difflib.get_close_matches(str(value), [str(choice) for choice in choices], n=1)
        remedy = f"did you mean '{near[0]}'?" if near else ""
        raise ConfigError(self.where(keys), _shown(value), _expected(typing.Literal[choices]), remedy)

    def _union(self, hint: Any, choices: tuple[Any, ...], value: Any, keys: Keys) -> Any:
        choices = tuple(choice for choice in choices if choice is not type(None))
        if len(choices) == 1:  # X | None: X's own message says more
            return self.value(choices[0], value, keys)
        for choice in choices:
            try:
                return self.value(choice, value, keys)
            except ConfigError:
                continue
        raise self._wrong(hint, value, keys)

    def _tuple(self, hint: Any, arguments: tuple[Any, ...], value: Any, keys: Keys) -> Any:
        if not isinstance(value, (list, tuple)):
            raise self._wrong(hint, value, keys)
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            arguments = arguments[:1] * len(value)
        if len(arguments) != len(value):
            raise self._wrong(hint, value, keys)
        indexed = enumerate(zip(arguments, value, strict=True))
        return tuple(self.value(inner, item, (*keys, str(index))) for index, (inner, item) in indexed)

    def _wrong(self, hint: Any, value: Any, keys: Keys) -> ConfigError:
        return ConfigError(self.where(keys), _shown(value), _expected(hint))


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _shown(value: Any) -> str:
    """A value as an error message shows it, in TOML's spelling."""
    return "a section" if isinstance(value, dict) else _dumped_value(value)


def _expected(hint: Any) -> str:
    """A type in words."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return " or ".join(_dumped_value(choice) for choice in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_expected(choice) for choice in arguments if choice is not type(None))
    if origin is tuple:
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return f"a list, each item {_expected(arguments[0])}"
        return f"a list of {len(arguments)}: {', '.join(_expected(inner) for inner in arguments)}"
    if origin is dict or dataclasses.is_dataclass(hint):
        return "a section (a TOML table)"
    return NAMES.get(hint, str(hint))


def _dumped_table(config: Any, keys: Keys) -> list[str]:
    """The lines of one dataclass or dict: its values first, then its tables, as TOML wants them."""
    plain: list[str] = []
    tables: list[str] = []
    for key, value in _items(config):
        if dataclasses.is_dataclass(value) or isinstance(value, dict):
            inner = (*keys, key)
            header = ".".join(_dumped_key(part) for part in inner)
            tables += ["", f"[{header}]", *_dumped_table(value, inner)]
        else:
            plain.append(f"{_dumped_key(key)} = {_dumped_value(value)}")
    return plain + tables


def _items(config: Any) -> list[tuple[str, Any]]:
    """The keys and values to write; a None is left out, and so must be the field's default."""
    if isinstance(config, dict):
        return list(config.items())
    items = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if value is not None:
            items.append((field.name, value))
        elif field.default is not None:
            raise TypeError(f"{type(config).__name__}.{field.name}: TOML has no None, so None must be its default")
    return items


def _dumped_key(key: str) -> str:
    bare = key and all(c.isascii() and (c.isalnum() or c in "-_") for c in key)
    return key if bare else _dumped_text(key)


def _dumped_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (str, Path)):
        return _dumped_text(str(value))
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_dumped_value(item) for item in value)}]"
    if isinstance(value, dict) or (dataclasses.is_dataclass(value) and not isinstance(value, type)):
        pairs = [f"{_dumped_key(key)} = {_dumped_value(inner)}" for key, inner in _items(value)]
        return f"{{{', '.join(pairs)}}}"
    return str(value)  # a TOML date, which no config has: only ever shown in a message


def _dumped_text(text: str) -> str:
    # JSON's escapes are TOML's, but for the one control character that JSON leaves as it is.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
