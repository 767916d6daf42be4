"""From a name or a file to a model's configuration, without a network."""

from __future__ import annotations

import sys
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

from ft_insight.estimate.plan.setup import PlanError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@lru_cache(maxsize=1)
def catalogue() -> tuple[dict[str, Any], ...]:
    """Return the bundled architectures, each with its name, aliases, published parameters and source."""
    text = resources.files("ft_insight.catalog").joinpath("models.toml").read_text(encoding="utf-8")
    return tuple(tomllib.loads(text)["model"])


def find_config(model: str) -> tuple[Any, str]:
    """Return (transformers' configuration, where it comes from) of a model.

    ``model`` is a ``config.json``, a folder that holds one, a model of the bundled catalogue, by its short name or
    its name on the hub, or a hub model whose configuration is in the local cache.

    Raises:
        PlanError: Nothing of that name is here.
    """
    path = Path(model).expanduser()
    if path.is_dir() or path.suffix == ".json":
        return _from_path(path), str(path)
    entry = _entry(model)
    if entry is not None:
        return from_entry(entry), entry["source"]
    config = _from_cache(model)
    if config is None:
        raise PlanError(f"unknown model {model[:80]!r}: {_near(model)}")
    return config, f"{model} in the hub's cache"


def from_entry(entry: dict[str, Any]) -> Any:
    """Return the configuration of a catalogue entry."""
    from transformers import AutoConfig

    facts = {k: v for k, v in entry.items() if k not in ("name", "aliases", "parameters", "source", "model_type")}
    return AutoConfig.for_model(entry["model_type"], **facts, pad_token_id=None)


def _entry(model: str) -> dict[str, Any] | None:
    key = _key(model)
    for entry in catalogue():
        if key in {_key(name) for name in (entry["name"], *entry["aliases"])}:
            return entry
    return None


def _key(name: str) -> str:
    return "".join(name.casefold().replace("_", "-").split())


def _from_path(path: Path) -> Any:
    from transformers import AutoConfig

    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise PlanError(f"{file} does not exist")
    try:
        return AutoConfig.from_pretrained(file, local_files_only=True)
    except Exception as error:
        raise PlanError(f"{file} is no model configuration: {' '.join(str(error).split())[:200]}") from error


def _from_cache(model: str) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(model, local_files_only=True)
    except Exception:  # noqa: BLE001 - OSError, ValueError or one of the hub's own: it is not there
        return None


def _near(model: str) -> str:
    from rapidfuzz import fuzz, process

    names = {_key(name): entry["name"] for entry in catalogue() for name in (entry["name"], *entry["aliases"])}
    hits = process.extract(_key(model), list(names), scorer=fuzz.ratio, score_cutoff=60.0, limit=6)
    near = list(dict.fromkeys(names[hit] for hit, _, _ in hits))[:3]
    elsewhere = "give its config.json or its folder"
    return f"did you mean {', '.join(near)}? or {elsewhere}" if near else elsewhere
