"""Schedules of a config that are no family's: by the rules of ``[traverse]``, or from a function that it names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jaxpipe.errors import ConfigError, JaxpipeError
from jaxpipe.schedule import CostProfile, Schedule, Traversal, bidirectional, circular, generate, one_to_one, traverse
from jaxpipe.train.config import TrainConfig, load_config
from jaxpipe.train.schedule_source import relative_costs, source_of
from jaxpipe.train.settings.sections import PipelineConfig, TraverseConfig

PIPE = PipelineConfig(ranks=4, microbatches=6, schedule="traverse")


def drafted(pipe: PipelineConfig) -> Schedule:
    """Return the schedule of ``pipe`` for stages of equal costs."""
    source = source_of(pipe)
    return source.order(even(source.num_stages))


def even(num_stages: int) -> CostProfile:
    return relative_costs([1.0] * num_stages)


def config(*overrides: str) -> TrainConfig:
    return load_config(None, ["pipeline.schedule=traverse", "pipeline.microbatches=4", *overrides])


def test_rules_of_a_config() -> None:
    schedule = drafted(replace(PIPE, traverse=TraverseConfig(in_flight=(4, 3, 2, 1))))
    assert schedule.rows == generate("1f1b", 4, 6).rows
    loops = TraverseConfig("circular", "interleaved", "breadth:4", "depth:4")
    rules = Traversal("interleaved", forward="breadth:4", backward="depth:4")
    costs = even(8)
    assert drafted(replace(PIPE, chunks=2, traverse=loops)) == traverse(circular(4, 2), 6, rules, costs)
    flows = replace(PIPE, traverse=TraverseConfig("bidirectional", in_flight_per_stage=2))
    both = drafted(flows)
    assert both.placement == bidirectional(4)
    assert both == drafted(flows)


def test_rules_are_read_from_a_file_and_written_back(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        '[pipeline]\nschedule = "traverse"\nchunks = 2\n'
        '[traverse]\nplacement = "circular"\nfirst = "interleaved"\nforward = "breadth:4"\n'
        "in_flight = [8, 7, 6, 5]\nunits = [2, 1]\n"
    )
    loaded = load_config(path)
    assert loaded.pipeline.traverse == TraverseConfig(
        "circular", "interleaved", "breadth:4", in_flight=(8, 7, 6, 5), units=(2, 1)
    )
    assert TrainConfig.from_dict(loaded.to_dict()) == loaded
    path.write_text(loaded.to_toml())
    assert load_config(path, ["traverse.in_flight=3"]).pipeline.traverse.in_flight == 3


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("traverse.first=backwards", "did you mean 'backward'?"),
        ("traverse.forward=deep", "[traverse]: traversal: forward is 'deep'; want breadth, depth"),
        ("traverse.in_flight=0", "in_flight is 0; want a whole number"),
        ("traverse.units=[1,0]", "units is (1, 0); want two"),
        ("traverse.placement=ring", "expected one of 'one-to-one', 'circular'"),
        ("pipeline.schedule=travers", "did you mean 'traverse'?"),
        ("pipeline.schedule=a:b:c", "is no schedule"),
    ],
)
def test_rules_that_say_nothing(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(override)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_another_schedule_leaves_the_rules_out() -> None:
    """An override of the schedule is for good: the rules that the config had go with it."""
    other = config("traverse.in_flight=3").override(["pipeline.schedule=gpipe"])
    assert (other.pipeline.schedule, other.pipeline.traverse) == ("gpipe", TraverseConfig())
    assert TrainConfig.from_dict(other.to_dict()) == other


@pytest.mark.parametrize("rule", ["in_flight=3", "placement=v", "in_flight_per_stage=[1,2]", "units=[2,1]"])
def test_rules_that_nothing_follows(rule: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(f"traverse.{rule}", "pipeline.schedule=gpipe")
    assert "[traverse] is given, and pipeline.schedule is 'gpipe': set that to 'traverse'" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (TraverseConfig("v"), "placement v has 2 chunk(s) per rank, not 1"),
        (TraverseConfig(in_flight=(1, 2)), "in-flight=1,2 is for 2, not 4: give one a rank"),
    ],
)
def test_rules_that_do_not_fit(rules: TraverseConfig, message: str) -> None:
    with pytest.raises(JaxpipeError) as caught:
        drafted(replace(PIPE, traverse=rules))
    assert message in str(caught.value) and "\n" not in str(caught.value)


MODULE = """
from jaxpipe.schedule import CostProfile, Schedule, Traversal, circular, one_to_one, traverse

def towers(ranks, microbatches):
    return traverse(one_to_one(ranks), microbatches, Traversal("backward", in_flight=2))

def fixed():
    return traverse(one_to_one(4), 6, Traversal("forward"))

def by_costs(costs, chunks, ranks=4):
    return traverse(circular(ranks, chunks), 6, Traversal("backward"), costs)

def smaller():
    return traverse(one_to_one(3), 6, Traversal("forward"))

def broken(ranks):
    return ranks / 0

def torn():
    from dataclasses import replace
    made = fixed()
    return replace(made, rows=(made.rows[0][1:], *made.rows[1:]))

def eight():
    return 8

def hungry(layers):
    return layers
"""


@pytest.fixture
def module_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Provide the name of a module that lies in the working directory, another one for every test."""
    name = "own_" + "".join(c for c in tmp_path.name if c.isalnum())
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return name


def test_a_function_makes_the_schedule(module_name: str) -> None:
    def build(function: str, **changes: Any) -> Any:
        return drafted(replace(PIPE, schedule=f"{module_name}:{function}", **changes))

    assert build("towers") == build("towers")
    assert build("towers").rows == traverse(one_to_one(4), 6, Traversal("backward", in_flight=2)).rows
    assert build("fixed").rows == generate("gpipe", 4, 6).rows
    assert build("by_costs", chunks=2).num_stages == 8
    assert load_config(None, [f"pipeline.schedule={module_name}:towers"]).pipeline.schedule == f"{module_name}:towers"


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("smaller", "has 3 ranks, and pipeline.ranks is 4: make them equal"),
        ("broken", "can't be made: ZeroDivisionError: division by zero"),
        ("torn", "F of stage 0, microbatch 0 on rank 0 is missing"),
        ("eight", "returned a int; want a jaxpipe.schedule.Schedule"),
        ("hungry", "needs the option layers"),
        ("tower", "has no function or class 'tower'"),
    ],
)
def test_a_function_that_makes_none(module_name: str, function: str, message: str) -> None:
    with pytest.raises(JaxpipeError) as caught:
        drafted(replace(PIPE, schedule=f"{module_name}:{function}"))
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert f"{module_name}:{function}" in str(caught.value)


def test_a_module_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match=r"^schedule nowhere_at_all:f: no module 'nowhere_at_all'"):
        drafted(replace(PIPE, schedule="nowhere_at_all:f"))
