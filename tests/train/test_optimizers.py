"""Any optax transformation over a pipeline is what it is on one device, or refused in one line."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

from jaxpipe.errors import CheckpointError, ConfigError, RunError
from jaxpipe.train.step import TrainStep
from jaxpipe.train.update.layerwise import LayerwiseOptimizer
from jaxpipe.train.update.optimizer import EmaState, ema_of, learning_rate_of, with_ema
from tests.support import optimizer_cases as cases
from tests.support.optimizer_cases import LAYERS, batches, on_one_device, over_ranks, params, pipeline

pytestmark = pytest.mark.usefixtures("x64")

Make = Callable[[], Any]


def rate() -> optax.Schedule:
    return optax.warmup_cosine_decay_schedule(1e-3, 1e-2, 2, 5)


def matrices(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.ndim >= 2, tree)


def by_layer(tree: Mapping[str, Any]) -> Any:
    """Return a label for a whole layer."""
    return {name: "slow" if name == "embed" else "stop" if name == "wide" else "fast" for name in tree}


def by_leaf(tree: Mapping[str, Any]) -> Any:
    """Return labels by the whole path of a leaf, the layer's name in it."""

    def label(path: Any, leaf: Any) -> str:
        names = [key.key for key in path]
        return "slow" if names[0] == "narrow" and names[-1] == "up" else "stop" if names[-1] == "bias" else "fast"

    return jax.tree_util.tree_map_with_path(label, tree)


def only_embed(layers: Any) -> dict[str, bool]:
    return {name: name == "embed" for name in layers}


GROUPS = {"slow": optax.sgd(1e-3), "fast": optax.adam(1e-2), "stop": optax.set_to_zero()}


def fixed(labels: Callable[[Any], Any]) -> Any:
    """Return labels as a tree, made once for the whole model."""
    return labels({name: cases.params()[name] for name in LAYERS})


EXACT: dict[str, Make] = {
    "sgd momentum": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: optax.adam(rate()),
    "adamw masked": lambda: optax.adamw(rate(), weight_decay=0.1, mask=matrices),
    "adamw masked by a tree": lambda: optax.adamw(1e-2, weight_decay=0.1, mask=matrices(dict(params()))),
    "nadamw": lambda: optax.nadamw(rate()),
    "adamax": lambda: optax.adamax(1e-2),
    "amsgrad": lambda: optax.amsgrad(1e-2),
    "radam": lambda: optax.radam(1e-2),
    "yogi": lambda: optax.yogi(1e-2),
    "adabelief": lambda: optax.adabelief(1e-2),
    "adagrad": lambda: optax.adagrad(1e-2),
    "adadelta": lambda: optax.adadelta(1.0),
    "rmsprop": lambda: optax.rmsprop(1e-2, momentum=0.9),
    "rprop": lambda: optax.rprop(1e-2),
    "lion": lambda: optax.lion(rate()),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=8),
    "lamb": lambda: optax.lamb(1e-2),
    "lars": lambda: optax.lars(1.0),
    "fromage": lambda: optax.fromage(1e-2),
    "novograd": lambda: optax.novograd(1e-2),
    "sm3": lambda: optax.sm3(1e-2),
    "muon": lambda: contrib.muon(1e-2),
    "ademamix": lambda: contrib.ademamix(1e-2),
    "adopt": lambda: contrib.adopt(1e-2),
    "cocob": lambda: contrib.cocob(),
    "madgrad": lambda: contrib.madgrad(1e-2),
    "schedule free": lambda: contrib.schedule_free_adamw(1e-2, warmup_steps=1),
    "plateau": lambda: optax.chain(optax.adam(1e-2), contrib.reduce_on_plateau(0.5, patience=1, rtol=1.0)),
    "sharpness-aware": lambda: contrib.sam(optax.adam(1e-2), optax.sgd(0.1), sync_period=2),
    "clipped by value": lambda: optax.chain(optax.clip(0.01), optax.adam(1e-2)),
    "clipped by block": lambda: optax.chain(optax.clip_by_block_rms(0.01), optax.sgd(0.1)),
    "clipped adaptively": lambda: optax.chain(optax.adaptive_grad_clip(0.01), optax.sgd(0.1)),
    "centralized": lambda: optax.chain(optax.centralize(), optax.adam(1e-2)),
    "zero nans": lambda: optax.chain(optax.zero_nans(), optax.adam(1e-2)),
    "noise": lambda: optax.noisy_sgd(0.1, eta=0.5, key=7),
    "averaged gradients": lambda: optax.chain(optax.ema(0.9), optax.sgd(0.1)),
    "accumulated": lambda: optax.MultiSteps(optax.adam(1e-2), 2),
    "accumulated chain": lambda: optax.chain(optax.clip(0.1), optax.MultiSteps(optax.lion(1e-2), 2).gradient_transformation()),
    "injected": lambda: optax.inject_hyperparams(optax.adamw, static_args="mask")(learning_rate=rate(), mask=matrices),
    "every other step": lambda: optax.conditionally_mask(optax.adam(1e-2), lambda step: step % 2 == 0),
    "labels of layers": lambda: optax.multi_transform(GROUPS, by_layer),
    "labels of leaves": lambda: optax.multi_transform(GROUPS, by_leaf),
    "a tree of labels of layers": lambda: optax.multi_transform(GROUPS, fixed(by_layer)),
    "a tree of labels of leaves": lambda: optax.partition(GROUPS, fixed(by_leaf)),
    "masked": lambda: optax.chain(optax.adam(1e-2), optax.masked(optax.scale(0.1), by_leaf_mask)),
    "a tree of frozen layers": lambda: optax.chain(optax.adam(1e-2), optax.transforms.freeze(only_embed(LAYERS))),
    "named chain": lambda: optax.named_chain(("decay", optax.add_decayed_weights(0.1)), ("sgd", optax.sgd(rate()))),
    "ema of parameters": lambda: with_ema(optax.adam(1e-2), 0.9),
}  # fmt: skip

NEEDS = "give the training step clip_norm="
REFUSED: dict[str, tuple[Make, str]] = {
    "clipped by norm": (lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1)), f"clip_by_global_norm .*{NEEDS}"),
    "clipped inside": (lambda: optax.MultiSteps(optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1)), 2), NEEDS),
    "only finite": (lambda: optax.apply_if_finite(optax.sgd(0.1), 3), "apply_if_finite .*max_skipped"),
    "skips": (lambda: optax.MultiSteps(optax.sgd(0.1), 2, True, optax.skip_not_finite), "skip_not_finite .*max_skipped"),
    "normalized": (lambda: optax.chain(optax.normalize_by_update_norm()), "mixes layers: normalize_by_update_norm"),
    "polyak": (lambda: optax.polyak_sgd(), "mixes layers: scale_by_polyak"),
    "prodigy": (lambda: contrib.prodigy(), "mixes layers: prodigy"),
    "d-adaptation": (lambda: contrib.dadapt_adamw(), "mixes layers: dadapt_adamw"),
    "dog": (lambda: contrib.dog(), "mixes layers: scale_by_dog"),
    "mechanic": (lambda: contrib.mechanize(optax.sgd(0.1)), "mixes layers: mechanize"),
    "l-bfgs": (lambda: optax.scale_by_lbfgs(), "mixes layers: scale_by_lbfgs .*treats each layer by itself"),
    "line search": (lambda: optax.lbfgs(), "update fails: TypeError: .*'value_fn'; .*go into Trainer"),
    "sophia": (lambda: contrib.sophia(1e-2), "update fails: ValueError: obj_fn must be provided"),
    "a tree of other labels": (lambda: optax.partition(GROUPS, {"embed": "slow"}), r"init fails: Value.*as lambda tree: \{"),
    "unknown label": (lambda: optax.partition({"a": optax.sgd(0.1)}, lambda tree: dict.fromkeys(tree, "b")), "no corresp"),
    "a function": (lambda: lambda g: g, "is a function without init and update; want an optax transformation"),
    "a factory": (lambda: optax.adamw, "is a function without init and update"),
    "prints": (lambda: optax.stateless(lambda g, p: (jax.debug.print("step"), g)[1]), "side effect .*remove it"),
    "grows": (lambda: optax.GradientTransformation(lambda p: (), lambda g, s, p=None: (g, (*s, 1))), "another structure"),
    "widens": (lambda: optax.GradientTransformation(lambda p: jnp.int32(0), lambda g, s, p: (g, s + 0.5)), "keep shape and"),
}  # fmt: skip


def by_leaf_mask(tree: Any) -> Any:
    return jax.tree.map(lambda label: label == "slow", by_leaf(tree))


def assert_close(got: Any, expected: Any) -> None:
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-5), got, expected
    )


SIMILAR = (
    "nadamw", "adamax", "amsgrad", "radam", "yogi", "adabelief", "adagrad", "adadelta", "rmsprop", "rprop", "fromage", "lars",
    "sm3", "lamb", "ademamix", "adopt", "cocob", "madgrad", "averaged gradients", "accumulated chain", "named chain",
    "novograd", "clipped by block", "clipped adaptively", "centralized", "adam", "adamw masked by a tree", "zero nans",
    "sharpness-aware", "a tree of labels of layers", "a tree of frozen layers", "masked", "every other step",
    "noise", "plateau", "clipped by value", "schedule free",
)  # fmt: skip
"""Like others in what the pipeline sees of them: with ``-m soak``."""


def name_params(names: Any, soak: Any) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.soak if name in soak else ()) for name in names]


@pytest.mark.parametrize("name", name_params(EXACT, SIMILAR))
def test_three_steps_equal_one_device(name: str) -> None:
    optimizer = EXACT[name]()
    got, state, metrics = over_ranks(TrainStep(pipeline(), optimizer))
    expected = on_one_device(EXACT[name]())
    assert_close(got, expected)
    assert np.abs(np.asarray(expected["head"]["kernel"]) - params()["head"]["kernel"]).max() > 1e-4, "something happens"
    assert bool(metrics.applied)
    assert bool(metrics.finite)
    if "tree" not in name:
        embed_state = jax.eval_shape(optimizer.init, {"embed": got["embed"]})
        assert jax.tree.structure(state["embed"]) == jax.tree.structure(embed_state), "as if there were no other layer"


@pytest.mark.parametrize("name", REFUSED)
def test_what_mixes_layers_or_fails_is_refused_in_one_line(name: str) -> None:
    make, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message) as caught:
        TrainStep(pipeline(), make())
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 800


# -- devices that see pieces ----------------------------------------------------------------------------------------------

IN_PIECES = ("adamw masked", "labels of leaves", "ema of parameters")
ELEMENTWISE = (
    *IN_PIECES, "schedule free", "sgd momentum", "lion", "accumulated", "injected", "plateau", "labels of layers", "masked",
    "cocob", "adopt", "sharpness-aware", "a tree of frozen layers", "every other step", "nadamw", "madgrad",
    "averaged gradients",
)  # fmt: skip
ACROSS = (
    "adafactor", "lamb", "lars", "fromage", "novograd", "sm3", "muon", "clipped by block", "clipped adaptively", "centralized",
    "zero nans", "noise",
)  # fmt: skip


@pytest.mark.parametrize(
    ("dp", "tp", "zero1"),
    [(2, 2, True), pytest.param(2, 1, True, marks=pytest.mark.soak), pytest.param(1, 2, False, marks=pytest.mark.soak)],
)
@pytest.mark.parametrize("name", name_params(ELEMENTWISE, ELEMENTWISE[len(IN_PIECES) :]))
def test_pieces_are_updated_as_the_whole_on_one_device(name: str, dp: int, tp: int, zero1: bool) -> None:
    got, _, _ = over_ranks(TrainStep(pipeline(dp, tp), EXACT[name](), zero1=zero1))
    assert_close(got, on_one_device(EXACT[name]()))


@pytest.mark.parametrize("name", ACROSS)
def test_what_looks_across_elements_is_refused_where_there_are_pieces(name: str) -> None:
    for zero1 in (False, True):
        with pytest.raises(ConfigError, match=r"elements.*zero1=false.*tp=1") as caught:
            TrainStep(pipeline(2, 2), EXACT[name](), zero1=zero1)
        assert "\n" not in str(caught.value)
    if name != "noise":
        only_whole = optax.masked(EXACT[name](), lambda tree: jax.tree_util.tree_map_with_path(_is_whole, tree))
        TrainStep(pipeline(2, 2), only_whole)  # tensor-parallel shards have these whole


def _is_whole(path: Any, leaf: Any) -> bool:
    return path[-1].key not in ("up", "down")


def test_the_shapes_of_the_real_parameters_decide() -> None:
    """Factored second moments look across a matrix from 128 rows and columns on; the largest here has 8 rows."""
    TrainStep(pipeline(2, 2), optax.scale_by_factored_rms(), zero1=True)
    with pytest.raises(ConfigError, match="scale_by_factored_rms"):
        TrainStep(pipeline(2, 2), optax.scale_by_factored_rms(min_dim_size_to_factor=8), zero1=True)


# -- random labels, random cuts -------------------------------------------------------------------------------------------


def check_labels(seed: int) -> None:
    """A random label for each leaf or layer, as a tree or as a function; layers in random groups, each updated by itself."""
    rng = random.Random(seed)
    kinds: dict[str, Any] = {"a": optax.sgd(0.1), "b": optax.trace(0.5), "c": optax.set_to_zero()}
    tree = {
        name: rng.choice("abc") if rng.random() < 0.3 else jax.tree.map(lambda _: rng.choice("abc"), params()[name])
        for name in LAYERS
    }
    labels = tree if rng.random() < 0.5 else lambda t: {name: tree[name] for name in t}
    optimizer = optax.chain(optax.partition(kinds, labels), optax.scale(-1.0))
    all_params = dict(params())
    grads = jax.tree.map(lambda p: p + seed, all_params)
    state = optimizer.init(all_params)
    _, state = optimizer.update(grads, state, all_params)
    expected, _ = optimizer.update(grads, state, all_params)
    layerwise = LayerwiseOptimizer.trace(
        optimizer, jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), all_params)
    )
    group_of = {name: rng.randrange(3) for name in LAYERS}
    for group in set(group_of.values()):
        names = [name for name in LAYERS if group_of[name] == group]
        part, group_params, own_grads = (
            layerwise.part(names),
            *({n: tree[n] for n in names} for tree in (all_params, grads)),
        )
        _, part_state = part.update(own_grads, part.init(group_params), group_params, {})
        got, _ = part.update(own_grads, part_state, group_params, {})
        assert_close(got, {n: expected[n] for n in names})


@pytest.mark.parametrize("seed", range(15))
def test_random_labels_choose_the_same_leaves_in_any_group_of_layers(seed: int) -> None:
    check_labels(seed)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(15, 200))
def test_200_random_labels_choose_the_same_leaves_in_any_group_of_layers(seed: int) -> None:
    check_labels(seed)


# -- arguments of an update -----------------------------------------------------------------------------------------------


def heated() -> optax.GradientTransformationExtraArgs:
    """Scales by an extra argument that it must get, and by the loss."""

    def update(grads: Any, state: Any, p: Any = None, *, heat: Any, value: Any) -> Any:
        return jax.tree.map(lambda g: -g * jnp.sum(jnp.asarray(heat)) * value, grads), state

    return optax.GradientTransformationExtraArgs(lambda p: (), update)


def test_extra_arguments_reach_the_update() -> None:
    step = TrainStep(pipeline(), heated(), extra={"heat": 0.5})
    assert_close(over_ranks(step)[0], on_one_device(heated(), heat=0.5))
    assert_close(over_ranks(step, heat=0.1)[0], on_one_device(heated(), heat=0.1))
    assert_close(over_ranks(step, heat=np.array([0.1, 0.2]))[0], on_one_device(heated(), heat=np.array([0.1, 0.2])))


@pytest.mark.parametrize(
    ("optimizer", "extra", "message"),
    [
        (heated(), {}, "missing 1 required keyword-only argument: 'heat'; arguments that it needs go into Trainer"),
        (optax.sgd(0.1), {"heat": "hot"}, "extra argument 'heat' of the optimizer is a str; want a number or an array"),
        (optax.scale_by_sign(), {"heat": 1.0}, "takes no argument 'heat'; leave it out of extra="),
    ],
)
def test_wrong_extra_arguments_are_refused(optimizer: Any, extra: Mapping[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainStep(pipeline(), optimizer, extra=extra)


# -- learning rate, averaged parameters, what a step tells ----------------------------------------------------------------


def test_metrics_tell_the_learning_rate() -> None:
    schedule = rate()
    expected = [float(schedule(k)) for k in range(3)]
    for step in (
        TrainStep(pipeline(), optax.inject_hyperparams(optax.sgd)(learning_rate=schedule)),
        TrainStep(pipeline(), optax.chain(optax.clip(1.0), optax.sgd(schedule)), learning_rate=schedule),
    ):
        state, rates = step.init(params()), []
        for batch in batches():
            state, metrics = step(state, batch)
            assert metrics.learning_rate is not None
            rates.append(metrics.learning_rate)
        np.testing.assert_allclose(np.array(rates), expected, rtol=1e-6)
    assert float(over_ranks(TrainStep(pipeline(), optax.sgd(0.1), learning_rate=0.1))[2].learning_rate) == np.float32(
        0.1
    )  # type: ignore[arg-type]
    assert over_ranks(TrainStep(pipeline(), optax.sgd(0.1)))[2].learning_rate is None


def test_a_schedule_that_the_optimizer_does_not_follow_is_refused() -> None:
    with pytest.raises(ConfigError, match="learning_rate"):
        TrainStep(pipeline(), optax.sgd(0.1), learning_rate=rate())


def test_averaged_parameters_follow_the_updates() -> None:
    plain = TrainStep(pipeline(), optax.sgd(0.5))
    state, average = plain.init(params()), dict(params())
    for batch in batches():
        state, _ = plain(state, batch)
        average = jax.tree.map(
            lambda e, p: 0.9 * np.asarray(e) + 0.1 * np.asarray(p), average, plain.by_layer(state)[0]
        )
    step = TrainStep(pipeline(), with_ema(optax.sgd(0.5), 0.9))
    jax.tree.map(np.testing.assert_array_equal, ema_of(step.by_layer(step.init(params()))[1]), dict(params()))
    got, optimizer, _ = over_ranks(step)
    jax.tree.map(np.testing.assert_array_equal, got, plain.by_layer(state)[0])
    assert_close(ema_of(optimizer), average)
    assert isinstance(optimizer["embed"], EmaState)


def test_averages_that_can_not_be_are_refused() -> None:
    for decay in (1.0, -0.1, float("nan")):
        with pytest.raises(ConfigError, match="want 0 <= decay < 1"):
            with_ema(optax.sgd(0.1), decay)
    with pytest.raises(ConfigError, match="layer embed holds no averaged parameters"):
        ema_of({"embed": optax.sgd(0.1).init(params()["embed"])})


def test_several_injected_rates_are_no_one_rate() -> None:
    injected = optax.inject_hyperparams(optax.sgd)
    one, two = injected(learning_rate=0.1), optax.chain(injected(learning_rate=0.1), injected(learning_rate=0.2))
    assert float(learning_rate_of(one.init(jnp.zeros(1)))) == pytest.approx(0.1)  # type: ignore[arg-type]
    assert learning_rate_of(two.init(jnp.zeros(1))) is None
    assert learning_rate_of(optax.adam(0.1).init(jnp.zeros(1))) is None


def test_an_update_that_overflows_is_told() -> None:
    """The gradient is finite, and so the update applied; the parameters are not finite afterwards, those of one leaf."""
    step = TrainStep(pipeline(), optax.chain(optax.sgd(0.1), optax.masked(optax.scale(np.inf), by_leaf_mask)))
    state, metrics = step(step.init(params()), batches()[0])
    assert (bool(metrics.applied), bool(metrics.finite)) == (True, False)
    after, _ = step.by_layer(state)
    assert not np.isfinite(after["narrow"]["mlp"]["up"]).all()
    _, metrics = step(state, batches()[1])
    assert (bool(metrics.applied), bool(metrics.finite)) == (False, False), "and stay so"


def test_a_state_that_was_used_is_refused() -> None:
    step = TrainStep(pipeline(), optax.sgd(0.1))
    state = step.init(params())
    step(state, batches()[0])
    with pytest.raises(RunError, match=r"the state after step 0 is used up: .* keep the new one") as caught:
        step(state, batches()[0])
    assert "\n" not in str(caught.value)


# -- stored states --------------------------------------------------------------------------------------------------------


def plain_trees(tree: Any) -> Any:
    """Return named tuples as dicts and tuples as lists, as a checkpoint gives them back without ``like``."""
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return {k: plain_trees(v) for k, v in zip(tree._fields, tree, strict=True)}
    if isinstance(tree, dict):
        return {k: plain_trees(v) for k, v in tree.items()}
    return [plain_trees(v) for v in tree] if isinstance(tree, tuple | list) else tree


def unnamed(state: Any, layer: str) -> Any:
    """Return a layer's state as jaxpipe 0.1.0 kept it: of the layer's leaves, without its name."""
    if isinstance(state, dict) and state.keys() == {layer}:
        return state[layer]
    if not isinstance(state, tuple | dict):
        return state
    children, structure = jax.tree.flatten(state, is_leaf=lambda x: x is not state)
    return jax.tree.unflatten(structure, [unnamed(c, layer) for c in children])


@pytest.mark.parametrize("name", ["adamw masked", "labels of leaves", "noise"])
def test_stored_states_go_on_whatever_their_trees_are_made_of(name: str) -> None:
    step = TrainStep(pipeline(), EXACT[name]())
    state = step.init(params())
    for batch in batches()[:2]:
        state, _ = step(state, batch)
    stored_params, optimizer = jax.device_get(step.by_layer(state))
    straight, _ = step(state, batches()[2])
    expected = jax.device_get(step.by_layer(straight))
    for stored in (
        optimizer,
        {layer: plain_trees(tree) for layer, tree in optimizer.items()},
        {layer: plain_trees(unnamed(tree, layer)) for layer, tree in optimizer.items()},
    ):
        resumed, _ = step(step.init(stored_params, stored, step=2), batches()[2])
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(step.by_layer(resumed)), expected)


def test_states_of_another_optimizer_are_refused() -> None:
    step = TrainStep(pipeline(), optax.adam(0.1))
    _, good = step.by_layer(step.init(params()))
    half = jax.tree.map(lambda a: a[:1], good["embed"][0].mu)
    for embed, message in (
        (optax.sgd(0.1).init({"embed": params()["embed"]}), "layer embed has no 0/count"),
        (
            (good["embed"][0]._replace(mu=half), good["embed"][1]),
            r"has 0/mu/embed/table as float64\[1, 8\], the optimizer wants",
        ),
        ((*good["embed"], optax.EmptyState(), jnp.zeros(1)), "has 3, which the optimizer does not"),
        ((good["embed"][0]._replace(count=jnp.int32(5)), good["embed"][1]), "has another 0/count than other layers"),
    ):
        with pytest.raises(CheckpointError, match=message) as caught:
            step.init(params(), {**good, "embed": embed})
        assert "\n" not in str(caught.value)
