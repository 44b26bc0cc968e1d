"""Models by name and with options: what a user gets wrong is named in one line, with what would work."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxpipe.errors import ConfigError, StageError
from jaxpipe.stage.model.reference import apply_model, init_params, resolve_model
from models.gpt import GPT
from models.llama import Llama

TINY = {"vocab_size": 29, "d_model": 16, "num_layers": 1, "num_heads": 4, "seq_len": 8}


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("gpt", {"num_heads": 5}, "num_heads is 5, which does not divide d_model 16; use one of 1, 2, 4, 8, 16"),
        ("gpt", {"num_layers": 0}, "num_layers is 0; want 1 or more"),
        ("gpt", {"vocab_size": -1}, "vocab_size is -1; want 1 or more"),
        ("gpt", {"dropout": 1.0}, "dropout is 1.0; want 0 or more and less than 1"),
        ("gpt", {"dtype": "float16"}, "dtype is float16, which needs loss scaling"),
        ("gpt", {"dtype": "float64"}, "dtype is float64, which JAX computes in float32 unless"),
        ("gpt", {"d_model": "16"}, "d_model is '16' (str); want int"),
        ("gpt", {"d_model": True}, "d_model is True (bool); want int"),
        ("gpt", {"seq_len": 8.0}, "seq_len is 8.0 (float); want int"),
        ("gpt", {"num_head": 4}, "no option 'num_head'; did you mean 'num_heads'?"),
        ("gpt", {"norm_eps": 0}, "norm_eps is 0.0; want a small positive number"),
        ("llama", {"num_heads": 3}, "num_heads is 3, which does not divide d_model 16; use one of 1, 2, 4, 8"),
        ("llama", {"num_heads": 16}, "d_model / num_heads = 1 dimensions, and rotary positions need an even number"),
        ("llama", {"num_kv_heads": 3}, "num_kv_heads is 3, which does not divide num_heads 4; use one of 1, 2, 4"),
        ("llama", {"num_kv_heads": 0}, "num_kv_heads is 0; want 1 or more"),
        ("llama", {"num_kv_heads": "2"}, "num_kv_heads is '2' (str); want int or nothing"),
        ("llama", {"d_model": 15, "num_heads": 1}, "d_model is 15; rotary positions need an even number"),
        ("llama", {"rope_theta": 0.5}, "rope_theta is 0.5; want a number above 1"),
        ("llama", {"mlp_size": -3}, "mlp_size is -3; want 1 or more"),
        ("llama", {"mlp_ratio": 4}, "no option 'mlp_ratio'; did you mean"),
        ("gpt", {"vocab_size": 10**18}, "vocab_size is 1000000000000000000; want at most 2147483647"),
        ("gpt", {"mlp_ratio": 10**10}, "mlp_ratio is 10000000000; want at most 1048576"),
        ("gpt", {"num_layers": 10**6}, "num_layers is 1000000; want at most 4096"),
        ("gpt", {"num_heads": 999_983, "d_model": 2**20}, "does not divide d_model 1048576; use one of 1, 2, 4, "),
        ("llama", {"d_model": 2**62}, "d_model is 4611686018427387904; want at most 1048576"),
    ],
)
def test_bad_options_get_one_clear_line(kind: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        {"gpt": GPT, "llama": Llama}[kind](**{**TINY, **options})
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_models_resolve_by_name() -> None:
    assert resolve_model("models.gpt:GPT", TINY).name == "gpt"
    assert resolve_model("models.llama:Llama", TINY).vocab_size == 29


@pytest.fixture
def own_module(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "my_models.py").write_text(
        "from functools import partial\nimport models.gpt\n"
        "def Small(width, depth=2):\n"
        "    return models.gpt.GPT(d_model=width, num_layers=depth, num_heads=1)\n"
        "def NotAModel():\n    return 3\n"
        "def Wrong():\n    return {}['width']\n"
        "class Unsaid(dict):\n    pass\n"
        "number = 3\n"
    )
    (tmp_path / "my_broken.py").write_text("import no_such_package\n")
    (tmp_path / "my_typo.py").write_text("def f(:\n")
    (tmp_path / "my_exit.py").write_text("import sys\nsys.exit(3)\n")
    monkeypatch.chdir(tmp_path)  # not on sys.path: found as the working directory
    monkeypatch.setattr("sys.path", list(sys.path))
    yield


@pytest.mark.usefixtures("own_module")
@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("models.gpt", {}, "model name 'models.gpt'; want module:attribute, as in models.gpt:GPT"),
        (":GPT", {}, "want module:attribute"),
        ("models.gtp:GPT", {}, "no module 'models.gtp'"),
        ("models.gtp:GPT", {}, "did you mean 'gpt'?"),
        ("modells.gpt:GPT", {}, "no module 'modells'"),
        ("models.gpt:GTP", {}, "models.gpt has no function or class 'GTP'; did you mean 'GPT'?"),
        ("models.gpt:GPT", {"n_layers": 1}, "models.gpt:GPT has no option 'n_layers'; did you mean 'num_layers'?"),
        ("my_models:Small", {"widht": 8}, "my_models:Small has no option 'widht'; did you mean 'width'?"),
        ("my_models:Small", {}, "my_models:Small needs the option width; give width=…"),
        ("my_models:NotAModel", {}, "returned a int; want a jaxpipe.stage.model.layer.Model"),
        (
            "logging:basicConfig",
            {"filename": "x"},
            "logging is part of Python; name a function of yours that makes a model",
        ),
        ("my_models:partial", {}, "partial is of functools; name a function or class that my_models defines"),
        ("my_broken:Anything", {}, "my_broken imports no_such_package, which is not installed"),
        ("my_typo:f", {}, "my_typo can't be imported: SyntaxError: invalid syntax (my_typo.py, line 1)"),
        ("my_exit:f", {}, "my_exit can't be imported: SystemExit: 3 (my_exit.py, line 2)"),
        ("my_models:Wrong", {}, "my_models:Wrong can't be made: KeyError: 'width' (my_models.py, line 8)"),
        ("my_models:Unsaid", {}, "Unsaid does not say what arguments it takes"),
        ("my_models:number", {}, "my_models has no function or class 'number'; Known: Small, NotAModel, Wrong, Unsaid"),
        ("builtins:dict", {}, "builtins is part of Python"),
        ("json:loads", {}, "json is part of Python"),
        ("os.path:join", {}, "os is part of Python"),
    ],
)
def test_bad_model_names_get_one_clear_line(name: str, options: dict[str, Any], message: str) -> None:
    assert resolve_model("my_models:Small", {"width": 8}).name == "gpt"
    with pytest.raises(ConfigError) as error:
        resolve_model(name, options)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_the_standard_library_is_neither_called_nor_imported(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    with pytest.raises(ConfigError, match="logging is part of Python"):
        resolve_model("logging:basicConfig", {"filename": str(precious), "filemode": "w"})
    assert precious.read_text() == "mine"
    with pytest.raises(ConfigError, match="antigravity is part of Python"):
        resolve_model("antigravity:fly", {})
    assert "antigravity" not in sys.modules, "it opens a web browser"


def test_missing_data_and_parameters_are_named() -> None:
    model = GPT(**TINY)
    params = init_params(model, 0)
    batch = {name: jnp.zeros(s.shape, s.dtype) for name, s in model.batch_spec(2).items()}
    with pytest.raises(StageError, match="'weights'"):
        apply_model(model, params, {name: batch[name] for name in ("tokens", "targets")})
    with pytest.raises(StageError, match="no parameters for layer head of gpt"):
        apply_model(model, {name: p for name, p in params.items() if name != "head"}, batch)
    head = dataclasses.replace(model.layers[2], tied={("kernel",): ("embed", ("words",))})
    adrift = dataclasses.replace(model, layers=(*model.layers[:2], head, model.layers[3]))
    with pytest.raises(StageError, match=r"'head'.*embed/words"):
        apply_model(adrift, params, batch)


def test_a_raw_key_means_the_same_as_a_typed_one() -> None:
    model = GPT(**TINY, dropout=0.3)
    params = init_params(model, 0)
    batch = {name: jnp.ones(s.shape, s.dtype) for name, s in model.batch_spec(2).items()}
    total = jax.jit(lambda key: apply_model(model, params, batch, key)[0])
    key = jax.random.key(3)
    assert total(key) == total(jax.random.key_data(key))
