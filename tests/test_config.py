"""Configurations: what is written reads back equal, and every mistake is named with its key."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

import pytest

from cascadeseg.config import Limits, check_limits, dump, load
from cascadeseg.errors import ConfigError


@dataclass(frozen=True)
class Network:
    widths: tuple[int, ...] = (16, 32, 64)
    stride: tuple[int, int, int] = (8, 8, 8)
    norm: Literal["batch", "instance"] = "batch"
    dropout: float = 0.0


@dataclass(frozen=True)
class Loss:
    name: str
    weight: float = 1.0


@dataclass(frozen=True)
class Recipe:
    steps: int
    network: Network = field(default_factory=Network)
    losses: tuple[Loss, ...] = ()
    weights: dict[str, float] = field(default_factory=dict)
    data: Path | None = None
    checkpointing: bool = True
    patch: int | tuple[int, int, int] = 96
    title: str = ""

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError("steps must be positive")


def test_a_full_config_survives_dump_and_load(tmp_path: Path) -> None:
    recipe = Recipe(
        steps=1000,
        network=Network(widths=(8,), norm="instance", dropout=1e-7),
        losses=(Loss("dice"), Loss("cross entropy", math.inf)),
        weights={"left lung": 2.0, "right": 0.1},
        data=Path("/data/with space/ä"),
        checkpointing=False,
        patch=(96, 96, 128),
        title='quotes " and \\ and \n and \x7f',
    )
    path = tmp_path / "recipe.toml"
    path.write_text(dump(recipe), encoding="utf-8")
    assert load(path, Recipe) == recipe
    assert load({"steps": 3}, Recipe) == load({}, Recipe, ["steps=3"]) == Recipe(3)


def test_dump_is_readable() -> None:
    assert dump(Network()).splitlines() == [
        "widths = [16, 32, 64]",
        "stride = [8, 8, 8]",
        'norm = "batch"',
        "dropout = 0.0",
    ]


def test_none_that_toml_cannot_say_is_refused() -> None:
    @dataclass(frozen=True)
    class Odd:
        seed: int | None = 1

    with pytest.raises(TypeError, match="TOML has no None"):
        dump(Odd(None))


def test_overrides_are_toml_values_and_the_last_one_wins() -> None:
    given = {"steps": 1, "network": {"norm": "batch"}}
    recipe = load(
        given,
        Recipe,
        ["network.norm=instance", "network.widths=[1, 2]", "steps=5", "steps=6", "checkpointing=false"],
    )
    assert recipe == Recipe(6, Network(widths=(1, 2), norm="instance"), checkpointing=False)
    assert given == {"steps": 1, "network": {"norm": "batch"}}, "the caller's mapping is left alone"


def test_a_whole_number_is_a_number_but_true_is_not() -> None:
    dropout = load({"steps": 1}, Recipe, ["network.dropout=1"]).network.dropout
    assert (dropout, type(dropout)) == (1.0, float)
    with pytest.raises(ConfigError, match="true; expected a whole number"):
        load({"steps": True}, Recipe)


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        (
            "steps = 1\n[network]\nwidht = [3]",
            "R: network.widht: unknown key 'widht'; did you mean 'widths'?",
        ),
        (
            "steps = 1\n[network]\nzzz = 3",
            "R: network.zzz: unknown key 'zzz'; expected one of widths, stride, norm",
        ),
        ("step = 1", "R: step: unknown key 'step'; did you mean 'steps'?"),
        ("", "R: key 'steps' is missing"),
        ("steps = 1.5", "R: steps: 1.5; expected a whole number"),
        ("steps = 0", "R: steps must be positive"),
        ("steps = 1\nnetwork = 3", "R: network: 3; expected a section (a TOML table)"),
        (
            "steps = 1\nnetwork.stride = [8, 8]",
            "[8, 8]; expected a list of 3: a whole number, a whole number",
        ),
        ("steps = 1\nnetwork.widths = [8, 'a']", 'R: network.widths.1: "a"; expected a whole number'),
        (
            "steps = 1\nnetwork.norm = 'instanse'",
            'expected "batch" or "instance"; did you mean \'instance\'?',
        ),
        ("steps = 1\npatch = 'a'", '"a"; expected a whole number or a list of 3'),
        ("steps = 1\ndata = 3", "R: data: 3; expected a path in quotes"),
        ("steps = 1\nweights = {a = 'x'}", 'R: weights.a: "x"; expected a number'),
        ("steps = 1\nlosses = [{name = 'dice', wait = 1}]", "R: losses.0.wait: unknown key 'wait'"),
        ("steps = ", "R: not a TOML file: "),
    ],
)
def test_mistakes_in_a_file_are_named(tmp_path: Path, toml: str, message: str) -> None:
    path = tmp_path / "R"
    path.write_text(toml, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load(path, Recipe)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("network.norn=batch", "--set network.norn=batch: unknown key 'norn'; did you mean 'norm'?"),
        ("steps=many", '--set steps=many: "many"; expected a whole number'),
        ("steps", "--set steps: not an override; expected section.key=value"),
        ("=3", "--set =3: not an override"),
        ("steps.more=3", "--set steps.more=3: 'steps' is a value, not a section"),
        ("network={norn=1}", "--set network={norn=1}: unknown key 'norn'"),
    ],
)
def test_mistakes_in_an_override_name_the_override(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load({"steps": 1}, Recipe, [override])
    assert message in str(caught.value)


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.toml: no such file"):
        load(tmp_path / "nothing.toml", Recipe)
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path, Recipe)


def test_limits_are_held_wherever_a_number_comes_from(tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Limited:
        network: Network = field(default_factory=Network)
        steps: int = 1
        LIMITS: ClassVar[Limits] = {"1 or more": (lambda n: n >= 1, "steps network.widths")}

    assert load({"steps": 3}, Limited) == Limited(steps=3)
    path = tmp_path / "R"
    path.write_text("[network]\nwidths = [8, 0]", encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load(path, Limited)
    assert str(caught.value) == f"{path}: network.widths: [8, 0]; expected 1 or more"
    with pytest.raises(ConfigError, match=r"^--set steps=0: 0; expected 1 or more$"):
        load({"steps": 5}, Limited, ["steps=0"])
    with pytest.raises(ConfigError, match=r"^steps: 0; expected 1 or more$"):
        check_limits(Limited(steps=0))
