"""``jaxpipe/PUBLIC.md`` lists what each ``__all__`` does."""

from __future__ import annotations

import importlib.util

from tests.support.paths import ROOT


def test_the_page_is_current() -> None:
    path = ROOT / "scripts" / "public_surface.py"
    spec = importlib.util.spec_from_file_location("public_surface", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    written = module.PAGE.read_text(encoding="utf-8")
    assert written == module.page(), "run: python scripts/public_surface.py"
    assert "| `Trainer` |" in written
