"""Compiled programs are kept in a folder, XLA and malloc are set for a CPU, and equal stages are one program."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
from jax._src import compiler

from jaxpipe.runtime.assembly import Assembly
from jaxpipe.schedule import circular
from jaxpipe.train import devices
from jaxpipe.train.run.compiling import use_compile_cache
from models.gpt import GPT

_OPTIONS = (
    "jax_compilation_cache_dir", "jax_enable_compilation_cache", "jax_persistent_cache_min_compile_time_secs",
)  # fmt: skip


@pytest.fixture
def unset(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """JAX without a cache, and a home folder of the test's own."""
    before = {name: getattr(jax.config, name) for name in _OPTIONS}
    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", raising=False)
    yield tmp_path
    for name, value in before.items():
        jax.config.update(name, value)


def _folder() -> str | None:
    return jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined, no-any-return]


def test_tests_have_a_cache_of_their_own() -> None:
    before = _folder()
    assert before == os.environ["JAX_COMPILATION_CACHE_DIR"]
    assert use_compile_cache("auto") == ""
    assert _folder() == before


def test_the_default_is_a_folder_of_the_user_alone(unset: Path) -> None:
    assert use_compile_cache("auto") == ""
    folder = Path(_folder() or "")
    assert folder.parent == unset / "jaxpipe" / "compiled"
    assert folder.name.startswith(f"jax-{jax.__version__}-")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 0  # type: ignore[attr-defined]


def test_a_folder_by_name_and_off(unset: Path) -> None:
    assert use_compile_cache(str(unset / "mine")) == ""
    assert _folder() == str(unset / "mine")
    assert use_compile_cache("off") == ""
    assert not jax.config.jax_enable_compilation_cache  # type: ignore[attr-defined]


def test_what_others_could_have_written_is_not_loaded(unset: Path) -> None:
    (open_to_all := unset / "open").mkdir()
    open_to_all.chmod(0o777)
    assert "others than you can write" in use_compile_cache(str(open_to_all))
    (unset / "file").write_text("", encoding="utf-8")
    assert use_compile_cache(str(unset / "file")).startswith("compiled programs are not kept: ")
    assert _folder() is None


def test_cpu_flags_are_set_unless_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices.importlib.metadata, "version", lambda _: "0.10.2")
    emulated, without = "--xla_force_host_platform_device_count=2", "--xla_cpu_experimental_ynn_fusion_type="
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.delenv("NPROC", raising=False)
    devices.request_devices(2)
    assert os.environ["XLA_FLAGS"].split() == [emulated, without]
    assert devices.cpu_settings(True) == f"on a CPU: malloc keeps what is freed; XLA_FLAGS={emulated} {without}"
    monkeypatch.setenv("XLA_FLAGS", f"{without}LIBRARY_FUSION_TYPE_DOT")
    devices.request_devices(2)
    assert os.environ["XLA_FLAGS"].split() == [f"{without}LIBRARY_FUSION_TYPE_DOT", emulated]
    monkeypatch.setattr(devices.importlib.metadata, "version", lambda _: "0.11.0")
    monkeypatch.setenv("XLA_FLAGS", "")
    devices.request_devices(2)
    assert os.environ["XLA_FLAGS"].split() == ["--xla_force_host_platform_device_count=2"], (
        "others may not know the flags"
    )


def test_several_processes_have_threads_for_what_comes_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA's pool was full of calls that waited for room, and the results that they waited for could not come in: v-zb on dp 2
    in 4 processes on 2 cores stood still (the soak runs it)."""
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.delenv("NPROC", raising=False)
    devices.request_devices(3)
    assert "NPROC" not in os.environ
    devices.request_devices(3, processes=2)
    assert devices.cpu_settings(False).endswith(f"; NPROC={os.environ['NPROC']}")
    assert int(os.environ["NPROC"]) == max(3, len(os.sched_getaffinity(0))) + 3


@pytest.mark.parametrize(("name", "value"), [("MALLOC_TOP_PAD_", "0"), ("GLIBC_TUNABLES", "glibc.malloc.mmap_max=1")])
def test_malloc_is_the_users_own(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    assert not devices.keep_heap()


def test_equal_stages_are_one_program_on_every_rank() -> None:
    """Same text and same name, so that JAX's cache, which leaves out the devices on GPUs, compiles it once."""
    model = GPT(vocab_size=8, d_model=8, num_layers=2, num_heads=2, seq_len=4, mlp_ratio=2)
    stages = Assembly.of(model, circular(4, 1), microbatch_size=2, boundaries=[(0, 1), (1, 2), (2, 3), (3, 5)]).stages
    a, b = stages[1].functions, stages[2].functions
    assert a["F"].avals_in[0].sharding != b["F"].avals_in[0].sharding
    for op in a:
        texts = [f.jitted.lower(*f.avals_in).as_text() for f in (a[op], b[op])]
        assert texts[0] == texts[1]
        assert f"{op}_stage1" in texts[0]


def test_processes_keep_what_they_compile_in_folders_of_their_own(unset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX itself writes in the first process only: the others compiled all of it again in every run."""
    from jax.experimental.compilation_cache import compilation_cache

    monkeypatch.setattr("jax._src.distributed.global_state.process_id", 2)
    monkeypatch.setattr("jax._src.compiler._cache_write", compiler._cache_write)  # put back afterwards
    assert use_compile_cache(str(unset / "mine"), 2) == ""
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    compilation_cache.reset_cache()
    jax.jit(lambda x: x * 3.5 + 1)(1.0)
    compilation_cache.reset_cache()
    assert list((unset / "mine" / "process-2").glob("jit__lambda*"))
