"""Test harness: eight emulated CPU devices, strict JAX, reproducible random tests.

Everything JAX must know is set through environment variables before anything can import it, so a test that needs no JAX
(``tests/schedule/``) does not pay for importing it. Child processes started by tests inherit the same settings, as do
the worker processes of pytest-xdist. All of them share one cache of compiled programs, made for this run and deleted after it:
many tests compile the same small stages.

Random tests follow the hypothesis profile ``ci`` (fixed seeds, few examples). ``pytest -m soak`` or
``HYPOTHESIS_PROFILE=soak`` selects ``soak``: fresh seeds and many examples.

``pytest --fast`` keeps no list of tests: one that asks XLA to compile, traces a stage or starts another Python is skipped at
that moment, and the rest of its cases at once. Only what is marked ``compiles`` may. Random tests try a few examples.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import importlib.metadata
import os
import shutil
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests.support.small_programs import collect_seldom, share_context

FAST_EXAMPLES = 5
_FAST = (
    f"skip tests that compile, trace a stage or start another Python (but those marked compiles); {FAST_EXAMPLES} examples of "
    "random tests"
)
DEVICES = 8
"""Emulated CPU devices of a test run."""

_DEVICE_FLAG = "--xla_force_host_platform_device_count"

assert "jax" not in sys.modules, "a pytest plugin imported jax before tests/conftest.py could set its environment"
if _DEVICE_FLAG not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_DEVICE_FLAG}={DEVICES}".strip()
if "--xla_backend_optimization_level" not in os.environ["XLA_FLAGS"]:
    # Tests compile far more than they compute: 2.5 times faster.
    os.environ["XLA_FLAGS"] += " --xla_backend_optimization_level=0"
if importlib.metadata.version("jaxlib").startswith("0.10."):
    # Wrong reductions (jax#39103), as in train/devices.py.
    os.environ["XLA_FLAGS"] += " --xla_cpu_experimental_ynn_fusion_type="
    # Each program that XLA's newer emitters compile sets up MLIR's patterns again: half of what compiling takes. The soak
    # compiles as users do. A worker does as it was started.
    if not {"soak", "--xla_cpu_use_fusion_emitters=true"} & {*sys.argv, *os.environ["XLA_FLAGS"].split()} and (
        "PYTEST_XDIST_WORKER" not in os.environ
    ):
        # XLA compiles a program in up to 32 parts at once, each of which sets up LLVM: one takes half as long in all.
        os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"  # same as jax.config.update("jax_numpy_rank_promotion", "raise")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # XLA's C++ log: errors only
_OWN_CACHE = "JAX_COMPILATION_CACHE_DIR" not in os.environ  # else a worker's, or one that the caller keeps
if _OWN_CACHE:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="jaxpipe-tests-")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("MALLOC_ARENA_TEST", "8")  # the default; keep_heap() does nothing where one is set
collect_seldom()
os.environ["MPLBACKEND"] = "Agg"  # matplotlib draws to files; a test machine has no screen

# Wall-clock limits of single examples and the too_slow check measure how busy the machine is, not our code.
_UNTIMED = hypothesis.settings(deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow], print_blob=True)
hypothesis.settings.register_profile("ci", _UNTIMED, derandomize=True, max_examples=25)
hypothesis.settings.register_profile("soak", _UNTIMED, max_examples=1000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_configure(config: pytest.Config) -> None:
    """``-m soak`` means many fresh examples, unless the environment names another profile."""
    config.option.loadscopereorder = False  # of pytest-xdist: files in the order below
    if config.option.markexpr == "soak" and "HYPOTHESIS_PROFILE" not in os.environ:
        hypothesis.settings.load_profile("soak")


LONG = ("test_divided", "test_loop", "test_vlm", "test_post_validation", "test_context_parallel", "test_chat_runs")
"""Files of few tests that take long: begun last, one process of several would be waited for."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files of long tests first, then those of many; ``--fast`` begins, in each process that has tests."""
    tests = Counter(item.path for item in items)
    items.sort(key=lambda item: (item.path.stem not in LONG, -tests[item.path]))
    if not config.getoption("--fast"):
        return
    _fast.begin()
    for test in (getattr(item, "obj", None) for item in items):
        if hypothesis.is_hypothesis_test(test):
            defaults = test._hypothesis_internal_use_settings
            few = hypothesis.settings(defaults, max_examples=min(FAST_EXAMPLES, defaults.max_examples))
            test._hypothesis_internal_use_settings = few


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fast", action="store_true", help=_FAST)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    _fast.may_compile, _fast.test = item.get_closest_marker("compiles") is not None, item.nodeid.split("[")[0]
    return (yield)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if why := _fast.skipped.get(_fast.test):
        pytest.skip(f"{why} in another case")


class _Fast:
    """Skips the test at hand where it does what takes long; in effect once :meth:`begin` was called."""

    def __init__(self) -> None:
        self.may_compile, self.test = True, ""
        self.skipped: dict[str, str] = {}  # by test without its case, why

    def begin(self) -> None:
        import jax.monitoring

        from jaxpipe.stage.compiled import compile as stages
        from jaxpipe.train.step import TrainStep

        def trace(*arguments: Any) -> Any:
            self._skip("traces a stage")
            return trace_joint(*arguments)

        trace_joint, stages.trace_joint = stages.trace_joint, trace

        def train(*arguments: Any, **options: Any) -> Any:
            self._skip("trains")
            return step(*arguments, **options)

        step, TrainStep.__call__ = TrainStep.__call__, train  # type: ignore[method-assign]
        jax.monitoring.register_event_listener(self._heard)
        sys.addaudithook(self._on_audit)

    def _heard(self, event: str, **_: object) -> None:
        if event == "/jax/compilation_cache/compile_requests_use_cache":
            self._skip("compiles")

    def _on_audit(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "subprocess.Popen" and sys.executable in map(str, args[1]):
            self._skip("starts another Python")

    def _skip(self, why: str) -> None:
        if not self.may_compile:
            self.skipped[self.test] = why
            pytest.skip(why)


_fast = _Fast()


def pytest_unconfigure(config: pytest.Config) -> None:
    if config.getoption("--fast"):
        gc.freeze()  # pytest collects five times, 0.4 s each
    if _OWN_CACHE:
        shutil.rmtree(os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)


@pytest.fixture
def x64() -> Iterator[None]:
    """Use float64 (and int64) in JAX for one test; float32 is the default everywhere else."""
    import jax

    with jax.enable_x64(True):
        yield


@pytest.fixture
def users_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile this test's programs as XLA does for users: bits of different programs must agree."""
    import jax

    import jaxpipe.stage.split.trace  # noqa: F401  # its jitted functions are parts of others, which no compiler sees alone

    jit = jax.jit

    def as_users_do(f: Any, *, compiler_options: Any = None, **options: Any) -> Any:
        return jit(f, compiler_options={"xla_cpu_use_fusion_emitters": True, **(compiler_options or {})}, **options)

    monkeypatch.setattr(jax, "jit", as_users_do)


@pytest.fixture(autouse=True, scope="session")
def _no_pictures() -> Iterator[None]:
    """Runs in this process draw pictures only for tests that put ``run_directory.PICTURES`` back: drawing takes longer than
    training here."""
    with pytest.MonkeyPatch.context() as patch:
        if "jaxpipe.train" in sys.modules:
            patch.setattr("jaxpipe.train.run.run_directory.PICTURES", ())
        yield


@pytest.fixture(autouse=True, scope="session")
def _one_context() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if "jax" in sys.modules:
            share_context(patch.setattr)
        yield


_loaded: dict[tuple[str, tuple[int, ...]], Any] = {}
"""Compiled programs of this process, by their key in JAX's cache and the devices that they are for."""


@pytest.fixture(autouse=True, scope="session")
def _loaded_once() -> Iterator[None]:
    """Read and load what JAX's cache of compiled programs holds once a process, not once a hit: a tenth of the time of a
    small run. Where this jax has another cache, tests only take longer."""
    with pytest.MonkeyPatch.context() as patch:
        if "jax" in sys.modules:
            with contextlib.suppress(ImportError, AttributeError):
                from jax._src import compilation_cache

                load = compilation_cache.get_executable_and_time

                # JAX 0.12 adds the host's callbacks of this very program, if it has some.
                def load_once(key: str, options: Any, backend: Any, devices: Any, *callbacks: Any) -> Any:
                    at = key, tuple(device.id for device in devices)
                    if at not in _loaded or any(callbacks):
                        cached = load(key, options, backend, devices, *callbacks)
                        if any(callbacks):
                            return cached
                        if cached[0] is None:
                            return cached
                        _loaded[at] = cached
                    return _loaded[at]

                patch.setattr(compilation_cache, "get_executable_and_time", load_once)
        yield


@pytest.fixture(autouse=True, scope="session")
def generated_once() -> Iterator[Callable[[], object]]:
    """Cache ``generate`` in this process: equal arguments give the same schedule. The value is a function that clears the
    cache, for tests that want schedules made anew."""
    forget: Callable[[], object] = bool
    with pytest.MonkeyPatch.context() as patch:
        if registry := sys.modules.get("jaxpipe.schedule.families.family"):
            family_named = registry.family_named

            @functools.lru_cache(maxsize=1000)
            def generate(ops: object, name: str, *arguments: Any, **options: Any) -> Any:
                return family_named(name).function(*arguments, **options)

            def cached_family(name: str) -> Any:
                family = family_named(name)
                if not registry.is_shipped(family):
                    return family
                ops = sys.modules["jaxpipe.schedule.ir"].registered_ops()
                function = functools.wraps(family.function)(functools.partial(generate, ops, name))
                return dataclasses.replace(family, function=function)

            patch.setattr(registry, "family_named", cached_family)
            forget = generate.cache_clear
        yield forget


@dataclasses.dataclass
class _Shared:
    """Holds what runs of equal models share. Ids are of models that ``models`` holds."""

    caches: dict[bool, Any]
    """Caches of traces and compiled stages, without and with float64."""

    flops: dict[Any, Any] = dataclasses.field(default_factory=dict)
    models: dict[str, Any] = dataclasses.field(default_factory=dict)
    digests: dict[tuple[int, ...], Any] = dataclasses.field(default_factory=dict)
    steps: dict[Any, Any] = dataclasses.field(default_factory=dict)
    changeable: dict[int, str] = dataclasses.field(default_factory=dict)
    """The module of each model whose code is a test's own: it may change under them."""


_shared: list[_Shared] = []
"""One for this process, until a module's own models or too many memory maps end it."""


@pytest.fixture(scope="module")
def one_build() -> Iterator[None]:
    """Runs of modules with this fixture that train equal models share these, their traces, compiled stages and updates, and
    what is known of the model, as equal stages of one run do: tracing takes longer than training here. What a new process
    makes of them is tested by child processes. Not for tests of what is compiled when, or with ``users_compiler``."""
    import jax

    from jaxpipe.runtime import assembly
    from jaxpipe.stage.compiled.compile import BuildCache
    from jaxpipe.train import assemble, setup, trainer
    from jaxpipe.train.checkpoints import which_model

    if not _shared:
        _shared.append(_Shared(defaultdict(BuildCache)))
    shared = _shared[0]
    models, digests, steps, changeable = shared.models, shared.digests, shared.steps, shared.changeable
    make, costs, digest, step_over, measured = (
        setup.resolve_model,
        assemble.analytic_layer_costs,
        which_model.model_digest,
        setup.step_over,
        trainer.Trainer.measured,
    )

    def resolve_once(name: str, options: Any, offered: Any) -> Any:
        key = f"{name} {sorted(options.items())} {offered}"
        if key not in models:
            models[key] = make(name, options, offered)
            if not name.startswith(("models.", "jaxpipe.models.", "tests.support.")):
                changeable[id(models[key])] = name.partition(":")[0]
        return models[key]

    def digest_once(model: Any, *, training: bool = True) -> Any:
        module = sys.modules.get(changeable.get(id(model.stored), ""))
        code = list(vars(module).values()) if module else []
        at = id(model.stored), training, *map(id, code)
        if at not in digests:
            digests[at] = digest(model, training=training), model.stored, code
        return digests[at][0]

    def step_once(config: Any, pipeline: Any, decay: Any = "role") -> Any:
        """Return a step over the same compiled stages, in the order at hand."""
        pipe, run = config.pipeline, config.run
        if pipeline.ownership.divided or pipe.passes.post_validation != "off":
            return step_over(config, pipeline, decay)
        stages = tuple((at, id(f.functions["F"].jitted)) for at, f in sorted(pipeline.functions.items()))
        key = (
            id(pipeline.model),
            stages,
            repr(config.optimizer),
            run.steps,
            pipe.sharding.zero1,
            pipeline.master_dtype,
            decay,
        )
        if key not in steps:
            steps[key] = step_over(config, pipeline, decay)
        return steps[key].with_pipeline(pipeline)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setup, "resolve_model", resolve_once)
        patch.setattr(setup, "step_over", step_once)
        # One sample a function in place of the median of three: what a busy machine measures decides nothing in tests.
        patch.setattr(trainer.Trainer, "measured", lambda self, _=1: measured(self, 1))
        patch.setattr(assembly, "BuildCache", lambda: shared.caches[jax.config.jax_enable_x64])
        patch.setattr(assemble, "analytic_layer_costs", lambda model, size, _=None: costs(model, size, shared.flops))
        patch.setattr(which_model, "model_digest", digest_once)
        yield
    if changeable:  # another module may have other code of that name
        _shared.clear()


MOST_MAPS = 30_000
"""Memory maps of this process at which compiled programs are forgotten; Linux allows 65,530 (vm.max_map_count) by default."""


@pytest.fixture(autouse=True, scope="module")
def _few_memory_maps() -> Iterator[None]:
    """Every program that XLA compiles for a CPU takes some memory maps; a run of all tests would end in a segmentation fault
    inside the compiler. So after a module that leaves too many, what tests share between modules goes."""
    gc.freeze()  # traced programs of other modules are many small objects: looking through them took 10% of a run
    yield
    gc.unfreeze()
    if "jax" not in sys.modules or _memory_maps() < MOST_MAPS:
        return
    import jax

    tests_folder = str(Path(__file__).parent)
    for module in list(sys.modules.values()):
        if str(getattr(module, "__file__", None) or "").startswith(tests_folder):
            for value in list(vars(module).values()):
                clear = getattr(value, "cache_clear", None)
                if callable(clear):
                    clear()
    _loaded.clear()
    _shared.clear()
    jax.clear_caches()
    gc.collect()


def _memory_maps() -> int:
    try:
        return Path("/proc/self/maps").read_bytes().count(b"\n")
    except OSError:
        return 0
